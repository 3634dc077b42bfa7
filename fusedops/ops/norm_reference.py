"""The references of LayerNorm and RMSNorm: the truth, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import CONFIG
from ._common import default_eps, wide


def layer_norm_reference(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``layer_norm`` in plain PyTorch, in fp32 (fp64 for fp64), differentiable any number of times.

    Not on a CPU: PyTorch's own LayerNorm, which is fast there, has wrong third derivatives.
    """
    acc, hidden = wide(input.dtype), math.prod(normalized_shape)
    # Over one dimension: with several and many rows, PyTorch 2.11's dweight has the wrong shape on CUDA.
    x = input.to(acc).reshape(*input.shape[: input.dim() - len(normalized_shape)], hidden)
    w, b = (None if t is None else t.to(acc).reshape(hidden) for t in (weight, bias))
    own = CONFIG.disabled or not input.is_cuda  # see _standardize
    drifts = acc is torch.float64 and not CONFIG.disabled  # its sums over rows on a CPU; these are the truth
    if own and not drifts and (w is not None or b is None):
        y = F.layer_norm(x, (hidden,), w, b, eps)
    else:  # PyTorch has no second derivative of a bias alone
        y = F.layer_norm(x, (hidden,), None, None, eps) if own else _standardize(x, eps)
        y = y if w is None else y * w
        y = y if b is None else y + b
    return y.reshape(input.shape).to(out_dtype or input.dtype)


def rms_norm_reference(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None,
    weight_offset: float = 0.0, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``rms_norm`` in plain PyTorch, in fp32 (fp64 for fp64), differentiable any number of times."""
    acc = wide(input.dtype)
    eps = default_eps(input.dtype) if eps is None else eps
    if input.is_cuda and not CONFIG.disabled:  # see _standardize
        y = _over_root_mean_square(input.to(acc), list(range(-len(normalized_shape), 0)), eps)
    else:
        y = torch.rms_norm(input.to(acc), list(normalized_shape), None, eps)  # F's can't be compiled on a subclass
    return (y if weight is None else y * (weight.to(acc) + weight_offset)).to(out_dtype or input.dtype)


def _standardize(x: Tensor, eps: float) -> Tensor:
    """Return rows of mean 0 and variance 1, with the corrected two-pass variance (Chan, Golub, LeVeque 1983).

    On CUDA PyTorch's own norms (2.11) can't be the truth: LayerNorm's dbias has no elements where dweight is not
    wanted, in wide rows of tiny spread its fp32 results are off by 1.5 of our bound; RMSNorm makes NaN of all of a row
    that has an inf, is off by 2.8 of the bound in dweight at 2^20 columns, and can't be compiled with symbolic sizes.
    """
    x = x - x.mean(-1, keepdim=True)
    x = x - x.mean(-1, keepdim=True)
    return _over_root_mean_square(x, [-1], eps)


def _over_root_mean_square(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps)``.

    The derivative of a rsqrt would be its cube, which fp32 can't hold where rows are of 1e15.
    """
    return x / torch.sqrt(x.square().mean(dims, keepdim=True) + eps)
