"""The energy that a GPU counts itself, through NVML."""

from __future__ import annotations

from collections.abc import Callable

import torch


def energy_counter(device: torch.device) -> Callable[[], int] | None:
    """Return a function that reads the millijoules a GPU's board used so far; None where nothing counts them."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    # By UUID: CUDA_VISIBLE_DEVICES renumbers the devices that torch sees, not those of NVML.
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
