"""Adam over Apex's ``amp_C``: its capturable kernels, which read step, learning rate and scale on the device.

They scale gradients in place. Where a gradient has to be scaled at all (loss scale, clipping, ``maximize``) they get a
copy; else they write each gradient's own value back. One call serves one dtype mix, one group and one step count.

Numerics: fp32 as Apex computes it: 1 - beta and the bias corrections are fp32 under fast-math, so the moments are off
by up to 1e-5 of their size (beta2 = 0.999) where the other backends are off by rounding.

Source: https://github.com/NVIDIA/apex (BSD-3-Clause).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .apex import _MAX_ELEMENTS, _need
from .memory import laid_out, lies_like, memory_layout
from .reference_adam import clip_coefficient

_CHUNK = 2048 * 32  # what Apex's own optimizers pass
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class _Member(NamedTuple):
    """One parameter's tensors as flat views in memory order, which is how Apex walks them."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None


class ApexAdamPlan:
    """Adam for the tensors of one CUDA device; arguments as ``reference_adam.ReferenceAdamPlan``.

    Making a plan reads the step counters once: Apex takes one count a call, so parameters that are not at the same
    step are updated apart. ``step`` waits for nothing.

    Raises:
        UnsupportedError: moments that are not fp32, amsgrad, tensors with gaps or of 2³¹ elements or more.
    """

    def __init__(
        self,
        params: list[Tensor],
        exp_avg: list[Tensor],
        exp_avg_sq: list[Tensor],
        max_exp_avg_sq: list[Tensor | None],
        master: list[Tensor | None],
        step: list[Tensor],
        group: list[int],
    ) -> None:
        if any(maximum is not None for maximum in max_exp_avg_sq):
            raise UnsupportedError("adam_plan: apex has no amsgrad")
        self._params = params
        self._given = list(zip(params, exp_avg, exp_avg_sq, master, strict=True))
        self._bind()
        self._steps = step
        self._group = group
        self._count = torch.stack([s.reshape(()) for s in step]).tolist() if step else []

    def _bind(self) -> None:
        """View the tensors as Apex walks them, and note where they lie."""
        self._addresses = self._find()
        self._strides = [memory_layout(p) for p in self._params]
        self._members = [
            _Member(*(_flat(number, tensor, strides) for tensor in tensors))  # type: ignore[arg-type]
            for number, (strides, tensors) in enumerate(zip(self._strides, self._given, strict=True))
        ]
        for number, member in enumerate(self._members):
            _check_dtypes(number, member)

    def _find(self) -> list[int]:
        return [tensor.data_ptr() for tensors in self._given for tensor in tensors if tensor is not None]

    @torch.no_grad()
    def step(
        self,
        grads: list[Tensor | None],
        lr: Sequence[float | Tensor],
        beta1: Sequence[float],
        beta2: Sequence[float],
        eps: Sequence[float],
        weight_decay: Sequence[float],
        decoupled: Sequence[bool],
        amsgrad: Sequence[bool],
        maximize: Sequence[bool],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_grad_norm: float | None,
    ) -> None:
        """Update every parameter that has a gradient; arguments as ``ReferenceAdamPlan.step``.

        Raises:
            UnsupportedError: a gradient whose dtype is not its parameter's, which Apex would misread.
        """
        active = [i for i, grad in enumerate(grads) if grad is not None]
        if not active:
            return
        if self._addresses != self._find():  # p.data = … gave a tensor other memory
            self._bind()
        for i in active:
            _check_gradient(i, self._params[i], grads[i])
        device = self._params[0].device
        factor = torch.ones(1, dtype=torch.float32, device=device)
        if grad_scale is not None:
            factor = factor / grad_scale
        if grad_norm is not None and max_grad_norm is not None:
            factor = factor * clip_coefficient(grad_norm, max_grad_norm)
        scaled = grad_scale is not None or (grad_norm is not None and max_grad_norm is not None)
        noop = torch.zeros(1, dtype=torch.int32, device=device)
        if found_inf is not None:
            noop = (found_inf.reshape(1) != 0).to(torch.int32)

        calls: dict[tuple[int, torch.dtype, bool, float], list[int]] = {}
        for i in active:
            if self._params[i].numel():
                member = self._members[i]
                key = (self._group[i], member.param.dtype, member.master is not None, self._count[i])
                calls.setdefault(key, []).append(i)
        for (g, *_), chosen in calls.items():
            own = scaled or maximize[g]
            lists = [
                [_gradient(grads[i], self._strides[i], own) for i in chosen],
                *([self._members[i][kind] for i in chosen] for kind in range(3)),
            ]
            update = _need("amp_C").multi_tensor_adam_capturable
            if self._members[chosen[0]].master is not None:
                update = _need("amp_C").multi_tensor_adam_capturable_master
                lists.append([self._members[i].master for i in chosen])
            update(
                _CHUNK, noop, lists, _rate(lr[g], device), beta1[g], beta2[g], eps[g],
                (self._steps[chosen[0]].reshape(1) + 1).to(torch.int32), int(decoupled[g]), 1, weight_decay[g],
                -factor if maximize[g] else factor,
            )  # fmt: skip
        torch._foreach_add_([self._steps[i] for i in active], 1.0 - noop.to(torch.float32).reshape(()))
        for i in active:
            self._count[i] += 1  # a skipped step skips for all, so counts stay equal where they were


