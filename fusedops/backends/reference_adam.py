"""Adam, AdamW and the gradient norm in plain torch, one tensor at a time.

Runs wherever torch runs, never reads a value back to the host and is written to be read: the other backends are
compared with it. Arithmetic is fp32 (fp64 for fp64 parameters), bias corrections are fp64, and every tensor is rounded
once, when it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._common import FLOATS
from . import philox
from .memory import memory_layout


class ReferenceAdamPlan:
    """One Adam step for the tensors of one device.

    Args:
        params: parameters: fp16 | bf16 | fp32 | fp64.
        exp_avg: first moments, shaped like the parameters.
        exp_avg_sq: second moments.
        max_exp_avg_sq: running maxima for amsgrad; empty, or None where a group has none.
        master: fp32 master weights, or None where a parameter has none.
        compensation: what the parameter's rounding lost, in its dtype, or None where that is not kept.
        step: 0-dim fp32 counters on the parameters' device.
        group: index of each parameter's group into the per-group lists of ``prepare``.
        index: of each parameter in its optimizer.
    """

    def __init__(
        self,
        params: list[Tensor],
        exp_avg: list[Tensor],
        exp_avg_sq: list[Tensor],
        max_exp_avg_sq: list[Tensor | None],
        master: list[Tensor | None],
        compensation: list[Tensor | None],
        step: list[Tensor],
        group: list[int],
        index: list[int],
    ) -> None:
        self._params = params
        maxima = max_exp_avg_sq or [None] * len(params)
        self._tensors = list(zip(exp_avg, exp_avg_sq, maxima, master, compensation, step, strict=True))
        self._group = group
        self._index = index
        self._prepared: tuple[Any, ...] | None = None

    @torch.no_grad()
    def prepare(
        self,
        lr: Sequence[float | Tensor],
        beta1: Sequence[float | Tensor],
        beta2: Sequence[float | Tensor],
        eps: Sequence[float],
        weight_decay: Sequence[float],
        decoupled: Sequence[bool],
        amsgrad: Sequence[bool],
        maximize: Sequence[bool],
        seed: Sequence[int | None],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_grad_norm: float | None,
    ) -> None:
        """Check a step of every parameter that has a gradient now; nothing is written, gradients never.

        Args:
            lr: learning rate per group, as are the lists after it.
            beta1: decay of the first moment.
            beta2: decay of the second moment.
            eps: added to the denominator.
            weight_decay: decay of the weights.
            decoupled: AdamW's decay instead of Adam's L2 term.
            amsgrad: divide by the running maximum of the second moment.
            maximize: step along the gradient.
            seed: of the stochastic rounding of bf16 parameters without master and compensation; None: to nearest.
            grad_scale: gradients are divided by it.
            found_inf: where non-zero, nothing changes, the counters included.
            grad_norm: norm of the unscaled gradients.
            max_grad_norm: gradients are scaled down so that their norm is at most this.

        Raises:
            ValueError: a gradient that does not fit its parameter.
        """
        grads = [p.grad for p in self._params]
        for number, (p, grad) in enumerate(zip(self._params, grads, strict=True)):
            if grad is not None:
                _check_gradient(number, p, grad)
        clip = None if grad_norm is None or max_grad_norm is None else clip_coefficient(grad_norm, max_grad_norm)
        groups = list(zip(lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, seed, strict=True))
        self._prepared = (grads, groups, grad_scale, found_inf, clip)

    def grad_norm(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor | None:
        """Return ``grad_norm`` of the parameters' gradients, None where there is none."""
        grads = [p.grad for p in self._params if p.grad is not None]
        return grad_norm(grads, grad_scale, found_inf) if grads else None

    @torch.no_grad()
    def launch(self) -> None:
        """Take the step that was prepared last, once."""
        if self._prepared is None:
            return
        (grads, groups, grad_scale, found_inf, clip), self._prepared = self._prepared, None
        write = None if found_inf is None else found_inf.reshape(()) == 0
        for p, grad, tensors, i, index in zip(
            self._params, grads, self._tensors, self._group, self._index, strict=True
        ):
            if grad is None:
                continue
            lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, seed = groups[i]
            exp_avg, exp_avg_sq, max_exp_avg_sq, master, compensation, step = map(_local, tensors)
            p = _local(p)
            dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
            g = _local(grad).to(dtype)
            if grad_scale is not None:
                g = g / grad_scale.reshape(()).to(dtype)
            if clip is not None:
                g = g * clip.to(dtype)
            if maximize:
                g = -g
            value = (p if master is None else master).to(dtype)
            if compensation is not None:
                value = value + compensation.to(dtype)

            t = step.to(_scalar_dtype(p.device)) + 1
            rate, decay1, decay2 = (_number(x, t) for x in (lr, beta1, beta2))
            step_size = (rate / (1 - decay1**t)).to(dtype)
            correction = (1 - decay2**t).sqrt().to(dtype)
            if weight_decay and decoupled:
                value = value * (1 - rate * weight_decay).to(dtype)
            elif weight_decay:
                g = g.add(value, alpha=weight_decay)
            m = torch.lerp(exp_avg.to(dtype), g, (1 - decay1).to(dtype))
            v = exp_avg_sq.to(dtype) * decay2.to(dtype) + (1 - decay2).to(dtype) * g * g
            peak = v
            if amsgrad:
                peak = torch.maximum(max_exp_avg_sq.to(dtype), v)
                _write(max_exp_avg_sq, peak, write)
            value = value + -step_size * m / (peak.sqrt() / correction + eps)

            _write(exp_avg, m, write)
            _write(exp_avg_sq, v, write)
            if master is not None:
                _write(master, value, write)
            rounded = value.to(p.dtype)
            if compensation is not None:
                rest = value - rounded.to(dtype)
                _write(compensation, torch.where(rest.isfinite(), rest, 0.0), write)  # inf - inf would be NaN for good
            elif master is None and seed is not None and p.dtype is torch.bfloat16:
                bits = philox.sixteen_bits(p.numel(), index, t, seed).as_strided(p.shape, memory_layout(p))
                rounded = philox.round_to_bfloat16(value, bits)
            _write(p, rounded, write)
            _write(step, step + 1, write)


