"""Lists of tensors as tables in device memory, for kernels that serve many tensors in one launch.

A table is never written again: what changes gets a new one, so a kernel that still waits on the stream reads what it
was launched with. The allocator keeps the order of reuse on one stream; tables are made anew for another stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import adam_kernels as kernels
from .launch import ceil_div, compile_ahead, launch

CHUNK = 8192  # elements a program works on: 20 KiB to 230 KiB of traffic, and a 124M-parameter model is 15,000 programs
# A tensor without elements has no address, yet takes part: any address but null will do, nothing is read there.
NO_ELEMENTS = 16


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream, 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def capturing(device: torch.device) -> bool:
    """Tell whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Return a device tensor of int64 values, in stream order and without waiting.

    The pinned staging buffer belongs to torch's host allocator, which reuses it only once the copy is done. While a
    graph is captured there is none: values travel as kernel arguments, so that replays write them again.
    """
    host = torch.as_tensor(values, dtype=torch.int64, device="cpu")  # whatever the default device is
    if device.type != "cuda":
        return host
    if not capturing(device):
        _compile_upload(device)
        return host.pin_memory().to(device, non_blocking=True)
    table = torch.empty(ceil_div(host.numel(), 16) * 16, dtype=torch.int64, device=device)
    flat = host.flatten().tolist()
    flat += [0] * (table.numel() - len(flat))
    for start in range(0, len(flat), 16):
        launch(kernels.upload_kernel, (1,), device, (table[start:], *flat[start : start + 16]), {}, 1)
    return table[: host.numel()].view(host.shape)


@functools.cache
def _compile_upload(device: torch.device) -> None:
    """Compile what only a capture needs before there is one."""
    table = torch.empty(16, dtype=torch.int64, device=device)
    compile_ahead(kernels.upload_kernel, (1,), device, (table, *range(16)), {}, 1)


class Chunks(NamedTuple):
    """The programs of one launch: `owner` [programs] has each one's tensor, `first` [tensors] each tensor's first."""

    owner: Tensor
    first: Tensor
    programs: int


def make_chunks(numels: Sequence[int], chosen: Sequence[int], device: torch.device) -> Chunks:
    """Cut the `chosen` of all tensors into chunks; the other tensors get none."""
    counts = [0] * len(numels)
    for i in chosen:
        counts[i] = ceil_div(numels[i], CHUNK)
    total = sum(counts)
    uploaded = upload(counts, device)
    owner = torch.repeat_interleave(torch.arange(len(numels), device=device), uploaded, output_size=total)
    return Chunks(owner, torch.cumsum(uploaded, 0) - uploaded, total)


def address(tensor: Tensor | None) -> int:
    """Return where a tensor's elements lie, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr() or NO_ELEMENTS
