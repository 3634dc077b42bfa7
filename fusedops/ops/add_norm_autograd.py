"""Whole add + norms of a backend's forward and backward on (rows, hidden): views, seeds, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._common import flat_parameter, rows_of, unit_stride, wide
from .add_norm_reference import Pair
from .dropout import draw_seed, dropout_factor
from .norm_autograd import norm_bwd_in_torch


class _AddNorm(torch.autograd.Function):
    """One autograd function over any backend's pairs; a gradient that is absent stays absent."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        centred: bool,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        eps: float,
        weight_offset: float,
        p: float,
        post_norm: bool,
        keep_total: bool,
        dtype: torch.dtype,
        residual_dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        mean: Tensor | None = None
        if centred:
            y, residual_out, total, mean, rstd = module.add_layer_norm_fwd(
                x, residual, weight, bias, eps, seed, p, post_norm, keep_total, dtype, residual_dtype
            )
        else:
            y, residual_out, total, rstd = module.add_rms_norm_fwd(
                x, residual, weight, eps, weight_offset, seed, p, post_norm, keep_total, dtype, residual_dtype
            )
        ctx.set_materialize_grads(False)
        # The sum is an output even where nobody sees it: second derivatives, which compiled code does not have, find
        # their way back through it.
        hidden = () if total is None or torch.compiler.is_compiling() else (total,)
        sums = hidden if post_norm else (residual_out,)
        if not (ctx.needs_input_grad[2] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(*sums)
        ctx.save_for_backward(total if post_norm else residual_out, weight, mean, rstd, seed)
        ctx.module, ctx.eps, ctx.weight_offset, ctx.p, ctx.post_norm = module, eps, weight_offset, p, post_norm
        ctx.dtypes = (x.dtype, residual.dtype, None if bias is None else bias.dtype)
        return y, residual_out, *hidden

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None, dtotal: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd, seed = ctx.saved_tensors
        need = ctx.needs_input_grad[2:6]
        if ctx.post_norm and dy is None:
            dy, dresidual_out = dresidual_out, None  # one gradient of the norm is as good as the other
        second = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if dy is None or dtotal is not None or second:
            grads = _bwd_in_torch(ctx, dy, dresidual_out, dtotal, total, weight, mean is not None, seed, need)
        else:
            dy, dresidual_out = unit_stride(dy), None if dresidual_out is None else unit_stride(dresidual_out)
            x_dtype, residual_dtype, bias_dtype = ctx.dtypes
            given = (dy, dresidual_out, total, weight)
            if mean is not None:
                dx, dresidual, dweight, dbias = ctx.module.add_layer_norm_bwd(
                    *given, mean, rstd, seed, ctx.p, ctx.post_norm, need, x_dtype, residual_dtype, bias_dtype
                )
            else:
                dx, dresidual, dweight = ctx.module.add_rms_norm_bwd(
                    *given, rstd, ctx.weight_offset, seed, ctx.p, ctx.post_norm, need[:3], x_dtype, residual_dtype
                )
                dbias = None
            grads = (dresidual if need[0] and dx is None else dx, dresidual, dweight, dbias)
        return None, None, *grads, *(None,) * 8


def _bwd_in_torch(
    ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None, dtotal: Tensor | None, total: Tensor,
    weight: Tensor | None, centred: bool, seed: Tensor | None, need: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, residual, weight and bias in differentiable torch ops, from whichever dy there are."""
    acc = wide(total.dtype)
    dy, dresidual_out, dsum = (None if grad is None else grad.to(acc) for grad in (dy, dresidual_out, dtotal))
    if not ctx.post_norm:
        dsum = dresidual_out
    elif dy is not None and dresidual_out is not None:
        dy = dy + dresidual_out
    dweight = dbias = None
    x_dtype, residual_dtype, bias_dtype = ctx.dtypes
    if dy is not None:
        with torch.enable_grad():
            x = total.to(acc) if total.requires_grad else total.to(acc, copy=True).requires_grad_()
        wanted = (need[0] or need[1], *need[2:])
        dnorm, dweight, dbias = norm_bwd_in_torch(ctx, dy, x, weight, bias_dtype, centred, wanted, acc)
        if dnorm is not None:
            dsum = dnorm if dsum is None else dsum + dnorm
    if dsum is None:
        return None, None, dweight, dbias
    dx = dsum if seed is None else dsum * dropout_factor(seed, ctx.p, dsum.shape, 1, acc)
    return dx.to(x_dtype) if need[0] else None, dsum.to(residual_dtype) if need[1] else None, dweight, dbias


def wrap_add_norm(centred: bool) -> Callable[[ModuleType], Callable[..., Pair]]:
    """Make a whole op of a backend's pair."""

    def wrap(module: ModuleType) -> Callable[..., Pair]:
        def run(input: Tensor, residual: Tensor, shape: Sequence[int], weight: Tensor | None, *rest: Any) -> Pair:
            bias, eps, weight_offset, p, post_norm, dtype, residual_dtype = (
                (rest[0], rest[1], 0.0, *rest[2:]) if centred else (None, *rest)
            )
            hidden = math.prod(shape)
            weight, bias = (None if t is None else flat_parameter(t, hidden) for t in (weight, bias))
            differentiable = (t is not None and t.requires_grad for t in (input, residual, weight, bias))
            keep_total = post_norm and torch.is_grad_enabled() and any(differentiable)
            y, residual_out, *_ = _AddNorm.apply(
                module, centred, rows_of(input, hidden), rows_of(residual, hidden), weight, bias, draw_seed(p, input),
                eps, weight_offset, p, post_norm, keep_total, dtype, residual_dtype or residual.dtype,
            )  # fmt: skip
            return y.view(input.shape), residual_out.view(input.shape)

        return run

    return wrap
