"""What measurements of this machine hold for, and where they are kept.

A dispatch table that was tuned here is good for one device, one driver and one build of everything that runs on it.
The file's name holds all of that, and its content says it again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path

import torch

from . import _build

Facts = dict[str, str]


def facts(device: torch.device) -> Facts:
    """Return what a measurement on a device holds for: the hardware, and every version that decides how fast it is.

    The CPU is part of it for a GPU as well, whose calls may take longer on the host. The threads are those that PyTorch
    has now: set them before the first choice.
    """
    import fusedops

    stamp = _build.read_stamp()
    found = {
        "fusedops": fusedops.__version__,
        "torch": torch.__version__,
        "native": "none" if stamp is None or stamp["why_not"] else stamp["csrc"],  # hash of the kernels' sources
    }
    if device.type != "cuda":
        return {
            "device": device.type,
            "name": cpu_name(),
            "instructions": torch.backends.cpu.get_cpu_capability(),  # ATEN_CPU_CAPABILITY may ask for fewer
            "threads": str(torch.get_num_threads()),
            **found,
        }
    return {
        "device": "cuda",
        "name": torch.cuda.get_device_name(device),
        "cpu": cpu_name(),
        "driver": _driver(),
        "triton": _triton_version(),
        **found,
    }


def digest(machine: Facts) -> str:
    """Return a short name for facts."""
    return hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]


def tuned_file(machine: Facts) -> Path | None:
    """Return the file of the dispatch table that is tuned on a machine; None where the user has no home."""
    folder = cache_folder()
    if folder is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", machine["name"].lower()).strip("-")[:40]
    return folder / f"tuned-{name}-{digest(machine)}.json"


def cache_folder() -> Path | None:
    """Return the user's folder for what can be made again, which may not be there yet."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "fusedops"
    except RuntimeError:
        return None


def cpu_name() -> str:
    """Return the CPU's model."""
    try:
        names = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = None
    return names[1] if names else platform.processor() or platform.machine()


def _driver() -> str:
    """Return the driver's release, where it is told without starting a process; else the CUDA version it supports."""
    try:
        told = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        told = None
    return told[0] if told else f"CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]  # of CUDA builds


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"
