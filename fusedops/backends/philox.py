"""The random bits of csrc/philox.h in plain torch: Philox4x32 with ten rounds, on any device, without a host sync.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

OCTET = 8  # elements that the sixteen bytes of one call serve with sixteen bits each
_WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of random bits for each counter.

    Args:
        counter: four int64 tensors that broadcast, with values of 32 bits.
        key: 64 bits.

    Returns:
        Four int64 tensors with values of 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64 bits each; the shift below drops the sign's copies
        c0, c1, c2, c3 = (odd >> 32 & _WORD) ^ c1 ^ k0, odd & _WORD, (even >> 32 & _WORD) ^ c3 ^ k1, even & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


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
    words = philox((octet & _WORD, octet >> 32, whole, step.to(torch.int64) & _WORD), seed)
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
