"""compute-sanitizer over every op and every optimizer, on a GPU: memory, races, uninitialised reads, barriers.

    pytest tests/test_sanitizer.py --sanitize --require native,triton

Each tool has to report a planted fault first. The kernels that the sweep launches are counted by the profiler, in a
process of its own, and none of ours may be missing. PyTorch allocates without its cache, so that every tensor is an
allocation to the tools (``tests/sanitizer/``: what they watch).
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fusedops
from fusedops import backends

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = ROOT / "tests" / "sanitizer"
SERVED = ("native", "triton")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

# Fault of plant.py -> the tool, and what its report has to say.
PLANTS = {
    "overrun": ("memcheck", "Invalid __global__ write of size 4"),
    "race": ("racecheck", "Race reported"),
    "uninitialised": ("initcheck", "Uninitialized __global__ memory read of size 4"),
    "barrier": ("synccheck", "Barrier error detected"),
}
# Fault of sweep.py, in a kernel of ours.
OUR_PLANTS = {
    "overread": ("memcheck", "Invalid __global__ read of size"),
    "unwritten": ("initcheck", "Uninitialized __global__ memory read of size"),
}


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer: in PATH, of a toolkit, or pip-installed."""
    roots = [Path(root) for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    roots += sorted(Path("/usr/local").glob("cuda-*"), reverse=True)
    roots += sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*"))
    places = [root / folder / "compute-sanitizer" for root in roots for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or next((str(p) for p in places if p.is_file()), None)


@pytest.fixture(scope="module", autouse=True)
def _asked_for(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--sanitize"):
        pytest.skip("compute-sanitizer runs with --sanitize")
    if not torch.cuda.is_available():
        pytest.fail("--sanitize: no CUDA GPU", pytrace=False)


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """Path of compute-sanitizer."""
    found = find_sanitizer()
    if found is None:
        pytest.fail(
            "--sanitize: no compute-sanitizer (a CUDA toolkit, or pip's nvidia-cuda-sanitizer-api)", pytrace=False
        )
    return found


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run without PyTorch's allocator cache, with the package that is under test here."""
    package = str(Path(fusedops.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def watch(sanitizer: str, tool: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script under a tool."""
    options = ["--tool", tool, "--show-backtrace", "no", "--print-limit", "20", "--error-exitcode", "9"]
    options += ["--target-processes", "application-only", "--launch-timeout", "120"]
    if tool == "memcheck":
        options += ["--padding", "65536"]  # an access far out does not land in another tensor
        options += ["--report-api-errors", "no"]  # PyTorch asks the driver for symbols that need not be there
    if tool != "initcheck":  # which has to see every kernel that writes; the others need not check torch's
        options += ["--kernel-name-exclude", "kns=2at6native"]
    return run([sanitizer, *options, sys.executable, str(CHILDREN / script), *arguments])


def reports(said: str) -> list[str]:
    """The errors of a log, each with the lines that belong to it."""
    lines = [line.removeprefix("=========") for line in said.splitlines() if line.startswith("=========")]
    starts = [i for i, line in enumerate(lines) if re.match(r" \S", line)]
    blocks = ["\n".join(lines[i:j]) for i, j in zip(starts, [*starts[1:], len(lines)], strict=True)]
    return [block for block in blocks if "SUMMARY" not in block and "COMPUTE-SANITIZER" not in block]


def triton_kernels() -> set[str]:
    """Names of our Triton kernels, which end in _kernel as those of the native ones do; names of helpers do not."""
    from triton.runtime import JITFunction

    package = importlib.import_module("fusedops.backends.triton")
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = {k for m in modules for k, value in vars(m).items() if isinstance(value, JITFunction)}
    return {name for name in found if name.endswith("_kernel")}


def native_kernels() -> set[str]:
    """Names of the kernels in csrc/cuda, without their namespace."""
    text = "".join(path.read_text() for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu*")))
    return set(re.findall(r"__global__[^;{]*?(\w+_kernel)\(", text))


@pytest.fixture(scope="module")
def served() -> list[str]:
    """Our backends that run here."""
    return [name for name in SERVED if backends.get(name).unavailable("cuda") is None]


@pytest.fixture(scope="module")
def launched(served: list[str], tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Counter[str]:
    """Launches of our kernels in a sweep, by backend and kernel; it also fills Triton's cache for the tools."""
    trace = tmp_path_factory.mktemp("sanitizer") / "trace.json"
    full = ["--full"] if pytestconfig.getoption("--full") else []
    said = run([sys.executable, str(CHILDREN / "sweep.py"), ",".join(served), "--trace", str(trace), *full])
    assert "swept" in said.stdout, said.stdout + said.stderr
    ours = triton_kernels() if "triton" in served else set()
    found: Counter[str] = Counter()
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") != "kernel":
            continue
        if native := re.search(r"fusedops::.*?(\w+_kernel)\b", event["name"]):
            found[f"native {native[1]}"] += 1
        elif event["name"] in ours:
            found[f"triton {event['name']}"] += 1
    return found


@pytest.mark.parametrize("fault", PLANTS)
def test_planted_faults_are_reported(fault: str, sanitizer: str) -> None:
    tool, message = PLANTS[fault]
    said = watch(sanitizer, tool, "plant.py", fault)
    found = [block for block in reports(said.stdout) if message in block]
    assert found, said.stdout + said.stderr
    assert f"plant_{fault}_kernel" in found[0]


@pytest.mark.parametrize("backend", SERVED)
@pytest.mark.parametrize("fault", OUR_PLANTS)
def test_planted_faults_are_reported_in_our_kernels(
    fault: str, backend: str, sanitizer: str, need_backend: Callable[[str], None]
) -> None:
    need_backend(backend)
    tool, message = OUR_PLANTS[fault]
    said = watch(sanitizer, tool, "sweep.py", backend, "--plant", fault)
    found = [block for block in reports(said.stdout) if message in block]
    assert found, said.stdout + said.stderr
    assert "norm_fwd" in found[0]
    assert ("fusedops" in found[0]) == (backend == "native"), "a Triton kernel has no namespace"


def test_the_sweep_launches_every_kernel(served: list[str], launched: Counter[str]) -> None:
    want = {f"native {name}" for name in native_kernels()} if "native" in served else set()
    want |= {f"triton {name}" for name in triton_kernels()} if "triton" in served else set()
    missing = want - launched.keys()
    assert not missing


@pytest.mark.timeout(1200)  # racecheck: 5 minutes where the GPU and its host do other work too
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_reported(
    tool: str,
    sanitizer: str,
    served: list[str],
    launched: Counter[str],
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    full = ["--full"] if pytestconfig.getoption("--full") else []
    said = watch(sanitizer, tool, "sweep.py", ",".join(served), *full)
    assert "swept" in said.stdout, said.stdout + said.stderr
    found = reports(said.stdout)
    if tool == "initcheck":  # judges PyTorch's own kernels, and copies between host and device, as well
        names = "|".join(sorted({name.split()[1] for name in launched}))
        found = [block for block in found if re.search(rf"\b({names})\b", block)]
    assert not found, "\n\n".join(found)
    if tool != "initcheck":
        assert said.returncode == 0, said.stdout + said.stderr
        assert re.search(r"SUMMARY: 0 (errors|hazards)", said.stdout), said.stdout
    record_property(
        "measured",
        f"compute-sanitizer {tool}: nothing to report in {launched.total()} launches of {len(launched)} kernels "
        f"({', '.join(served)})",
    )
