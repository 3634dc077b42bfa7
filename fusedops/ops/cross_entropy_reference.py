"""Cross-entropy in plain PyTorch: the truth in float64, and what runs where no kernel can."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common import wide


def class_dim(input: Tensor) -> int:
    """Return the dimension of the classes: the second, or the only one."""
    return min(1, input.dim() - 1)


def cross_entropy_reference(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Compute ``cross_entropy``; see there. ``inplace_backward`` is granted nothing: autograd has its own memory."""
    acc, dim = wide(input.dtype), class_dim(input)
    logits, kept = input.to(acc), None
    if target.is_floating_point():
        target = target.to(acc)
    else:
        kept = target != ignore_index
        logits = torch.where(kept.unsqueeze(dim), logits, 0.0)  # whatever is there, no NaN of it gets into a gradient
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weight = None if weight is None else weight.to(acc)
    if z_loss == 0:
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    losses = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    penalty = z_loss * torch.logsumexp(logits, dim).square()
    losses = losses + (penalty if kept is None else torch.where(kept, penalty, 0.0))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / total_weight(losses, target, weight, kept)


def total_weight(losses: Tensor, target: Tensor, weight: Tensor | None, kept: Tensor | None) -> Tensor:
    """Return what a mean divides by: the weights of the rows that count, or their number."""
    if kept is None:
        return losses.new_full((), losses.numel())
    if weight is None:
        return kept.sum().to(losses.dtype)
    return torch.where(kept, weight[torch.where(kept, target, 0)], 0.0).sum()
