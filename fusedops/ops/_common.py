"""What every op's Python layer shares: sizes, dtype checks, the choice of a backend, second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import dispatch, registry
from ..config import CONFIG
from ..dispatch import Call

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
# Tensor types our kernels may see; any other subclass (DTensor, quantised weights) takes plain PyTorch.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_forward_ad = torch.autograd.forward_ad
_are_transforms_active = torch._C._are_functorch_transforms_active


def sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a normalized_shape as a tuple."""
    return (shape,) if isinstance(shape, int) else tuple(shape)


def check_out_dtype(op: str, out_dtype: torch.dtype, input: Tensor) -> None:
    """Raise ValueError if a result of ``out_dtype`` can't be made from ``input``."""
    if out_dtype not in FLOATS or (out_dtype is torch.float64) != (input.dtype is torch.float64):
        raise ValueError(
            f"{op}: out_dtype: expected fp32, fp16 or bf16 (fp64 only if all are), got {out_dtype} "
            f"with {input.dtype} input"
        )


def choose(
    op: str, describe: Callable[..., Call], input: Tensor, hidden: int, others: tuple[Tensor | None, ...],
    out_dtype: torch.dtype, backend: str | None,
) -> Callable[..., Any]:  # fmt: skip
    """Return what runs this call: one dict hit when its like was seen before.

    Pointers and strides are not part of the key: alignment is the launcher's business. Rows count by powers of two.
    What no kernel knows of (tensor subclasses, functorch transforms, forward-mode AD) takes plain PyTorch.
    """
    dtypes = (input.dtype, *[None if t is None else t.dtype for t in others], out_dtype)
    if torch.compiler.is_compiling():
        return _traced[_choose_compiling(op, describe, input.device.type, dtypes, dispatch.forced_backend(op, backend))]
    if CONFIG.disabled or _are_transforms_active() or _forward_ad._current_level >= 0 or not _plain(input, others):
        return _reference(op)
    grad = torch.is_grad_enabled() and (input.requires_grad or any([t is not None and t.requires_grad for t in others]))
    key = (
        op,
        backend,
        input.get_device(),
        input.device.type,
        hidden,
        (input.numel() // hidden).bit_length() if hidden else 0,
        grad,
        dtypes,
    )
    choice = dispatch.cache.get(key)
    if choice is None:
        choice = dispatch.select(describe(input, (hidden,), *others, out_dtype=out_dtype), backend)
        dispatch.cache[key] = choice
    return choice.run


def _plain(input: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    return type(input) in _PLAIN and all([t is None or type(t) in _PLAIN for t in others])


def _reference(op: str) -> Callable[..., Any]:
    return registry.OPS[op].reference


# What traced code calls, by the key that _choose_compiling returns (Dynamo can burn in a string, not a function).
_traced: dict[str, Callable[..., Any]] = {}


@torch.compiler.assume_constant_result
def _choose_compiling(
    op: str, describe: Callable[..., Call], device_type: str, dtypes: tuple[torch.dtype | None, ...], forced: str | None
) -> str:
    """Choose while Dynamo traces; it guards on the arguments. Sizes are left out, so that none is specialised."""
    if CONFIG.disabled:
        _traced[op] = _reference(op)
        return op
    input, *others = [None if d is None else torch.empty(0, 1, dtype=d, device="meta") for d in dtypes[:-1]]
    call = describe(input, (1,), *others, out_dtype=dtypes[-1])
    index = torch.cuda.current_device() if device_type == "cuda" else -1
    choice = dispatch.select(
        replace(call, device=device_type, index=index, hidden=None, rows=None, compiling=True), forced
    )
    key = f"{op} on {choice.backend}"
    _traced[key] = choice.run
    return key


def differentiate(
    function: Callable[[], Tensor], inputs: Sequence[Tensor | None], need: Sequence[bool], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``function()``, differentiable again: what backward does under create_graph."""
    with torch.enable_grad():
        output = function()
    wanted = [t for t, needed in zip(inputs, need, strict=True) if needed and t is not None]
    found = iter(torch.autograd.grad(output, wanted, grad_output, create_graph=True))
    return tuple(next(found) if needed and t is not None else None for t, needed in zip(inputs, need, strict=True))
