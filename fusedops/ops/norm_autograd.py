"""Whole norms of a backend's forward and backward on (rows, hidden): views, autograd, second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._common import differentiate, flat_parameter, in_memory, rows_of
from .norm_reference import layer_norm_reference, rms_norm_reference


class _LayerNorm(torch.autograd.Function):
    """One autograd function over any backend's pair; backward is the same backend's as forward."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        y, mean, rstd = module.layer_norm_fwd(x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.module, ctx.eps, ctx.dtype, ctx.bias = module, eps, dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[1:4]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A bias enters linearly: its value does not matter to any derivative.
            bias = None if ctx.bias is None else x.new_zeros(x.shape[1], dtype=ctx.bias).requires_grad_()
            args = (x, weight, bias)
            return (
                None,
                *differentiate(
                    lambda: layer_norm_reference(x, x.shape[1:], weight, bias, ctx.eps, ctx.dtype), args, need, dy
                ),
                None,
                None,
            )
        dy = in_memory(dy if dy.stride(1) == 1 or x.shape[1] == 1 else dy.contiguous())
        return None, *ctx.module.layer_norm_bwd(dy, x, weight, mean, rstd, need, ctx.bias), None, None


class _RMSNorm(torch.autograd.Function):
    """One autograd function over any backend's pair; backward is the same backend's as forward."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        dtype: torch.dtype,
    ) -> Tensor:
        y, rstd = module.rms_norm_fwd(x, weight, eps, weight_offset, dtype)
        ctx.save_for_backward(x, weight, rstd)
        ctx.module, ctx.eps, ctx.weight_offset, ctx.dtype = module, eps, weight_offset, dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[1:3]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (
                None,
                *differentiate(
                    lambda: rms_norm_reference(x, x.shape[1:], weight, ctx.eps, ctx.weight_offset, ctx.dtype),
                    (x, weight),
                    need,
                    dy,
                ),
                None,
                None,
                None,
            )
        dy = in_memory(dy if dy.stride(1) == 1 or x.shape[1] == 1 else dy.contiguous())
        return None, *ctx.module.rms_norm_bwd(dy, x, weight, rstd, ctx.weight_offset, need), None, None, None


def wrap_layer_norm(module: ModuleType) -> Callable[..., Tensor]:
    """Make a whole op of a backend's ``layer_norm_fwd`` and ``layer_norm_bwd``."""

    def run(
        input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        hidden = math.prod(shape)
        flat = [None if p is None else flat_parameter(p, hidden) for p in (weight, bias)]
        y: Tensor = _LayerNorm.apply(module, rows_of(input, hidden), *flat, eps, dtype)
        return y.view(input.shape)

    return run


def wrap_rms_norm(module: ModuleType) -> Callable[..., Tensor]:
    """Make a whole op of a backend's ``rms_norm_fwd`` and ``rms_norm_bwd``."""

    def run(
        input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float, weight_offset: float, dtype: torch.dtype
    ) -> Tensor:
        hidden = math.prod(shape)
        flat = None if weight is None else flat_parameter(weight, hidden)
        y: Tensor = _RMSNorm.apply(module, rows_of(input, hidden), flat, eps, weight_offset, dtype)
        return y.view(input.shape)

    return run
