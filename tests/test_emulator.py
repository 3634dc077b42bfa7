"""Runs the CUDA kernels, unchanged, on the CPU: compiled by the host compiler over tests/emulator/cuda_emulator.h.

AddressSanitizer and UBSan watch every access, the emulator every barrier; gcov tells which lines of the kernels ran.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "tests" / "emulator"
COMPILER = os.environ.get("CXX", "g++")

PROGRAMS: dict[str, list[str]] = {
    "test_emulator": ["tests/emulator/planted.cu"],
    "test_norm": ["csrc/cuda/norm_fwd.cu", "csrc/cuda/norm_bwd.cu"],
    "test_add_norm": ["csrc/cuda/norm_fwd.cu", "csrc/cuda/norm_bwd.cu"],
    "test_cross_entropy": ["csrc/cuda/cross_entropy.cu"],
    "test_adam": ["csrc/cuda/multi_tensor.cu", "csrc/cuda/adam.cu", "csrc/cuda/grad_norm.cu"],
}
"""Test program of tests/emulator/ -> the .cu files it is linked with."""

PLANTS: dict[str, tuple[str, ...]] = {
    "half_barrier": ("half_barrier_kernel, block 1,0", "16 wait at __syncthreads at planted.cu:", "16 have"),
    "two_barriers": ("two_barriers_kernel, block 0,0", "meets __syncthreads at", "wait at __syncthreads at"),
    "short_group": ("short_group_kernel, block 0,0", "24 wait at barrier 3 at planted.cu:", "8 have returned"),
    "dynamic_overrun": ("heap-buffer-overflow", "WRITE of size 4", "dynamic_overrun_kernel"),
    "static_overrun": ("global-buffer-overflow", "READ of size 4", "static_overrun_kernel<float>"),
    "helper_overrun": ("global-buffer-overflow", "READ of size 8", "helper_overrun_kernel"),
    "local_overrun": ("stack-buffer-overflow", "READ of size 4", "local_overrun_kernel"),
    "output_overrun": ("heap-buffer-overflow", "WRITE of size 4", "output_overrun_kernel"),
    "misaligned": ("store to misaligned address", "requires 16 byte alignment"),
    "misaligned_copy": ("misaligned_copy_kernel, block 0,0, thread 0", "a copy of 16 bytes is not aligned"),
}
"""Fault of planted.cu that ends the process -> what its report has to say."""

pytestmark = pytest.mark.timeout(900)  # the first test compiles: a minute on two cores of one's own
LEAST_LINES = 0.97  # of the kernels' lines; what is missing is listed
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,pointer-overflow",  # AddressSanitizer sees both, and they cost a third of the compile time
    "-fno-sanitize-recover=undefined",
    "--coverage",
]


def cuda_include() -> Path | None:
    """Directory of the CUDA headers: of a toolkit, or of a pip-installed runtime package."""
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        roots.append(str(Path(nvcc).resolve().parent.parent))
    roots.append("/usr/local/cuda")
    roots += map(str, sorted(Path("/usr/local").glob("cuda-*"), reverse=True))
    folders = [Path(root, "include") for root in roots if root]
    for library in {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}:
        folders += sorted(Path(library, "nvidia").glob("cu*/include"))
    return next((f for f in folders if all((f / h).is_file() for h in ("cuda_runtime.h", "cuda_bf16.h"))), None)


def compile_programs(include: Path, folder: Path) -> None:
    """Compile every file in a process of its own, then link the programs."""
    flags = ["-std=c++17", "-O0", "-g1", "-w", *SANITIZERS, f"-I{include}", f"-I{ROOT / 'csrc'}"]
    flags += ["-include", str(EMULATOR / "cuda_emulator.h"), "-x", "c++", "-c"]
    # Each once: two programs share the norms' files, and two compilers writing one object's notes spoil the coverage.
    sources = [ROOT / source for source in dict.fromkeys(chain(*PROGRAMS.values()))]
    sources += [EMULATOR / f"{name}.cpp" for name in PROGRAMS]

    def compile_one(source: Path) -> int:
        return subprocess.run([COMPILER, *flags, str(source), "-o", f"{source.stem}.o"], cwd=folder).returncode

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the kernels first: they take longest
        assert not any(pool.map(compile_one, sources)), "the host compiler refused a kernel"
    for name, kernels in PROGRAMS.items():
        objects = [f"{name}.o", *(f"{Path(source).stem}.o" for source in kernels)]
        subprocess.run([COMPILER, *SANITIZERS, *objects, "-o", name], cwd=folder, check=True)


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program, its objects and coverage counts in the folder that is `run.folder`."""
    include = cuda_include()
    if include is None:
        pytest.skip("no CUDA headers (a toolkit, or pip's nvidia-cuda-runtime)")
    if shutil.which(COMPILER) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("emulator")
    compile_programs(include, folder)
    environment = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}

    def run_program(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [folder / command[0], *command[1:]],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
        )

    run_program.folder = folder
    return run_program


