"""What a run writes down: facts of the machine, one record a cell."""

from __future__ import annotations

import datetime
import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

import fusedops

from ..errors import UnsupportedError
from ..machine import cpu_name
from .peers import NotServed

Record = dict[str, Any]
_OUT_OF_MEMORY = "out of memory"


def facts(device: torch.device, commit: str | None = None) -> Record:
    """Return what every record of a run carries.

    Args:
        device: where the run is.
        commit: the source's commit if the caller knows it; else ``FUSEDOPS_COMMIT``, else git's, else None. A commit
            that is told is not known to be clean, so ``dirty`` is None then.
    """
    told = commit or os.environ.get("FUSEDOPS_COMMIT")
    found, dirty = (told, None) if told else _git()
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "commit": found,
        "dirty": dirty,
        "version": fusedops.__version__,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "driver": _driver() if cuda else None,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
    }


def _git() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout this package lies in and whether it was changed; None, None outside of one."""
    root = Path(fusedops.__file__).resolve().parents[1]

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()) != root:
            return None, None
        return git("rev-parse", "--short=12", "HEAD").strip(), bool(git("status", "--porcelain", "-uno").strip())
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    version: str = triton.__version__
    return version


@functools.cache
def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def speed(median_us: float, total_bytes: int, copy_us: float) -> Record:
    """Return GB/s over the least bytes a call can move, and how close it comes to a copy of the same bytes."""
    return {
        "bytes": total_bytes,
        "gbps": round(total_bytes / median_us / 1e3, 1),
        "copy_us": round(copy_us, 2),
        "percent_of_copy": round(100 * copy_us / median_us, 1),
    }


def unmeasured(error: Exception) -> Record:
    """Return what is written of a cell that raised: ``"n/a"`` and why where it can't run here, else ``"FAIL"``."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # A CPU's allocator and the CUDA driver raise errors of no type of their own.
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        text in str(error) for text in ("out of memory", "can't allocate memory")
    ):
        return {"status": "n/a", "reason": f"{_OUT_OF_MEMORY}: {reason}"}
    absent = isinstance(error, (UnsupportedError, NotServed, ImportError))
    return {"status": "n/a" if absent else "FAIL", "reason": reason}


def ran_out(record: Record) -> bool:
    """Whether a cell has no time for want of memory."""
    return str(record.get("reason")).startswith(_OUT_OF_MEMORY)