adam_plan = ApexAdamPlan


@torch.no_grad()
def grad_norm(grads: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """Return the 2-norm of all gradients (1-element fp32); arguments as ``reference_adam.grad_norm``.

    Apex's norm alone can't tell an inf from squares that overflow, so ``found_inf`` costs a second read.
    """
    if not grads:
        raise ValueError("grad_norm: grads: expected at least one tensor, got none")
    device = grads[0].device
    noop = torch.zeros(1, dtype=torch.int32, device=device)
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for number, grad in enumerate(grads):
        if grad.dtype not in _FLOATS or grad.numel() > _MAX_ELEMENTS:
            raise UnsupportedError(f"grad_norm: apex: gradient {number}: {grad.numel()} elements of {grad.dtype}")
        if grad.numel():
            by_dtype.setdefault(grad.dtype, []).append(_gradient(grad, memory_layout(grad), own=False))
    for same in by_dtype.values():
        norm, _ = _need("amp_C").multi_tensor_l2norm(_CHUNK, noop, [same], False)
        squares += norm.to(torch.float64).square()
        if found_inf is not None:
            largest = torch.stack(torch._foreach_norm(same, float("inf")))
            found_inf.masked_fill_(~largest.isfinite().all(), 1.0)
    norm = squares.sqrt()
    return (norm if grad_scale is None else norm / grad_scale.reshape(1)).to(torch.float32)


@torch.no_grad()
def grad_scale_(grads: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply every gradient of one device by ``coef`` in place; Apex's own scaling wants a host number."""
    if grads:
        torch._foreach_mul_(list(grads), coef.reshape(()))


def _flat(number: int, tensor: Tensor | None, strides: tuple[int, ...]) -> Tensor | None:
    if tensor is None:
        return None
    if not lies_like(tensor, strides):
        raise UnsupportedError(f"adam_plan: apex: tensor of parameter {number}: it walks memory without gaps")
    if tensor.numel() > _MAX_ELEMENTS:
        raise UnsupportedError(f"adam_plan: apex: parameter {number}: {tensor.numel()} elements, offsets are 32-bit")
    return tensor.as_strided((tensor.numel(),), (1,))


def _check_dtypes(number: int, member: _Member) -> None:
    fp32 = [t.dtype is torch.float32 for t in (member.exp_avg, member.exp_avg_sq, member.master) if t is not None]
    if member.param.dtype not in _FLOATS or not all(fp32):
        raise UnsupportedError(
            f"adam_plan: apex: parameter {number}: expected fp32, fp16 or bf16 with fp32 moments and master, got "
            f"{[t.dtype for t in member if t is not None]}"
        )


def _check_gradient(number: int, param: Tensor, grad: Tensor | None) -> None:
    if grad is not None and (grad.dtype is not param.dtype or grad.shape != param.shape):
        raise UnsupportedError(
            f"step: apex: gradient of parameter {number}: expected {param.dtype} of shape {tuple(param.shape)}, got "
            f"{grad.dtype} of shape {tuple(grad.shape)}"
        )


def _gradient(grad: Tensor | None, strides: tuple[int, ...], own: bool) -> Tensor:
    """Return a gradient as a flat tensor in its parameter's order, a copy where Apex will change it."""
    assert grad is not None
    laid = laid_out(grad, strides)
    if own and laid is grad:
        laid = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
    return laid.as_strided((laid.numel(),), (1,))


def _rate(lr: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(lr, Tensor) and lr.device == device:
        return lr.to(torch.float32).reshape(1)
    return torch.full((1,), float(lr), dtype=torch.float32, device=device)