@pytest.mark.parametrize("name", PROGRAMS)
def test_emulated_kernels(name: str, run: Run) -> None:
    result = run(name)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("fault", PLANTS)
def test_planted_faults_are_reported(fault: str, run: Run) -> None:
    result = run("test_emulator", fault)
    assert result.returncode != 0, result.stdout
    for part in PLANTS[fault]:
        assert part in result.stderr, result.stderr


def test_a_target_that_is_no_class_stops_the_kernel(run: Run) -> None:
    result = run("test_cross_entropy", "wrong target")
    assert result.returncode != 0, result.stdout
    assert "cross_entropy: target: expected class indices" in result.stderr, result.stderr


class Coverage(NamedTuple):
    """How often each line of the .cuh files ran, by (file, line), and each kernel, by its name."""

    lines: Counter[tuple[str, int]]
    kernels: Counter[str]


def read_coverage(folder: Path) -> Coverage:
    """Add the counts of all programs up: a line ran if it did in any instantiation."""
    counts = sorted(path.name for path in folder.glob("*.gcda"))
    said = subprocess.run(["gcov", "--json-format", "--stdout", *counts], cwd=folder, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    coverage = Coverage(Counter(), Counter())
    for part in json_values(said.stdout):
        for file in part["files"]:
            path = Path(file["file"])
            if path.suffix != ".cuh" or path.parent != ROOT / "csrc" / "cuda":
                continue
            for line in file["lines"]:
                coverage.lines[path.name, line["line_number"]] += line["count"]
            for function in file["functions"]:
                if kernel := re.search(r"(\w+_kernel(<[^()]*>)?)\([^()]*\)$", function["demangled_name"]):
                    coverage.kernels[kernel[1]] += function["execution_count"]
    return coverage


def json_values(text: str) -> Iterator[Any]:
    """One value after the other."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text.rstrip()):
        value, at = decoder.raw_decode(text, at)
        yield value
        at += len(text[at:]) - len(text[at:].lstrip())


def test_share_of_kernel_lines_that_ran(run: Run, record_property: Callable[[str, object], None]) -> None:
    if shutil.which("gcov") is None or "g++" not in Path(COMPILER).name:
        pytest.skip("coverage is read by gcov, which comes with g++")
    for name in PROGRAMS:
        if not list(run.folder.glob(f"{name}.gcda")):
            run(name)
    lines, kernels = read_coverage(run.folder)
    missing = sorted(line for line, count in lines.items() if count == 0)
    share = 1 - len(missing) / len(lines)
    ran = sum(count > 0 for count in kernels.values())
    record_property(
        "measured",
        f"emulated on the CPU: {len(lines) - len(missing)} of {len(lines)} lines of csrc/cuda/*.cuh ({share:.1%}), "
        f"{ran} of {len(kernels)} kernels",
    )
    assert share >= LEAST_LINES, f"lines that no emulator test runs: {missing}"
