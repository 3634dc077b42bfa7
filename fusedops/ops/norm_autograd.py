"""Whole norms of a backend's forward and backward on (rows, hidden): views, autograd, second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._common import differentiate, flat_parameter, rows_of, unit_stride
from .norm_reference import layer_norm_reference, rms_norm_reference


class _Norm(torch.autograd.Function):
    """One autograd function over any backend's pairs; backward is the same backend's as forward."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        centred: bool,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        weight_offset: float,
        dtype: torch.dtype,
    ) -> Tensor:
        mean: Tensor | None = None
        if centred:
            y, mean, rstd = module.layer_norm_fwd(x, weight, bias, eps, dtype)
        else:
            y, rstd = module.rms_norm_fwd(x, weight, eps, weight_offset, dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.module, ctx.eps, ctx.weight_offset, ctx.dtype = module, eps, weight_offset, dtype
        ctx.bias = None if bias is None else bias.dtype
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        need, centred = ctx.needs_input_grad[2:5], mean is not None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = norm_bwd_in_torch(ctx, dy, x, weight, ctx.bias, centred, need, ctx.dtype)
        elif centred:
            grads = ctx.module.layer_norm_bwd(unit_stride(dy), x, weight, mean, rstd, need, ctx.bias)
        else:
            dx, dweight = ctx.module.rms_norm_bwd(unit_stride(dy), x, weight, rstd, ctx.weight_offset, need[:2])
            grads = (dx, dweight, None)
        return None, None, *grads, None, None, None


def norm_bwd_in_torch(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, bias_dtype: torch.dtype | None, centred: bool,
    need: Sequence[bool], dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, weight and bias in differentiable torch ops, eps and weight_offset being ctx's."""
    # A bias enters linearly: its value does not matter to any derivative.
    bias = None if bias_dtype is None else x.new_zeros(x.shape[1], dtype=bias_dtype).requires_grad_()

    def norm() -> Tensor:
        if centred:
            return layer_norm_reference(x, x.shape[1:], weight, bias, ctx.eps, dtype)
        return rms_norm_reference(x, x.shape[1:], weight, ctx.eps, ctx.weight_offset, dtype)

    return differentiate(norm, (x, weight, bias), need, dy)


def wrap_norm(centred: bool) -> Callable[[ModuleType], Callable[..., Tensor]]:
    """Make a whole op of a backend's pair."""

    def wrap(module: ModuleType) -> Callable[..., Tensor]:
        def run(input: Tensor, shape: Sequence[int], weight: Tensor | None, *rest: Any) -> Tensor:
            bias, eps, weight_offset, dtype = (rest[0], rest[1], 0.0, rest[2]) if centred else (None, *rest)
            hidden = math.prod(shape)
            weight = None if weight is None else flat_parameter(weight, hidden)
            bias = None if bias is None else flat_parameter(bias, hidden)
            y: Tensor = _Norm.apply(module, centred, rows_of(input, hidden), weight, bias, eps, weight_offset, dtype)
            return y.view(input.shape)

        return run

    return wrap
