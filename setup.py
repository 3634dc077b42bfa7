"""Build `fusedops._C` against the torch that will run, or say in one line why that is impossible.

Environment:
    FUSEDOPS_CUDA=auto|1|0   auto: CUDA kernels when nvcc and a CUDA torch are there; 1: always, or fail; 0: never.
    FUSEDOPS_NATIVE=0        no C++ at all: Triton and plain torch only.
    FUSEDOPS_WERROR=1        nvcc warnings, register spills and local memory are errors (CI).
    TORCH_CUDA_ARCH_LIST     architectures, e.g. "8.0;9.0+PTX"; default: those of the visible GPUs, else ARCHS.
    CUDA_HOME, CXX, MAX_JOBS as everywhere.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
ARCHS = "7.5 8.0 9.0 10.0 12.0+PTX"
MIN_TORCH = (2, 11)
GIB_PER_JOB = 2  # the peak of one compiler process, with room to spare
stamp = runpy.run_path(str(ROOT / "fusedops" / "_build.py"))  # the reader of the stamp says what is in it
write_text = runpy.run_path(str(ROOT / "fusedops" / "_files.py"))["write_text"]


def say(message: str) -> None:
    """Print one line of the build's own (pip shows it with -v and on failure)."""
    print(f"fusedops: {message}", file=sys.stderr, flush=True)


def refuse(message: str) -> SystemExit:
    """Return the error that ends the build with one line saying what to do."""
    return SystemExit(f"\nfusedops: {message}\n")


def version(text: str) -> tuple[int, int]:
    """Return (major, minor) of "2.13.0+cpu", "13.0" or "12.2.0"."""
    major, minor = re.match(r"(\d+)\.?(\d+)?", text).groups()
    return int(major), int(minor or 0)


# ---- what is on this machine ---------------------------------------------------------------------


def import_torch():
    """Import the environment's torch, also from inside pip's build isolation.

    pip isolates by running this very interpreter with its site-packages hidden, so they can be appended again.
    """
    try:
        import torch
    except ImportError:
        for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            if os.path.isdir(os.path.join(path, "torch")):
                sys.path.append(path)  # appended: the isolated setuptools still wins
                import torch

                break
        else:
            raise refuse(
                "this build sees no torch. One of these helps:\n"
                "  pip install 'torch>=2.11'               then install fusedops again\n"
                "  pip install --no-build-isolation .      with uv, or a torch outside this environment (needs\n"
                "                                          setuptools, ninja, pybind11 and packaging)\n"
                "  FUSEDOPS_NATIVE=0 pip install .         Triton and plain torch only"
            ) from None
    if version(torch.__version__) < MIN_TORCH:
        raise refuse(f"torch {torch.__version__} is too old: pip install -U 'torch>=2.11', then fusedops again.")
    return torch


