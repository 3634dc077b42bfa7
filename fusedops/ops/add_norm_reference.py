"""The references of add + norm: the truth, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._common import wide
from .dropout import drop
from .norm_reference import layer_norm_reference, rms_norm_reference

Pair = tuple[Tensor, Tensor]


def add_layer_norm_reference(
    input: Tensor, residual: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, dropout_p: float = 0.0, post_norm: bool = False,
    out_dtype: torch.dtype | None = None, residual_dtype: torch.dtype | None = None, *, seed: Tensor | None = None,
    rounded: Tensor | None = None,
) -> Pair:  # fmt: skip
    """Compute ``add_layer_norm`` in plain PyTorch, in fp32 (fp64 for fp64); derivatives as ``layer_norm_reference``.

    ``seed`` and ``rounded`` repeat what another call drew, and what its sum was rounded to.
    """
    normalised, total = _sum(input, residual, len(normalized_shape), dropout_p, residual_dtype, seed, rounded)
    norm = layer_norm_reference(normalised, normalized_shape, weight, bias, eps, wide(input.dtype))
    return _results(norm, total, post_norm, out_dtype or input.dtype)


def add_rms_norm_reference(
    input: Tensor, residual: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None, weight_offset: float = 0.0, dropout_p: float = 0.0, post_norm: bool = False,
    out_dtype: torch.dtype | None = None, residual_dtype: torch.dtype | None = None, *, seed: Tensor | None = None,
    rounded: Tensor | None = None,
) -> Pair:  # fmt: skip
    """Compute ``add_rms_norm`` in plain PyTorch; see ``add_layer_norm_reference``."""
    normalised, total = _sum(input, residual, len(normalized_shape), dropout_p, residual_dtype, seed, rounded)
    norm = rms_norm_reference(normalised, normalized_shape, weight, eps, weight_offset, wide(input.dtype))
    return _results(norm, total, post_norm, out_dtype or input.dtype)


def _sum(
    input: Tensor, residual: Tensor, dims: int, p: float, dtype: torch.dtype | None, seed: Tensor | None,
    rounded: Tensor | None,
) -> Pair:  # fmt: skip
    """Return the sum, as it is normalised: rounded, yet with the derivative of the sum; and as it is returned."""
    acc = wide(input.dtype)
    total = residual.to(acc) + drop(input.to(acc), p, dims, seed)
    result = total.to(dtype or residual.dtype)
    rounded = (result if rounded is None else rounded).detach().to(acc)
    return total + torch.where(rounded == total, 0.0, rounded - total).detach(), result


def _results(norm: Tensor, total: Tensor, post_norm: bool, dtype: torch.dtype) -> Pair:
    """Return the norm, and the sum or the norm once more: a tensor of its own, also where their dtypes are one."""
    return norm.to(dtype), norm.to(total.dtype, copy=True) if post_norm else total
