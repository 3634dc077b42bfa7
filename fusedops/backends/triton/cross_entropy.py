"""Cross-entropy on Triton: how the kernels of `cross_entropy_kernels.py` are launched.

Numerics: fp32 throughout, one rounding of the gradient to the logits' dtype; deterministic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.cross_entropy_reference import total_weight as weight_of
from . import cross_entropy_kernels as kernels
from .launch import Launch, launch


class BlockConfig(NamedTuple):
    """How rows of up to `width` classes are walked."""

    width: int
    block: int
    warps: int


# Up to 32 elements a thread, four vectors of 16 bits, are under way at once.
BLOCKS = (
    BlockConfig(256, block=256, warps=1),
    BlockConfig(1024, block=1024, warps=2),
    BlockConfig(8192, block=4096, warps=4),
    BlockConfig(2**30, block=8192, warps=8),
)


class Options(NamedTuple):
    """What a call has beside tensors."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None


def cross_entropy_fwd(
    x: Tensor, target: Tensor, weight: Tensor | None, *, ignore_index: int, reduction: str, label_smoothing: float,
    z_loss: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss of logits.

    Args:
        x (rows, classes): fp32 | fp16 | bf16, last dimension contiguous.
        target (rows,): int64.
        weight (classes,): fp32 | fp16 | bf16, or None for ones.
        ignore_index: rows with this target count for nothing.
        reduction: "none", "mean" or "sum".
        label_smoothing: the share of the target that is spread over all classes.
        z_loss: factor of lse².
        softcap: what caps the logits, or None.

    Returns:
        loss (rows,) or (), the largest logit and ln s of each row (rows, 2), and what the mean divides by (), all fp32.
    """
    options = (ignore_index, reduction, label_smoothing, z_loss, softcap)
    if torch.compiler.is_compiling():
        from . import traced

        loss, stats, total = traced.cross_entropy_fwd(x, target, weight, *options)
        return loss, stats, total
    return fwd(launch, x, target, weight, Options(*options))


def cross_entropy_bwd(
    dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, total_weight: Tensor, *,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
    dx: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of `cross_entropy_fwd` by x.

    Args:
        dloss (rows,) or (): fp32.
        x (rows, classes): the logits of forward, and so
        target (rows,): its targets,
        weight (classes,): its weights, or None.
        stats (rows, 2): from forward.
        total_weight (): from forward.
        ignore_index: as in forward.
        reduction: as in forward.
        label_smoothing: as in forward.
        z_loss: as in forward.
        softcap: as in forward.
        dx: x itself, to be written over; None: new memory.

    Returns:
        dx (rows, classes) in x's dtype.
    """
    options = (ignore_index, reduction, label_smoothing, z_loss, softcap)
    if torch.compiler.is_compiling():
        from . import traced

        made: Tensor = traced.cross_entropy_bwd(dloss, x, target, weight, stats, total_weight, *options)
        return made
    return bwd(launch, dloss, x, target, weight, stats, total_weight, Options(*options), dx)


def fwd(
    run: Launch, x: Tensor, target: Tensor, weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``cross_entropy_fwd``, by any way to launch."""
    rows, classes = x.shape[0], int(x.shape[1])
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    stats = torch.empty(rows, 2, dtype=torch.float32, device=x.device)
    ignored = target == options.ignore_index
    torch._assert_async(
        (ignored | ((target >= 0) & (target < classes))).all(),
        f"cross_entropy: target: expected class indices from 0 to {classes - 1}, or ignore_index "
        f"{options.ignore_index}",
    )
    if rows and classes:
        args = (x, target, weight, _weights(weight, options), losses, stats, classes, x.stride(0), *_numbers(options))
        run(kernels.cross_entropy_fwd_kernel, (rows,), x.device, args, *_meta(x, options))
    else:
        losses.zero_()
        stats.zero_()
    wide = None if weight is None else weight.float()
    mean = options.reduction == "mean"
    total = weight_of(losses, target, wide, ~ignored) if mean else losses.new_zeros(())
    if options.reduction == "none":
        return losses, stats, total
    return losses.sum() / total if mean else losses.sum(), stats, total


def bwd(
    run: Launch, dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, total_weight: Tensor,
    options: Options, dx: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As ``cross_entropy_bwd``, by any way to launch."""
    rows, classes = x.shape[0], int(x.shape[1])
    if dx is None:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not (rows and classes):
        return dx
    divide = total_weight if options.reduction == "mean" else None
    tensors = (x, target, weight, _weights(weight, options), stats, dloss, divide, dx)
    args = (*tensors, classes, x.stride(0), dx.stride(0), *_numbers(options))
    meta, warps = _meta(x, options)
    alike = {"EACH": int(options.reduction == "none"), "ALIKE": x.stride(0) == dx.stride(0)}
    run(kernels.cross_entropy_bwd_kernel, (rows,), x.device, args, {**alike, **meta}, warps)
    return dx


def _weights(weight: Tensor | None, options: Options) -> Tensor | None:
    """Add up the weights of all classes, which label smoothing asks for."""
    return None if weight is None or not options.label_smoothing else weight.float().sum()


def _numbers(options: Options) -> tuple[int, float, float, float]:
    cap = 1.0 if options.softcap is None else options.softcap
    return options.ignore_index, options.label_smoothing, options.z_loss, cap


def _meta(x: Tensor, options: Options) -> tuple[dict[str, Any], int]:
    classes = int(x.shape[1])
    config = next(config for config in BLOCKS if classes <= config.width)
    meta = {"SMOOTH": options.label_smoothing != 0, "CAPPED": options.softcap is not None}
    block = config.block // 2 if any(meta.values()) else config.block  # those need registers of their own
    return {**meta, "VEC": 16 // x.element_size(), "BLOCK": block}, config.warps
