"""Cross-entropy in plain PyTorch: the truth in float64, and what runs where no kernel can."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common import TENSOR_TYPES, wide


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
    if type(input) not in TENSOR_TYPES and not z_loss:  # such as DTensors, whose loss PyTorch knows as a whole alone
        logits = input.to(acc)
        return F.cross_entropy(
            logits if softcap is None else softcap * torch.tanh(logits / softcap),
            target.to(acc) if target.is_floating_point() else target,
            None if weight is None else weight.to(acc),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    logits, kept = input.to(acc), None
    if input.numel() == 0:
        losses = logits.sum(dim)
        total = losses.sum()
        return losses if reduction == "none" else total / 0 if reduction == "mean" else total
    if not target.is_floating_point():
        kept = target != ignore_index
        logits = torch.where(kept.unsqueeze(dim), logits, 0.0)  # whatever is there, no NaN of it gets into a gradient
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weight = None if weight is None else weight.to(acc)
    # The largest logit stays apart: added to a large one, the rest would lose its digits. PyTorch's own loss has a
    # log_softmax, which on a CPU adds up a row, and gradients of it, one after another: a bound's worth in long rows.
    largest = logits.detach().amax(dim, keepdim=True)
    below = logits - largest
    log_sum = torch.logsumexp(below, dim)
    if kept is None:
        losses = F.cross_entropy(logits, target.to(acc), weight, reduction="none", label_smoothing=label_smoothing)
    else:
        at = torch.where(kept, target, 0)
        losses = log_sum - below.gather(dim, at.unsqueeze(dim)).squeeze(dim)
        losses = losses if weight is None else losses * weight[at]
        if label_smoothing:
            column = [-1 if d == dim else 1 for d in range(input.dim())]
            w = input.new_ones(input.shape[dim], dtype=acc) if weight is None else weight
            spread = log_sum * w.sum() - (below * w.view(column)).sum(dim)
            losses = (1 - label_smoothing) * losses + label_smoothing / input.shape[dim] * spread
    if z_loss:
        losses = losses + z_loss * (largest.squeeze(dim) + log_sum).square()
    losses = losses if kept is None else torch.where(kept, losses, 0.0)
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