@torch.no_grad()
def grad_norm(grads: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """Return the 2-norm of all gradients of one device, divided by ``grad_scale``.

    Args:
        grads: fp16 | bf16 | fp32 | fp64, of any shapes.
        grad_scale: 1-element fp32, or None.
        found_inf: 1-element fp32; set to 1 where any gradient holds an inf or NaN, else left alone.

    Returns:
        1-element fp32 (fp64 when any gradient is).
    """
    if not grads:
        raise ValueError("grad_norm: grads: expected at least one tensor, got none")
    dtype = _scalar_dtype(grads[0].device)
    norms = torch.stack([_full(_norm(g, dtype)) for g in grads])
    if found_inf is not None:
        largest = torch.stack(
            [_full(torch.linalg.vector_norm(g, float("inf")).to(dtype)) for g in grads if g.numel()] or [norms[0]]
        )
        found_inf.masked_fill_(~largest.isfinite().all(), 1.0)
    norm = torch.linalg.vector_norm(norms)
    if grad_scale is not None:
        norm = norm / grad_scale.reshape(())
    return norm.to(torch.float64 if any(g.dtype is torch.float64 for g in grads) else torch.float32).reshape(1)


def _norm(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the 2-norm of one gradient; PyTorch's vector_norm adds up in a row, which fp64 results would show."""
    return g.square().sum().sqrt() if g.dtype is torch.float64 else torch.linalg.vector_norm(g, dtype=dtype)


@torch.no_grad()
def grad_scale_(grads: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply every gradient of one device by ``coef`` (1 element), in place."""
    for g in grads:
        if not g._is_zerotensor():  # which stands for zeros and can't be written
            g.mul_(coef.reshape(()))


def clip_coefficient(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return ``min(1, max_norm / (norm + 1e-6))`` (0-dim): what brings gradients of that norm down to ``max_norm``.

    A tensor ``max_norm`` (1 element of ``norm``'s dtype, on its device) gives the bits that its number gives: the
    product is how torch divides a number by a tensor.
    """
    limit = max_norm.reshape(()) if isinstance(max_norm, Tensor) else max_norm
    return (norm.reshape(()) + 1e-6).reciprocal_().mul_(limit).clamp_(max=1.0)  # in place: no memory to be asked for


def _check_gradient(number: int, p: Tensor, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise ValueError(f"step: gradient of parameter {number}: expected a dense tensor, got layout {grad.layout}")
    if grad.shape != p.shape or grad.device != p.device or grad.dtype not in FLOATS:
        raise ValueError(
            f"step: gradient of parameter {number}: expected shape {tuple(p.shape)} on {p.device} in fp64, fp32, fp16 "
            f"or bf16, got shape {tuple(grad.shape)} on {grad.device} in {grad.dtype}"
        )


def _write(target: Tensor, value: Tensor, write: Tensor | None) -> None:
    """Round ``value`` into ``target``; where ``write`` (0-dim bool) is False, leave ``target`` as it is."""
    target.copy_(value if write is None else torch.where(write, value.to(target.dtype), target))


def _number(number: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as a 0-dim tensor like ``like``, where it gets without a copy the host waits for."""
    if isinstance(number, Tensor) and number.device == like.device:
        return number.reshape(()).to(like.dtype)
    return torch.full_like(like, float(number))


def _scalar_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no fp64


def _local(t: Any) -> Any:
    """Return this rank's shard of a DTensor, sharing its memory; other tensors as they are."""
    return t.to_local() if hasattr(t, "to_local") else t


def _full(t: Any) -> Any:
    """Return the reduced value of a DTensor; other tensors as they are."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


adam_plan = ReferenceAdamPlan
