"""Add + LayerNorm and add + RMSNorm on Triton: the kernels of the norms, whose rows are then sums.

Functions take 2-D tensors whose last dimension is contiguous and whose row stride is free, in any mix of fp32, fp16 and
bf16.

Numerics: as `norm.py`; the sum is rounded once, and y is the norm of the rounded sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.dropout import threshold_and_scale
from .launch import Launch, launch
from .norm import Sum, Summands, norm_bwd, norm_fwd

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def add_layer_norm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, seed: Tensor | None,
    dropout_p: float, post_norm: bool, keep_total: bool, out_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Add and normalise each row: sum = residual + dropout(x), y = (sum - mean) · rstd · weight + bias.

    Args:
        x (rows, hidden): fp32 | fp16 | bf16, last dimension contiguous.
        residual (rows, hidden): likewise.
        weight (hidden): fp32 | fp16 | bf16, or None for ones.
        bias (hidden): fp32 | fp16 | bf16, or None for zeros.
        eps: added to the variance.
        seed (2,): int64, or None to drop nothing.
        dropout_p: share of x that is dropped.
        post_norm: residual_out is a second y, not the sum.
        keep_total: store the sum although residual_out is not it.
        out_dtype: dtype of y.
        residual_dtype: dtype of the sum and of residual_out.

    Returns:
        y, residual_out and, where it is kept beside that, the sum (rows, hidden) contiguous; mean (rows,) and rstd
        (rows,) in fp32.
    """
    y, residual_out, total, mean, rstd = _fwd(
        x, residual, weight, bias, True, eps, 0.0, seed, dropout_p, post_norm, keep_total, out_dtype, residual_dtype
    )
    assert mean is not None
    return y, residual_out, total, mean, rstd


def add_rms_norm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, seed: Tensor | None,
    dropout_p: float, post_norm: bool, keep_total: bool, out_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Add and scale each row: y = sum · rstd · (weight + weight_offset); else as `add_layer_norm_fwd`.

    Returns:
        y, residual_out, the sum or None, and rstd (rows,) in fp32.
    """
    y, residual_out, total, _, rstd = _fwd(
        x, residual, weight, None, False, eps, weight_offset, seed, dropout_p, post_norm, keep_total, out_dtype,
        residual_dtype,
    )  # fmt: skip
    return y, residual_out, total, rstd


def add_layer_norm_bwd(
    dy: Tensor, dresidual_out: Tensor | None, total: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    seed: Tensor | None, dropout_p: float, post_norm: bool, need: Sequence[bool], input_dtype: torch.dtype,
    residual_dtype: torch.dtype, bias_dtype: torch.dtype | None,
) -> Grads:  # fmt: skip
    """Gradients of `add_layer_norm_fwd`; each is None where `need` (x, residual, weight, bias) says so.

    Args:
        dy (rows, hidden): gradient of y, last dimension contiguous.
        dresidual_out (rows, hidden): gradient of residual_out, in its dtype, or None.
        total (rows, hidden): the sum.
        weight (hidden): the weight of forward, or None.
        mean (rows,): fp32, from forward.
        rstd (rows,): fp32, from forward.
        seed (2,): the seed of forward, or None.
        dropout_p: as in forward.
        post_norm: as in forward.
        need: which gradients to compute.
        input_dtype: dtype of x's gradient.
        residual_dtype: dtype of the residual's gradient.
        bias_dtype: dtype of dbias.

    Returns:
        Gradients of x, residual, weight and bias. That of x is None also where it would be a copy of the residual's.
    """
    return _bwd(
        dy, dresidual_out, total, weight, mean, rstd, 0.0, seed, dropout_p, post_norm, need, input_dtype,
        residual_dtype, bias_dtype,
    )  # fmt: skip


def add_rms_norm_bwd(
    dy: Tensor, dresidual_out: Tensor | None, total: Tensor, weight: Tensor | None, rstd: Tensor,
    weight_offset: float, seed: Tensor | None, dropout_p: float, post_norm: bool, need: Sequence[bool],
    input_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of `add_rms_norm_fwd` (x, residual, weight); else as `add_layer_norm_bwd`."""
    grads = _bwd(
        dy, dresidual_out, total, weight, None, rstd, weight_offset, seed, dropout_p, post_norm, (*need, False),
        input_dtype, residual_dtype, None,
    )  # fmt: skip
    return grads[:3]


