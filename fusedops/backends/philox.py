"""Stochastic rounding to bf16 in plain torch, on any device, without a host sync; its bits are csrc/philox.h's.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.dropout import philox

OCTET = 8  # elements that the sixteen bytes of one call serve with sixteen bits each
_WORD = 0xFFFFFFFF


def sixteen_bits(count: int, index: int, step: Tensor, seed: int) -> Tensor:
    """Return the sixteen random bits of each of a parameter's elements for one step.

    Args:
        count: number of elements.
        index: of the parameter in its optimizer.
        step: 0-dim number of the step, on the device where the bits are wanted.
        seed: 64 bits.

    Returns:
        [count] int64, in the order in which the elements lie in memory.
    """
    octet = torch.arange(-(-count // OCTET), device=step.device)
    whole = torch.full_like(octet, index)
    counter = (octet & _WORD, octet >> 32, whole, step.to(torch.int64) & _WORD)
    words = philox(counter, seed & _WORD, seed >> 32 & _WORD)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=1).flatten()[:count]


def round_to_bfloat16(value: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16, away from zero where the lower half of a number and its random bits add up to 2¹⁶.

    Args:
        value: fp32, of any shape.
        bits: integers of sixteen bits, of the same shape.

    Returns:
        bf16; inf and NaN stay what they are.
    """
    rounded = (value.view(torch.int32) + bits.to(torch.int32) & -0x10000).view(torch.float32)
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)
