"""How tensors lie in memory, for kernels that walk lists of tensors element by element."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_layout(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides in which to walk a tensor's memory: its own where it fills it without gaps, else row-major."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def lies_like(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Tell whether a tensor's elements follow each other in memory as `strides` say.

    Not those of a negative view, whose memory has the other sign, nor of a tensor without memory that stands for zeros.
    """
    if tensor.is_neg() or tensor._is_zerotensor():
        return False
    if tensor.stride() == strides:
        return True
    return tensor.numel() == 0 or all(
        size == 1 or have == want for size, have, want in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the tensor, or a copy of it, with its elements in the order of `strides`."""
    if lies_like(tensor, strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