def compiler_problem(torch_version: tuple[int, int]) -> tuple[str | None, str | None]:
    """Return (why there is no C++ compiler, why the one there is too old); (None, None) when all is well."""
    command = os.environ.get("CXX", "c++").split()[0]
    path = shutil.which(command) or ("CXX" not in os.environ and (shutil.which("g++") or shutil.which("clang++")))
    if not path:
        return f"no C++ compiler found ({command}): install g++ (Debian: apt-get install g++)", None
    os.environ.setdefault("CXX", path)  # for linking too: Python may have been built with a compiler that is not here
    dump = [*os.environ["CXX"].split(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(dump, capture_output=True, text=True).stdout
    found = dict(re.findall(r"#define __(clang_major|GNUC)__ (\d+)", macros))
    # torch's own headers need C++17 up to 2.12 and C++20 from 2.13 on.
    least = {"GNUC": 9, "clang_major": 9} if torch_version < (2, 13) else {"GNUC": 11, "clang_major": 14}
    kind = "clang_major" if "clang_major" in found else "GNUC"
    if kind in found and int(found[kind]) < least[kind]:
        name = {"GNUC": "GCC", "clang_major": "clang"}[kind]
        return None, f"{path} is {name} {found[kind]}, torch needs {name} >= {least[kind]}: set CXX to a newer one."
    return None, None


def cuda_headers(root: Path) -> Path | None:
    """Return the folder of a toolkit's headers; conda keeps them under targets/."""
    folders = (root / "include", *root.glob("targets/*/include"))
    return next((folder for folder in folders if (folder / "cuda_runtime.h").exists()), None)


def find_cuda(torch_cuda: str | None) -> tuple[Path, str] | None:
    """Return (root, version) of the CUDA toolkit to use; among several the one of torch's CUDA major."""
    if explicit := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        roots = [Path(explicit)]
    else:
        nvcc = shutil.which("nvcc")
        roots = [Path(nvcc).resolve().parents[1]] if nvcc else []
        roots += [Path(f"/usr/local/cuda-{torch_cuda}")] if torch_cuda else []
        roots += [Path("/usr/local/cuda"), *Path(sysconfig.get_path("purelib"), "nvidia").glob("cu[0-9]*")]
    found = []
    for root in roots:
        # A wrapper script named nvcc may lie outside its toolkit: only a root with headers counts.
        if (root / "bin" / "nvcc").exists() and cuda_headers(root):
            text = subprocess.run([root / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
            if release := re.search(r"release (\d+\.\d+)", text):
                found.append((root, release[1]))
    if explicit and not found:
        raise refuse(f"CUDA_HOME={explicit} holds no CUDA toolkit (bin/nvcc, include/cuda_runtime.h).")
    matching = [f for f in found if torch_cuda and version(f[1])[0] == version(torch_cuda)[0]]
    return next(iter(matching + found), None)


def choose_archs(asked: str, known: set[str]) -> list[str]:
    """Intersect an architecture list with what nvcc knows.

    Args:
        asked: as in TORCH_CUDA_ARCH_LIST: "8.0;9.0a 12.0+PTX".
        known: what nvcc knows, as "80", "90".

    Returns:
        What to build, oldest first: "80", "90a", "90+PTX". A dropped +PTX moves to the newest one kept.
    """
    wanted = [a for a in re.split(r"[;,\s]+", asked.strip()) if a]
    if bad := [a for a in wanted if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", a)]:
        raise refuse(f"TORCH_CUDA_ARCH_LIST: expected numbers such as '8.0;9.0+PTX', got {' '.join(bad)}.")
    names = {a.removesuffix("+PTX").replace(".", ""): a.endswith("+PTX") for a in wanted}
    kept = sorted((n for n in names if n.rstrip("af") in known), key=lambda n: int(n.rstrip("af")))
    if dropped := [n for n in names if n not in kept]:
        say(f"this nvcc does not know sm_{', sm_'.join(dropped)}: left out.")
    if not kept:
        raise refuse(f"nvcc knows none of the architectures '{asked}', only {' '.join(sorted(known, key=int))}.")
    ptx = {n for n in kept if names[n]} | ({kept[-1]} if any(names[n] for n in dropped) else set())
    return [n + "+PTX" * (n in ptx) for n in kept]


def archs_to_build(torch, nvcc: Path) -> list[str]:
    """Return the architectures of TORCH_CUDA_ARCH_LIST, of the visible GPUs, or the default ones."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"compute_(\d+)", listed))
    if asked := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return choose_archs(asked, known)
    gpus = range(torch.cuda.device_count()) if torch.version.cuda and torch.cuda.is_available() else ()
    visible = {"{}.{}".format(*torch.cuda.get_device_capability(i)) for i in gpus}
    if visible and {v.replace(".", "") for v in visible} <= known:
        return choose_archs(" ".join(visible), known)
    return choose_archs(ARCHS, known)


def jobs() -> int:
    """Return how many compilers fit in the cores and the free memory."""
    cores = len(os.sched_getaffinity(0))
    free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return max(1, min(cores, int(free[1]) // (GIB_PER_JOB << 20))) if free else cores


# ---- what to build -------------------------------------------------------------------------------


def cuda_toolkit(torch) -> tuple[Path | None, str]:
    """Return (toolkit root or None, its version or why there are no CUDA kernels)."""
    mode = os.environ.get("FUSEDOPS_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise refuse(f"FUSEDOPS_CUDA: expected auto, 1 or 0, got {mode!r}.")
    if mode == "0":
        return None, "built with FUSEDOPS_CUDA=0"
    if mode == "auto" and torch.version.cuda is None:
        return None, f"built for torch {torch.__version__}, which has no CUDA"
    found = find_cuda(torch.version.cuda)
    if found is None:
        if mode == "1":
            raise refuse("FUSEDOPS_CUDA=1, but no CUDA toolkit was found: install one or set CUDA_HOME.")
        return None, "built without nvcc (no CUDA toolkit found; set CUDA_HOME)"
    root, release = found
    if torch.version.cuda and version(release) != version(torch.version.cuda):
        told = f"{root} is CUDA {release}, torch {torch.__version__} was built with CUDA {torch.version.cuda}"
        major = version(torch.version.cuda)[0]
        if version(release)[0] != major:
            raise refuse(f"{told}: set CUDA_HOME to a CUDA {major} toolkit, or FUSEDOPS_CUDA=0.")
        say(f"warning: {told}. That usually works.")
    return root, release


def extension(torch, info: dict[str, object]) -> Extension:
    """Describe `fusedops._C` and note in `info` what it holds."""
    from torch.utils import cpp_extension

    cuda, release = cuda_toolkit(torch)
    sources = [*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/ops/*.cpp"), *ROOT.glob("csrc/cpu/*.cpp")]
    # Not linked with -fopenmp: torch's own OpenMP runtime serves us too. sqrt that sets errno cannot be vectorised.
    cxx = ["-O3", "-g0", "-fopenmp", "-fno-math-errno"]
    nvcc = ["-O3", "--threads", "2"]
    settings = {"include_dirs": [str(ROOT / "csrc")], "define_macros": [], "libraries": [], "library_dirs": []}
    if cuda:
        sources += ROOT.glob("csrc/cuda/*.cu")
        archs = archs_to_build(torch, cuda / "bin" / "nvcc")
        info.update(cuda=release, archs=archs)
        for arch in archs:
            name = arch.removesuffix("+PTX")
            nvcc.append(f"-gencode=arch=compute_{name},code=sm_{name}")
            if arch.endswith("+PTX"):
                nvcc.append(f"-gencode=arch=compute_{name},code=compute_{name}")
        if os.environ.get("FUSEDOPS_WERROR") == "1":
            nvcc += ["-Werror", "all-warnings", "-Xptxas", "-warn-spills,-warn-lmem-usage"]
        include = cuda_headers(cuda)
        settings["include_dirs"].append(str(include))
        settings["define_macros"].append(("FUSEDOPS_WITH_CUDA", "1"))
        settings["libraries"] += ["cudart_static", "rt", "dl", "pthread"]
        settings["library_dirs"] += [str(d) for d in (cuda / "lib64", include.parent / "lib") if d.is_dir()]
        # A CppExtension with .cu files links neither torch_cuda nor libcudart, so it also builds against a CPU
        # torch and loads there; torch.utils.cpp_extension only has to know which nvcc to call.
        cpp_extension.CUDA_HOME = str(cuda)
    else:
        info["why_no_cuda"] = release
    headers = [h for h in ROOT.glob("csrc/**/*") if h.suffix in (".h", ".cuh")]
    if cuda and torch.version.cuda is None:  # there torch leaves out -MD, so ninja does not see an edited header
        newest = max((h.stat().st_mtime for h in headers), default=0)
        for stale in (o for o in ROOT.glob("build/temp*/csrc/cuda/*.o") if o.stat().st_mtime < newest):
            stale.unlink()
    say("CPU kernels" + (f" and CUDA {release} kernels for {' '.join(info['archs'])}" if cuda else f"; {release}"))
    os.environ.setdefault("MAX_JOBS", str(jobs()))
    return cpp_extension.CppExtension(
        "fusedops._C",
        sorted(str(s.relative_to(ROOT)) for s in sources),
        depends=[str(h.relative_to(ROOT)) for h in headers],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=["-s"],
        **settings,
    )


def plan() -> tuple[list[Extension], type | None, dict[str, object]]:
    """Decide what to build: (extensions, the build_ext command, the stamp)."""
    info = stamp["new_stamp"]()
    if os.environ.get("FUSEDOPS_NATIVE") == "0":
        why = "built with FUSEDOPS_NATIVE=0"
    elif not sys.platform.startswith("linux"):
        why = f"there are no native kernels for {sys.platform}"
    elif not list(ROOT.glob("csrc/*.cpp")):
        why = "there are no native sources in this tree"
    else:
        torch = import_torch()
        why, too_old = compiler_problem(version(torch.__version__))
        if too_old:
            raise refuse(too_old)
        if why and os.environ.get("FUSEDOPS_CUDA") == "1":
            raise refuse(f"FUSEDOPS_CUDA=1, but {why}.")
    if why:
        say(f"no native kernels, only Triton and plain torch: {why}.")
        return [], None, info | {"why_not": why}
    info["torch"] = torch.__version__
    built = extension(torch, info)
    info["csrc"] = stamp["csrc_hash"](ROOT / "csrc")
    return [built], native_command(info), info


def native_command(info: dict[str, object]) -> type:
    """Return a BuildExtension that fails with a hint and stamps what it builds in place."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildNative(BuildExtension):
        def run(self) -> None:
            target = ROOT / "fusedops" / stamp["STAMP_FILE"]
            inplace = self.inplace  # setuptools clears it while it runs
            if inplace:
                target.unlink(missing_ok=True)  # a build that is cut short must not leave the old stamp
            try:
                super().run()
            except Exception as error:
                hint = (
                    "FUSEDOPS_CUDA=0 leaves out the CUDA ones" if info["cuda"] else "FUSEDOPS_NATIVE=0 leaves them out"
                )
                raise refuse(
                    f"the native kernels did not compile (see above; pip shows it with -v). {hint}."
                ) from error
            if inplace:
                write_text(target, stamp["stamp_source"](info))

    return BuildNative


def stamped_build_py(info: dict[str, object]) -> type:
    """Return a build_py that puts the stamp into wheels and, where nothing is compiled, into the source tree."""

    class BuildPy(build_py):
        def run(self) -> None:
            super().run()
            folder = ROOT if self.editable_mode else Path(self.build_lib)
            (folder / "fusedops").mkdir(parents=True, exist_ok=True)
            write_text(folder / "fusedops" / stamp["STAMP_FILE"], stamp["stamp_source"](info))

    return BuildPy


def main() -> None:
    """Run setuptools; torch is looked for only by commands that build."""
    extensions, commands = [], {}
    if {"build", "build_py", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"} & set(sys.argv):
        extensions, build_ext, info = plan()
        commands["build_py"] = stamped_build_py(info)
        if build_ext:
            commands["build_ext"] = build_ext
    setup(ext_modules=extensions, cmdclass=commands)


if __name__ == "__main__":
    main()
