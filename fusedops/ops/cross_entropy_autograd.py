"""Cross-entropy of a backend's forward and backward on (rows, classes): views, autograd, second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._common import differentiate, rows_of
from .cross_entropy_reference import class_dim, cross_entropy_reference


class _CrossEntropy(torch.autograd.Function):
    """One autograd function over any backend's pair; backward is the same backend's as forward."""

    @staticmethod
    def forward(
        ctx: Any, module: ModuleType, x: Tensor, target: Tensor, weight: Tensor | None, options: dict[str, Any],
        in_place: bool,
    ) -> Tensor:  # fmt: skip
        loss, stats, total_weight = module.cross_entropy_fwd(x, target, weight, **options)
        ctx.save_for_backward(x, target, weight, stats, total_weight)
        ctx.module, ctx.options, ctx.in_place = module, options, in_place
        result: Tensor = loss
        return result

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, target, weight, stats, total_weight = ctx.saved_tensors
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not compiling:
            function = lambda: cross_entropy_reference(x, target, weight, **ctx.options)  # noqa: E731
            dx, *_ = differentiate(function, (x,), (True,), dloss)
        else:
            # A compiler plans memory itself, and takes a saved tensor that changes for a mistake.
            into = x.detach() if ctx.in_place and not compiling else None
            dx = ctx.module.cross_entropy_bwd(
                dloss.contiguous(), x, target, weight, stats, total_weight, **ctx.options, dx=into
            )
            if into is not None:
                torch.autograd.graph.increment_version(into)  # which it shares with the logits
        return None, dx, None, None, None, None


def wrap_cross_entropy(module: ModuleType) -> Callable[..., Tensor]:
    """Make a whole op of a backend's pair."""

    def run(
        input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str,
        label_smoothing: float, z_loss: float, softcap: float | None, inplace_backward: bool,
    ) -> Tensor:  # fmt: skip
        dim = class_dim(input)
        options = {
            "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss,
            "softcap": softcap,
        }  # fmt: skip
        x = rows_of(input.movedim(dim, -1), input.shape[dim])
        weight = None if weight is None else weight.contiguous()
        loss: Tensor = _CrossEntropy.apply(module, x, target.reshape(-1), weight, options, inplace_backward)
        return loss.view(target.shape) if reduction == "none" else loss

    return run
