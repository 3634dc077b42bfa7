"""What setup.py decides, and what the build stamp refuses."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusedops import _build
from fusedops.backends import native
from fusedops.dispatch import Call

ROOT = Path(__file__).resolve().parents[1]
NVCC_13 = {"75", "80", "86", "87", "88", "89", "90", "100", "103", "110", "120", "121"}
NVCC_12_4 = {"50", "60", "70", "75", "80", "86", "89", "90"}

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def setup_py():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


@pytest.fixture
def fake_bin(tmp_path, monkeypatch):
    """A PATH with nothing on it but the scripts that a test writes."""
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "FUSEDOPS_CUDA", "FUSEDOPS_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def write(name, text):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write


def toolkit(folder, release):
    """Make what looks like a CUDA toolkit."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.1"\n')
    nvcc.chmod(0o755)
    return folder


# ---- architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "known", "expected"),
    [
        ("7.5 8.0 9.0 10.0 12.0+PTX", NVCC_13, ["75", "80", "90", "100", "120+PTX"]),
        ("7.5 8.0 9.0 10.0 12.0+PTX", NVCC_12_4, ["75", "80", "90+PTX"]),
        ("8.0;9.0a", NVCC_13, ["80", "90a"]),
        ("9.0, 8.6+PTX", NVCC_13, ["86+PTX", "90"]),
        (" 7.0;8.0 ", NVCC_13, ["80"]),
        ("8.0;8.0+PTX", NVCC_13, ["80+PTX"]),
    ],
)
def test_archs_are_intersected_with_what_nvcc_knows(setup_py, asked, known, expected):
    assert setup_py.choose_archs(asked, known) == expected


@pytest.mark.parametrize(("asked", "message"), [("Hopper", "Hopper"), ("6.0", "knows none"), (";", "knows none")])
def test_a_useless_arch_list_is_refused(setup_py, asked, message):
    with pytest.raises(SystemExit, match=message):
        setup_py.choose_archs(asked, NVCC_13)


def test_dropped_archs_are_named(setup_py, capsys):
    setup_py.choose_archs("7.0;9.0", NVCC_13)
    assert "sm_70" in capsys.readouterr().err


# ---- toolkit and compiler ------------------------------------------------------------------------


def torch_like(version="2.13.0", cuda="13.0"):
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda))


def test_another_cuda_major_is_refused(setup_py, fake_bin, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "12.4")))
    with pytest.raises(SystemExit, match=r"CUDA 12\.4.*CUDA 13\.0.*CUDA_HOME.*FUSEDOPS_CUDA=0"):
        setup_py.cuda_toolkit(torch_like())


def test_another_cuda_minor_is_a_warning(setup_py, fake_bin, tmp_path, monkeypatch, capsys):
    root = toolkit(tmp_path / "cuda", "13.2")
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert setup_py.cuda_toolkit(torch_like()) == (root, "13.2")
    assert "warning" in capsys.readouterr().err


def test_a_cpu_torch_gets_cuda_only_on_request(setup_py, fake_bin, tmp_path, monkeypatch):
    root = toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert setup_py.cuda_toolkit(torch_like(cuda=None))[0] is None
    monkeypatch.setenv("FUSEDOPS_CUDA", "1")
    assert setup_py.cuda_toolkit(torch_like(cuda=None)) == (root, "13.0")


def test_a_wrong_cuda_home_is_refused(setup_py, fake_bin, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="holds no CUDA toolkit"):
        setup_py.cuda_toolkit(torch_like())


def test_a_wrong_mode_is_refused(setup_py, fake_bin, monkeypatch):
    monkeypatch.setenv("FUSEDOPS_CUDA", "yes")
    with pytest.raises(SystemExit, match="expected auto, 1 or 0, got 'yes'"):
        setup_py.cuda_toolkit(torch_like())


def test_a_missing_compiler_is_no_error(setup_py, fake_bin):
    why, too_old = setup_py.compiler_problem((2, 13))
    assert "no C++ compiler" in why
    assert too_old is None


