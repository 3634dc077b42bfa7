"""Runs the CUDA kernels, unchanged, on the CPU: compiled by the host compiler over tests/emulator/cuda_emulator.h."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "tests" / "emulator"

PROGRAMS: dict[str, list[str]] = {
    "test_emulator": [],
    "test_norm": ["csrc/cuda/norm_fwd.cu", "csrc/cuda/norm_bwd.cu"],
    "test_adam": ["csrc/cuda/multi_tensor.cu", "csrc/cuda/adam.cu", "csrc/cuda/grad_norm.cu"],
}
"""Test program of tests/emulator/ -> the .cu files it is linked with."""


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


def compile_program(name: str, sources: list[str], include: Path, folder: Path) -> Path:
    """Compiles tests/emulator/<name>.cpp and its kernels under AddressSanitizer, every file in a process of its own."""
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-O0", "-g1", "-w", "-fsanitize=address", f"-I{include}", f"-I{ROOT / 'csrc'}"]
    flags += ["-include", str(EMULATOR / "cuda_emulator.h"), "-x", "c++", "-c"]
    running = []
    for source in [EMULATOR / f"{name}.cpp", *(ROOT / s for s in sources)]:
        target = folder / f"{source.stem}.o"
        running.append((target, subprocess.Popen([compiler, *flags, str(source), "-o", str(target)])))
    assert [process.wait() for _, process in running] == [0] * len(running), "the host compiler refused a kernel"
    program = folder / name
    subprocess.run([compiler, "-fsanitize=address", *(str(t) for t, _ in running), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("name", PROGRAMS)
def test_emulated_kernels(name: str, tmp_path: Path) -> None:
    include = cuda_include()
    if include is None:
        pytest.skip("no CUDA headers (a toolkit, or pip's nvidia-cuda-runtime)")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    program = compile_program(name, PROGRAMS[name], include, tmp_path)
    environment = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
    result = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
