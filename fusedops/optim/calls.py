"""An optimizer step as dispatch sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch import Call
from . import checks
from .overlaps import check_overlaps

_NARROW = (torch.bfloat16, torch.float16)


def keeper(p: Tensor, group: Mapping[str, Any]) -> str:
    """Return which of ``checks.KEEPERS`` a parameter has, by its group's options; ``""``: none, or no use for one."""
    narrow = {"bf16_stochastic_round": _NARROW[:1]}
    return next((name for name in checks.KEEPERS if group.get(name) and p.dtype in narrow.get(name, _NARROW)), "")


def adam_call(op: str, stored: Iterable[tuple[Tensor, torch.dtype, str]], amsgrad: bool) -> Call:
    """Return the call of an Adam step for the tensors of one device.

    Args:
        op: ``"adam"`` or ``"adamw"``.
        stored: each parameter with the dtype of its moments and its ``keeper``.
        amsgrad: whether any group keeps running maxima.

    Returns:
        A call whose option ``mixes`` lists the distinct (parameter dtype, moment dtype, keeper), ``keep`` the distinct
        keepers, and ``largest`` is the number of elements of the largest parameter.
    """
    stored = list(stored)
    mixes = sorted({(p.dtype, dtype, kept) for p, dtype, kept in stored}, key=str)
    dtypes = [("param", mix[0]) for mix in mixes] + [("state", mix[1]) for mix in mixes]
    return _call(op, [p for p, *_ in stored], dtypes, amsgrad, tuple(mixes))


def gradient_call(grads: Sequence[Tensor]) -> Call:
    """Return the call of a norm or a scaling of gradients of one device: a step without mixes."""
    return _call("adamw", grads, [("grad", g.dtype) for g in grads], False, ())


def _call(
    op: str, tensors: Sequence[Tensor], dtypes: Sequence[tuple[str, torch.dtype]], amsgrad: bool, mixes: tuple[Any, ...]
) -> Call:
    device = tensors[0].device if tensors else torch.device("cpu")
    largest = max((t.numel() for t in tensors), default=0)
    keep = "+".join(sorted({kept for *_, kept in mixes}))
    options = (("amsgrad", amsgrad), ("keep", keep), ("largest", largest), ("mixes", mixes))
    index = -1 if device.index is None else device.index
    return Call(op, device.type, index, tuple(dict.fromkeys(dtypes)), options=options)


def describe_optimizer(op: str, owner: str, arguments: Mapping[str, Any]) -> Call:
    """Return the call of an optimizer's step, or refuse what its constructor would.

    Args:
        op: ``"adam"`` or ``"adamw"``.
        owner: name of the optimizer, for the message.
        arguments: those of its constructor, all of them.
    """
    if isinstance(arguments["params"], Tensor):
        raise TypeError(f"{op}: params: expected tensors or dicts in a list or the like, got a tensor")
    params = list(arguments["params"])
    groups = [_listed(item) for item in params] if params and isinstance(params[0], dict) else [{"params": params}]
    checks.check_max_grad_norm(owner, arguments["max_grad_norm"])
    options = {**arguments, "decoupled_weight_decay": True}  # its class says which, and either is sound
    for group in groups:
        checks.check_no_group_option(owner, group)
        checks.check_group(owner, {**options, **group})
    check_overlaps(owner, (p[1] if isinstance(p, tuple) else p for group in groups for p in group["params"]))
    return describe(op, **{**arguments, "params": groups})


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}  # a generator ends


def describe(
    op: str,
    params: Iterable[Any],
    *,
    amsgrad: bool = False,
    state_dtype: torch.dtype | None = None,
    **options: Any,
) -> Call:
    """Return the call that an optimizer made with these arguments would put to dispatch.

    Args:
        op: ``"adam"`` or ``"adamw"``.
        params: parameters, ``(name, parameter)`` pairs or group dicts, of one device.
        amsgrad: as the optimizer's.
        state_dtype: as the optimizer's.
        **options: the optimizer's others, of which the choice depends on ``checks.KEEPERS`` alone.

    Raises:
        TypeError: something else than a tensor, where torch's constructor says so too.
    """
    stored = []
    for item in params:
        group: dict[str, Any] = item if isinstance(item, dict) else {"params": [item]}
        dtype = group.get("state_dtype", state_dtype)
        amsgrad = amsgrad or bool(group.get("amsgrad"))
        for p in [group["params"]] if isinstance(group["params"], Tensor) else group["params"]:
            p = p[1] if isinstance(p, tuple) else p
            if not isinstance(p, Tensor):
                raise TypeError(f"{op}: params: expected tensors, got {type(p).__name__}")
            kept = keeper(p, {**options, **group})
            stored.append((p, p.dtype if dtype is None or p.dtype is torch.float64 else dtype, kept))
    return adam_call(op, stored, bool(amsgrad))
