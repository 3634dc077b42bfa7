"""Options of the test command, NaN in uninitialised memory, the count of cells per backend, and what tests measured."""

from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fusedops import backends, dispatch, dispatch_table, machine, testing
from fusedops.config import BACKENDS
from fusedops.tuning import measure


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusedops")
    group.addoption("--full", action="store_true", help="every case of every op, not the quick selection")
    group.addoption("--require", default="", metavar="BACKENDS", help="comma-separated; absent ones fail, not skip")
    group.addoption("--sanitize", action="store_true", help="also run compute-sanitizer: minutes on a GPU")
    group.addoption("--device", default=None, help="device of the parity tests: cpu, cuda (default: cuda if visible)")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; tests interrupt processes
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if unknown := _required(config).difference(BACKENDS):
        raise pytest.UsageError(f"--require: expected any of {', '.join(BACKENDS)}, got {', '.join(sorted(unknown))}")


def _required(config: pytest.Config) -> set[str]:
    return set(filter(None, config.getoption("--require").split(",")))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The device under test."""
    return str(pytestconfig.getoption("--device") or ("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.fixture
def need_backend(
    pytestconfig: pytest.Config, device: str, record_property: Callable[[str, object], None]
) -> Callable[[str], None]:
    """Skip for a backend's own reason why it can't run here; fail if it is required. Counts the test as its cell."""

    def need(name: str) -> None:
        record_property("backend", name)
        reason = backends.get(name).unavailable(torch.device(device).type)
        if reason is None:
            return
        if name in _required(pytestconfig):
            pytest.fail(f"--require {name}: {reason}", pytrace=False)
        pytest.skip(f"{name}: {reason}")

    return need


@pytest.fixture(params=["native", "triton", "reference"])
def backend(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Each backend in turn, forced, with new tensors on the device under test."""
    reason = backends.get(request.param).unavailable(torch.device(device).type)
    if reason is not None and request.param in _required(request.config):
        pytest.fail(f"--require {request.param}: {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    # The default device is the CPU already; setting it all the same would put a mode around every call.
    with nullcontext() if device == "cpu" else torch.device(device), dispatch.use_backend(request.param):
        yield request.param


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill uninitialised memory with NaN."""
    with testing.poisoned():
        yield


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    """Seed PyTorch's generators."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_table_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose by the shipped table, whatever was tuned on this machine."""
    monkeypatch.setattr(machine, "cache_folder", lambda: None)
    dispatch_table.tuned.cache_clear()
    yield
    dispatch_table.tuned.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    dispatch_table.tuned.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replace the measurement: each backend takes the microseconds given, maybe by size. Returns what is measured."""

    def replace_by(seconds: float = 0.0, **times: float | str | dict[str, float]) -> list[str]:
        now, seen = [0.0], []

        def run(cell: Any, device: torch.device, backends: Sequence[str]) -> Iterator[dict[str, Any]]:
            seen.append(f"{cell.call.op} {cell.dtypes} {cell.size}")
            now[0] += seconds
            for name in backends:
                took = times.get(name, 100.0)
                took = took.get(cell.size, 100.0) if isinstance(took, dict) else took
                told = {"status": "FAIL", "reason": took} if isinstance(took, str) else {
                    "status": "ok", "median_us": took, "host_us": 1.0
                }  # fmt: skip
                yield {"backend": name, **told}

        monkeypatch.setattr(measure, "_run", run)
        monkeypatch.setattr(measure, "clock", lambda: now[0])
        return seen

    return replace_by


@pytest.fixture
def memory_given_back() -> Iterator[None]:
    """Leave a GPU's memory to the next test."""
    yield
    if torch.cuda.is_available():  # a collection takes most of a second once the whole suite is loaded
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replace backends by fakes."""

    def replace(**modules: ModuleType) -> None:
        for name, module in modules.items():
            monkeypatch.setitem(backends._modules, name, module)
        dispatch.cache.clear()

    yield replace
    dispatch.cache.clear()


@pytest.fixture(autouse=True)
def no_choice_left_behind() -> Iterator[None]:
    """Hand the choice of backend back to the table and forget what was warned about."""
    before = dict(dispatch._forced)
    yield
    dispatch._forced.clear()
    dispatch._forced.update(before)
    dispatch.cache.clear()
    dispatch._warned.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many cells of each backend ran, failed and were skipped, and the lines that tests want printed."""
    cells: dict[str, Counter[str]] = {}
    measured: list[str] = []
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            for key, value in getattr(report, "user_properties", ()):
                if key == "backend":
                    cells.setdefault(str(value), Counter())[outcome] += 1
                elif key == "measured":
                    measured.append(str(value))
    if cells:
        terminalreporter.section("cells per backend")
    for name in filter(cells.__contains__, BACKENDS):
        count = cells[name]
        ran = count["passed"] + count["failed"]
        terminalreporter.write_line(f"{name:<10} {ran:5} ran, {count['failed']} failed, {count['skipped']} skipped")
    if measured:
        terminalreporter.section("measured")
    for line in measured:
        terminalreporter.write_line(line)