def _fwd(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    if torch.compiler.is_compiling():
        from . import traced

        y, residual_out, total, mean, rstd = traced.add_norm_fwd(x, *args)
        *_, post_norm, keep_total, _, _ = args
        return y, residual_out, total if post_norm and keep_total else None, mean, rstd
    return add_norm_fwd(launch, x, *args)


def _bwd(dy: Tensor, *args: Any) -> Grads:
    if torch.compiler.is_compiling():
        from . import traced

        *first, need, input_dtype, residual_dtype, bias_dtype = args
        found = traced.add_norm_bwd(dy, *first, list(need), input_dtype, residual_dtype, bias_dtype)
        wanted = _written(first[-3], need, input_dtype, residual_dtype)
        dinput, dresidual, dweight, dbias = (grad if yes else None for grad, yes in zip(found, wanted, strict=True))
        return dinput, dresidual, dweight, dbias
    return add_norm_bwd(launch, dy, *args)


def _written(
    seed: Tensor | None, need: Sequence[bool], input_dtype: torch.dtype, residual_dtype: torch.dtype
) -> tuple[bool, ...]:
    """Tell which gradients are tensors of their own: x's is the residual's where nothing tells them apart."""
    one = need[1] and seed is None and input_dtype is residual_dtype
    return (need[0] and not one, *need[1:])


def add_norm_fwd(
    run: Launch,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    eps: float,
    weight_offset: float,
    seed: Tensor | None,
    dropout_p: float,
    post_norm: bool,
    keep_total: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Both forward passes; the mean is None where rows are not centred."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    residual_out = torch.empty(x.shape, dtype=residual_dtype, device=x.device)
    total = torch.empty_like(residual_out) if post_norm and keep_total else None
    stored, again = (total, residual_out) if post_norm else (residual_out, None)
    rstd = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centred else None
    added = Sum(residual, stored, again, seed, residual.stride(0), *_threshold_and_scale(dropout_p))
    norm_fwd(run, x, weight, bias, y, mean, rstd, eps, 0.0 if weight is None else weight_offset, added)
    return y, residual_out, total, mean, rstd


def add_norm_bwd(
    run: Launch,
    dy: Tensor,
    dresidual_out: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    seed: Tensor | None,
    dropout_p: float,
    post_norm: bool,
    need: Sequence[bool],
    input_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> Grads:
    """Both backward passes."""
    need_dinput, need_dresidual, need_dweight, need_dbias = _written(seed, need, input_dtype, residual_dtype)
    shape, device = total.shape, total.device
    dinput = torch.empty(shape, dtype=input_dtype, device=device) if need_dinput else None
    dresidual = torch.empty(shape, dtype=residual_dtype, device=device) if need_dresidual else None
    more_dy, dsum = (dresidual_out, None) if post_norm else (None, dresidual_out)
    stride = 0 if dsum is None else dsum.stride(0)
    summands = Summands(dsum, dinput, seed, stride, *_threshold_and_scale(dropout_p))
    _, dweight, dbias = norm_bwd(
        run, dy, total, weight, mean, rstd, weight_offset, dresidual, need_dweight, need_dbias, bias_dtype, summands,
        more_dy,
    )  # fmt: skip
    return dinput, dresidual, dweight, dbias


def _threshold_and_scale(p: float) -> tuple[int, float]:
    """Return the threshold as the int32 of its bits: Inductor 2.11 can't pass an int that needs more."""
    threshold, scale = threshold_and_scale(p)
    return threshold - (threshold >> 31 << 32), scale
