"""Dropout without a stored mask: what an element is multiplied with is a function of a seed, its row and its column.

The same function in plain PyTorch as in ``csrc/dropout.h`` and ``backends/triton/dropout.py``, bit for bit: four
neighbours in a row share a call of Philox-4x32-10, and an element is kept where its 32-bit word is not below
p·2³², so p is met to the nearest multiple of 2⁻³².

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common import TENSOR_TYPES, transformed

_WORD = 0xFFFFFFFF


def draw_seed(p: float, input: Tensor) -> Tensor | None:
    """Draw a seed (int64, two numbers) from the generator of ``input``'s device, or none where nothing is dropped.

    An operator of its own, so that a compiled graph draws what eager draws. Each call has an argument of its own:
    PyTorch takes equal calls of an operator for one unless it knows it for random, and it knows only its own.
    """
    if not p > 0:
        return None
    if transformed():  # vmap decides about equal and different numbers, and knows only PyTorch's own operators
        return torch.randint(2**63 - 1, (2,), device=input.device)
    seed: Tensor = torch.ops.fusedops.dropout_seed(torch.empty(0, dtype=torch.int64, device=input.device))
    return seed


def threshold_and_scale(p: float) -> tuple[int, float]:
    """Return from which word on an element is kept, and what it is then multiplied with."""
    threshold = int(p * 2.0**32 + 0.5)
    return (threshold, 1 / (1 - p)) if threshold <= _WORD else (_WORD, 0.0)


def dropout_factor(seed: Tensor, p: float, shape: Sequence[int], dims: int, dtype: torch.dtype) -> Tensor:
    """Return what dropout multiplies a tensor of ``shape`` with, whose rows are its last ``dims`` dimensions."""
    hidden, rows = prod(shape[len(shape) - dims :]), prod(shape[: len(shape) - dims])
    group = torch.arange((hidden + 3) // 4, device=seed.device)[None, :]
    row = torch.arange(rows, device=seed.device)[:, None]
    words = philox((group, row & _WORD, row >> 32, seed[1] & _WORD), seed[0] & _WORD, seed[0] >> 32 & _WORD)
    word = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :hidden]
    threshold, scale = threshold_and_scale(p)
    return ((word >= threshold).to(dtype) * scale).reshape(shape)


def drop(x: Tensor, p: float, dims: int, seed: Tensor | None = None) -> Tensor:
    """Drop elements of ``x``, whose rows are its last ``dims`` dimensions, by a seed: a new one where none is given.

    PyTorch drops those of its subclasses, whose shards and ragged rows only it knows.
    """
    if seed is None and p > 0 and type(x) not in TENSOR_TYPES:
        return F.dropout(x, p)
    seed = draw_seed(p, x) if seed is None else seed
    return x if seed is None else x * dropout_factor(seed, p, x.shape, dims, x.dtype)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key0: Tensor | int, key1: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of random bits for each counter: Philox-4x32 with ten rounds, as csrc/philox.h.

    Args:
        counter: four int64 tensors that broadcast, with values of 32 bits.
        key0: the key's lower 32 bits.
        key1: its upper 32 bits.
    """
    c0, c1, c2, c3 = counter
    for _ in range(10):
        (even_high, even_low), (odd_high, odd_low) = _multiply(c0, 0xD2511F53), _multiply(c2, 0xCD9E8D57)
        c0, c1 = odd_high ^ c1 ^ key0, odd_low
        c2, c3 = even_high ^ c3 ^ key1, even_low
        key0, key1 = key0 + 0x9E3779B9 & _WORD, key1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of a product of two numbers of 32 bits.

    In two steps, each below 2⁶³: compiled code may take it for granted that an int64 does not overflow.
    """
    low, high = (word & 0xFFFF) * factor, (word >> 16) * factor
    high = high + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