@pytest.mark.parametrize(
    ("gcc", "torch_version", "fits"), [(8, (2, 11), False), (9, (2, 11), True), (10, (2, 13), False)]
)
def test_an_old_compiler_is_named(setup_py, fake_bin, monkeypatch, gcc, torch_version, fits):
    monkeypatch.setenv("CXX", str(fake_bin("old-g++", f'echo "#define __GNUC__ {gcc}"')))
    why, too_old = setup_py.compiler_problem(torch_version)
    assert why is None
    assert fits if too_old is None else f"GCC {gcc}" in too_old


def test_an_old_torch_is_refused(setup_py, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(SystemExit, match=r"torch 2\.10\.1 is too old"):
        setup_py.import_torch()


def test_a_missing_torch_is_refused(setup_py, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(setup_py.sysconfig, "get_path", lambda key: str(tmp_path))
    with pytest.raises(SystemExit, match=r"pip install 'torch>=2\.11'"):
        setup_py.import_torch()


def test_jobs_are_at_least_one(setup_py):
    assert 1 <= setup_py.jobs() <= os.cpu_count()


# ---- the stamp -----------------------------------------------------------------------------------


def stamped(**changes):
    stamp = _build.new_stamp()
    stamp["torch"] = torch.__version__
    return stamp | changes


def test_the_stamp_survives_being_written(tmp_path):
    (tmp_path / _build.STAMP_FILE).write_text(_build.stamp_source(stamped(archs=["80", "90+PTX"], cuda="13.0")))
    assert runpy.run_path(str(tmp_path / _build.STAMP_FILE))["STAMP"] == stamped(archs=["80", "90+PTX"], cuda="13.0")


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.1+cu130", True),
        ("2.13.0", "2.14.0", False),
        ("2.1.0", "2.11.0", False),
        ("2.13.0", "3.13.0", False),
    ],
)
def test_torch_may_change_within_a_minor_version(built, running, fits):
    problem = _build.misfit(stamped(torch=built), running, _build.python_tag())
    assert (problem is None) == fits
    if not fits:
        assert built in problem
        assert running in problem


def test_another_python_does_not_fit():
    problem = _build.misfit(stamped(python="cpython-310-x86_64-linux-gnu"), torch.__version__, "cpython-313-x")
    assert "cpython-310" in problem
    assert "cpython-313" in problem


@pytest.mark.parametrize(
    ("archs", "capability", "covered"),
    [
        (["80", "90"], (9, 0), True),
        (["80"], (8, 6), True),
        (["86"], (8, 0), False),
        (["80", "90"], (10, 0), False),
        (["80", "90+PTX"], (10, 0), True),
        (["90a"], (9, 0), True),
        (["90a+PTX"], (10, 0), False),
        (["100", "120"], (10, 3), True),
        ([], (9, 0), False),
    ],
)
def test_which_gpus_a_build_covers(archs, capability, covered):
    assert _build.covers(archs, capability) == covered


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_lint_takes_the_pins_of_the_extra():
    asked = ["make", "-s", "--eval", "tools: ; @$(LINT_TOOLS)", "tools", f"PY={sys.executable}"]
    alone = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # not below `make test`
    tools = subprocess.run(asked, cwd=ROOT, env=alone, check=True, capture_output=True, text=True).stdout.split()
    assert [tool.partition("==")[0] for tool in tools] == ["ruff", "mypy", "clang-format"]
    assert all(re.fullmatch(r"[a-z-]+==[0-9.]+", tool) for tool in tools)
    assert f"lint = {json.dumps(tools)}\n" in (ROOT / "pyproject.toml").read_text()


def test_the_hash_sees_names_and_contents(tmp_path):
    (tmp_path / "a.cpp").write_text("x")
    first = _build.csrc_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("not a source")
    assert _build.csrc_hash(tmp_path) == first
    (tmp_path / "a.cpp").write_text("y")
    second = _build.csrc_hash(tmp_path)
    (tmp_path / "a.cpp").rename(tmp_path / "b.cpp")
    assert len({first, second, _build.csrc_hash(tmp_path)}) == 3


