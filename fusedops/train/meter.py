"""What a training run costs: time by phase, peak memory, energy. Nothing here makes the host wait inside a step."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from ..energy import energy_counter


class Clock:
    """Moments on the device's own time line: CUDA events on a GPU, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        """A moment, for the other methods."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, moment: Any) -> bool:
        """Whether the device has reached the moment; never waits."""
        return not self._cuda or bool(moment.query())

    def wait(self, moment: Any) -> None:
        """Wait until the device has reached the moment."""
        if self._cuda:
            moment.synchronize()

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Time between two moments that have passed."""
        return float(begin.elapsed_time(end)) if self._cuda else (end - begin) * 1e3


class EnergyMeter:
    """Joules of the whole board, from NVML's energy counter, summed over windows between `start` and `stop`.

    The counter moves every few tens of milliseconds, so less than two seconds in all counts as not measured.
    """

    SHORTEST = 2.0  # seconds

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counter = energy_counter(device)
        self._begin: tuple[float, float] | None = None
        self._joules = self._seconds = 0.0
        self._steps = 0

    def start(self) -> None:
        """Open a window; waits for the device once."""
        self._begin = self._read()

    def stop(self, steps: int) -> None:
        """Close the window, in which `steps` steps ran; waits for the device once."""
        if self._begin is None:
            return
        joules, seconds = self._read()
        self._joules += joules - self._begin[0]
        self._seconds += seconds - self._begin[1]
        self._steps += steps
        self._begin = None

    def joules_per_step(self) -> float | None:
        """None when not measured."""
        if self._counter is None or self._seconds < self.SHORTEST or self._steps == 0:
            return None
        return self._joules / self._steps

    def _read(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (self._counter() / 1e3 if self._counter else 0.0), time.perf_counter()


def peak_memory(device: torch.device) -> int | None:
    """Most bytes allocated on the GPU since `reset_peak_memory`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak_memory(device: torch.device) -> None:
    """Start counting anew, with what earlier runs left behind given back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.init()  # else there is no device to reset
        torch.cuda.reset_peak_memory_stats(device)
