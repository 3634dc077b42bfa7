"""The clock.

On a GPU a call is captured in a CUDA graph where that works, so that events around a replay see device work alone, and
the repetitions are queued behind a spinning kernel, so that the host is never what is measured. The L2 cache is
flushed before each repetition. On a CPU it is wall time. Host time is what a call costs the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..energy import energy_counter

Call = Callable[[], Any]
_WARMUP = 3
_BURST = 20  # repetitions queued at once: well under the 1024 launches a stream holds, also at ten a call
_CLOCK_HZ = 2e9  # an upper bound of a GPU's clock, to turn seconds into cycles of the spinning kernel
_CPU_SECONDS = 2.0  # a slow call on a CPU is repeated no longer than this
_ENERGY_SECONDS = 2.0  # the power meter is averaged; shorter windows read noise


@dataclass(frozen=True)
class Timing:
    """Quartiles of the time of one call, in microseconds.

    Attributes:
        median: of all repetitions.
        q1: first quartile.
        q3: third quartile.
        repeats: repetitions measured.
    """

    median: float
    q1: float
    q3: float
    repeats: int


@dataclass(frozen=True)
class Prepared:
    """A warmed-up call.

    Attributes:
        run: does the call's work; a graph replay where capture worked.
        timer: ``"graph"``, ``"events"`` or ``"wall"``.
        device: where it runs.
    """

    run: Call
    timer: str
    device: torch.device


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run a block on a stream of its own: the default stream can't be captured, and backward follows forward's."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def prepare(call: Call, device: torch.device, capture: bool = True) -> Prepared:
    """Warm a call up and capture it if it can be.

    Args:
        call: takes nothing; what it returns is dropped.
        device: where its work is done.
        capture: try a CUDA graph.
    """
    for _ in range(_WARMUP):
        call()
    if device.type != "cuda":
        return Prepared(call, "wall", device)
    torch.cuda.synchronize(device)
    graph = _capture(call) if capture else None
    return Prepared(call, "events", device) if graph is None else Prepared(graph.replay, "graph", device)


def _capture(call: Call) -> torch.cuda.CUDAGraph | None:
    """Capture by hand: ``torch.cuda.graph`` collects garbage first, which costs more than the measurement.

    What waits for the device is found before: once a capture has failed, PyTorch gives no memory back to the device.
    """
    torch.cuda.empty_cache()  # a capture can't
    graph = torch.cuda.CUDAGraph()
    try:
        with _no_waiting():
            call()
        graph.capture_begin()
        try:
            call()
        finally:
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:  # it waits for the device, or allocates outside of torch
        torch.cuda.synchronize()
        return None
    return graph


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise RuntimeError in a block where the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def measure(prepared: Prepared, repeats: int, burst: int = _BURST) -> Timing:
    """Measure a call's time on its device.

    Args:
        prepared: the call.
        repeats: repetitions.
        burst: repetitions queued at once on a GPU; fewer for calls of many launches.
    """
    return (
        _measure_cuda(prepared, repeats, burst) if prepared.device.type == "cuda" else _measure_cpu(prepared, repeats)
    )


def _measure_cuda(prepared: Prepared, repeats: int, burst: int) -> Timing:
    run, flush = prepared.run, _flush_buffer(prepared.device)
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    torch.cuda.synchronize(prepared.device)
    before = time.perf_counter()
    run()
    lead = time.perf_counter() - before + 50e-6
    for first in range(0, repeats, burst):
        some = range(first, min(first + burst, repeats))
        torch.cuda._sleep(int(1.5 * lead * len(some) * _CLOCK_HZ))
        for i in some:
            flush.zero_()
            begins[i].record()
            run()
            ends[i].record()
        torch.cuda.synchronize(prepared.device)
    return _quartiles([begin.elapsed_time(end) * 1e3 for begin, end in zip(begins, ends, strict=True)])


def _measure_cpu(prepared: Prepared, repeats: int) -> Timing:
    times: list[float] = []
    while len(times) < repeats and (len(times) < 3 or sum(times) < _CPU_SECONDS * 1e6):
        before = time.perf_counter_ns()
        prepared.run()
        times.append((time.perf_counter_ns() - before) / 1e3)
    return _quartiles(times)


def _quartiles(times: list[float]) -> Timing:
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Timing(median, q1, q3, len(times))


@functools.cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    """Four times the L2 cache, to be written between repetitions."""
    return torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)


@functools.cache
def copy_time(total_bytes: int, device: torch.device, repeats: int) -> float:
    """Return the microseconds a copy takes that reads and writes ``total_bytes`` together, measured as any call is.

    The faster of the driver's copy and an elementwise kernel, which is the harder mark.
    """
    source = torch.randint(-(2**31), 2**31 - 1, (max(1, total_bytes // 8),), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    ways: tuple[Call, ...] = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
    return min(measure(prepare(way, device), repeats).median for way in ways)


def host_time(call: Call, device: torch.device, calls: int = 50, loops: int = 5) -> float:
    """Return the microseconds of the calling thread that one call takes; the call should be tiny on the device."""
    times = []
    for _ in range(loops + 1):  # the first loop warms up
        before = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - before) / 1e3 / calls)
        synchronize(device)
    return statistics.median(times[1:])


def wall_time(call: Call, device: torch.device, calls: int = 10, loops: int = 5) -> float:
    """Return the microseconds from first launch to last result of ``calls`` calls in a row, per call."""
    times = []
    for _ in range(loops):
        synchronize(device)
        before = time.perf_counter_ns()
        for _ in range(calls):
            call()
        synchronize(device)
        times.append((time.perf_counter_ns() - before) / 1e3 / calls)
    return statistics.median(times)


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Return the most bytes of device memory one call holds beyond what was held before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def energy(prepared: Prepared) -> float | None:
    """Return the millijoules of one call, run back to back without flush for at least 2 s; None without a meter."""
    counter = energy_counter(prepared.device)
    if counter is None:
        return None
    torch.cuda.synchronize(prepared.device)
    before, begin, calls = counter(), time.perf_counter(), 0
    while time.perf_counter() - begin < _ENERGY_SECONDS:
        for _ in range(_BURST):
            prepared.run()
        calls += _BURST
        torch.cuda.synchronize(prepared.device)
    return (counter() - before) / calls


def synchronize(device: torch.device) -> None:
    """Wait for a device; a CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