def test_each_gpu_is_asked_for_its_own_architecture(monkeypatch):
    """In a machine with several kinds of GPU the current one says nothing about another."""
    monkeypatch.setattr(_build, "_load", lambda: (None, None))
    monkeypatch.setattr(_build, "read_stamp", lambda: stamped(cuda="13.0", archs=["90"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    capabilities = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: f"GPU {index}")
    assert "built for 90, GPU 0 is sm_75; to rebuild" in _build.native_problem("cuda", 0)
    assert _build.native_problem("cuda", 1) is None
    assert _build.native_problem("cuda") is None, "one of them can"

    dtypes = (("input", torch.float32), ("output", torch.float32))
    for op, limits in native.LIMITS.items():
        reasons = [limits.refuse(Call(op, "cuda", index, dtypes)) for index in (0, 1)]
        assert [len(some) for some in reasons] == [1, 0]
    assert not native.LIMITS["adamw"].refuse(Call("adamw", "cpu", -1, dtypes))
    capabilities[1] = (8, 0)
    assert "GPU 0 is sm_75, GPU 1 is sm_80" in _build.native_problem("cuda")


LOAD = """
from fusedops import _build
_build.load_native()
print(_build.load_native(), "|", _build.native_problem("cpu"), "|", _build.native_problem("cuda"))
"""


def load_with_stamp(folder, stamp, suffix="so", binary=b""):
    """Load `_C` in a fresh process from a package that holds only `_build.py`, a stamp and a binary."""
    package = folder / "fusedops"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_build.py").write_text((ROOT / "fusedops" / "_build.py").read_text())
    if stamp:
        (package / _build.STAMP_FILE).write_text(_build.stamp_source(stamp))
        (package / f"_C.{suffix}").write_bytes(binary)
    # An editable install would serve what the package here lacks.
    alone = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
    )
    done = subprocess.run([sys.executable, "-c", alone + LOAD], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path):
    """As where Python starts beside a clone of this repository."""
    (tmp_path / "fusedops").mkdir()
    asked = [sys.executable, "-c", "import fusedops; print(fusedops.__file__)"]
    said = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout.strip().endswith("__init__.py"), said.stderr


def test_a_binary_for_another_torch_is_left_alone(tmp_path):
    out, err = load_with_stamp(tmp_path, stamped(torch="2.12.0"))
    assert out.startswith(
        "None | the native kernels were built for torch 2.12.0, running is torch " + torch.__version__
    )
    assert err.count("RuntimeWarning") == 1
    assert "pip install --no-build-isolation" in err
    assert "Traceback" not in err


def test_a_binary_that_does_not_load_is_one_warning(tmp_path):
    out, err = load_with_stamp(tmp_path, stamped(), binary=b"not a library")
    assert out.startswith("None | the native kernels do not load")
    assert err.count("RuntimeWarning") == 1
    assert "Traceback" not in err


def test_no_native_code_is_no_warning(tmp_path):
    out, err = load_with_stamp(tmp_path, stamped(why_not="no C++ compiler found (c++): install g++"))
    assert out.startswith("None | there are no native kernels: no C++ compiler found (c++): install g++")
    assert err == ""


def test_never_built_is_no_warning(tmp_path):
    out, err = load_with_stamp(tmp_path, None)
    assert "were not built" in out
    assert err == ""


def test_a_sound_binary_is_loaded_in_silence(tmp_path):
    out, err = load_with_stamp(tmp_path, stamped(why_no_cuda="built without nvcc"), suffix="py")
    assert "_C" in out
    assert out.endswith("None | the native kernels have no CUDA part: built without nvcc")
    assert err == ""


def test_edited_sources_are_one_warning(tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("edited")
    out, err = load_with_stamp(tmp_path, stamped(csrc="0" * 16), suffix="py")
    assert "_C" in out
    assert err.count("RuntimeWarning") == 1
    assert "edited after the native kernels were built" in err


# ---- the source distribution ---------------------------------------------------------------------


def test_the_sdist_holds_every_source_and_needs_no_torch(tmp_path):
    tree = tmp_path / "tree"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("needs a git checkout")
    for name in tracked.stdout.split():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    (archive,) = tmp_path.glob("fusedops-*.tar.gz")
    packed = subprocess.run(["tar", "tzf", archive], capture_output=True, text=True, check=True).stdout.split()
    held = {name.partition("/")[2] for name in packed}
    wanted = {n for n in tracked.stdout.split() if n.startswith(("csrc/", "fusedops/"))} | {
        "setup.py",
        "pyproject.toml",
    }
    assert wanted <= held
    assert "fusedops/_build_info.py" not in held
