"""Clipping of the gradients' norm: one pass that reads them, one that scales them where they are too large."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, dispatch
from .._options import number
from ..backends.reference_adam import clip_coefficient
from ..config import CONFIG
from ..dispatch import select
from .base import combine_norms, on_device
from .calls import gradient_call
from .checks import PARAMETER_DTYPES, check_gradient, is_plain, warn

_SERVED = frozenset(PARAMETER_DTYPES)


@torch.compiler.disable  # a break in a compiled graph, as a step is
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``: g ← g · min(1, max_norm / (norm + 1e-6)).

    Args:
        parameters: a tensor or tensors whose ``grad`` is clipped: dense, fp16 | bf16 | fp32 | fp64, on any devices.
        max_norm: the most the norm of all gradients together may be, a number from 0 to inf. A 1-element tensor on a
            device stays there, so a CUDA graph's replays follow it, and its value is not checked: below 0 it turns
            gradients around, NaN makes them NaN.
        norm_type: 2 in fused passes; any other as torch computes it, which reads a ``max_norm`` on a device back.
        error_if_nonfinite: raise where the norm is inf or NaN. Waits for the device; nothing else in a fused pass does.
        foreach: accepted for torch's sake; used where torch computes.

    Returns:
        0-dim norm before clipping, on the first gradient's device: fp32 (fp64 when a gradient is).

    Raises:
        ValueError: ``max_norm`` is no such number, or a gradient is sparse, of another dtype or lies over itself, as an
            expanded tensor does; nothing has been scaled then.
        RuntimeError: ``error_if_nonfinite`` and the norm is inf or NaN; nothing has been scaled then.

    *Numerics*: fp32 partial sums, finished in fp64, deterministic. torch rounds norms of 16-bit gradients to 16 bits.
    """
    limit = _limit(max_norm)
    if isinstance(parameters, Tensor):
        params = [parameters]
    else:
        params = list(parameters)
        if not params and isinstance(parameters, types.GeneratorType):
            warn("`parameters` is an empty generator, no gradient clipping will occur.")
    by_torch = norm_type != 2 or CONFIG.disabled
    by_device = None if by_torch else backends.get("native").gradients_of(params)
    if by_device is None:
        by_device = _gradients_of(params, by_torch)
    if by_device is None:
        return torch.nn.utils.clip_grad_norm_(params, float(limit), norm_type, error_if_nonfinite, foreach)
    if not by_device:
        return torch.tensor(0.0)
    served = [(gs, gs[0].device, _backend(gs)) for gs in by_device]
    if not all(backends.checks_arguments(backend) for _, _, backend in served):
        _check_gradients(params)
    try:
        norm = combine_norms([backend.grad_norm(gs, None, None) for gs, _, backend in served])
    except ValueError as error:
        _check_gradients(params)  # the same words, whoever refused
        raise ValueError(f"clip_grad_norm_: {error}") from error
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    if isinstance(limit, Tensor):
        limit = on_device(limit, norm.device).to(norm.dtype)
    coef = clip_coefficient(norm, limit)
    for gs, device, backend in served:
        backend.grad_scale_(gs, on_device(coef, device))
    return norm


def _limit(max_norm: float | Tensor) -> float | Tensor:
    """Return a bound as a checked number, or the one real element on a device that it is; that is not read back."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
        if max_norm.is_cpu:
            max_norm = max_norm.item()
        elif max_norm.dtype is not torch.bool and not max_norm.is_complex():
            return max_norm
    return number("clip_grad_norm_", "max_norm", max_norm, "a number ≥ 0", 0.0, math.inf)


def _check_gradients(params: Iterable[Tensor]) -> None:
    for i, p in enumerate(params):
        if p.grad is not None and is_plain(p.grad):
            check_gradient("clip_grad_norm_", i, p.grad)


def _gradients_of(params: list[Any], by_torch: bool) -> list[Sequence[Tensor]] | None:
    """Return the gradients there are, a list a device, refusing what can't be clipped; None where torch is to do it."""
    grads = [p.grad for p in params if p.grad is not None]
    odd = any(type(g) is not Tensor or g.layout is not torch.strided or g.dtype not in _SERVED for g in grads)
    if grads and (odd or by_torch):
        _check_gradients(params)
    if grads and (by_torch or (odd and not all(map(is_plain, grads)))):
        return None
    by_device: dict[torch.device, list[Tensor]] = {}
    for g in grads:
        if not g.is_contiguous() and torch._debug_has_internal_overlap(g) == 1:  # 1: yes, by a stride of 0
            raise ValueError(
                f"clip_grad_norm_: parameters: expected gradients whose elements have memory of their own, got one of "
                f"shape {tuple(g.shape)} and strides {g.stride()}; clone() it"
            )
        by_device.setdefault(g.device, []).append(g)
    return [*by_device.values()]


def _backend(grads: Sequence[Tensor]) -> types.ModuleType:
    """Return the backend that the table has for the norm and the scaling, which belong to those of optimizers.

    They are calls of ``adamw`` whose only argument is ``grad``: rows that name dtypes or options of a step, as tuned
    ones do, are not about them.
    """
    if isinstance(grads, list):
        return backends.get(select(gradient_call(grads)).backend)
    key = ("clip_grad_norm_", grads[0].device, grads.largest, grads.dtypes)  # type: ignore[attr-defined]
    choice = dispatch.cache.get(key)
    if choice is None:
        choice = dispatch.cache[key] = select(gradient_call(grads))
    return backends.get(choice.backend)
