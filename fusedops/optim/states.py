"""State of the optimizers: how it is made, mended and loaded.

Keys and shapes are torch's (``step`` a 0-dim fp32 tensor, ``exp_avg``, …), with at most one more for a 16-bit
parameter: ``master``, its weights in fp32, or ``compensation``, in its own dtype what its rounding lost (weight =
parameter + compensation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checks import KEEPERS, STATE_DTYPES, check_group
from .saved import (
    ELEMENTWISE,
    check_count,
    check_elements,
    check_mapping,
    check_structure,
    check_values,
    loaded_options,
)

if TYPE_CHECKING:
    from .base import FusedOptimizer

# Options that say how a step runs, not what it computes: a loaded state dict does not set them.
RUN_KEYS = ("foreach", "fused", "capturable", "differentiable")
_NARROW = (torch.bfloat16, torch.float16)
# Group options that torch's optimizers don't know, with what they are where a file is older than they are.
OURS: dict[str, Any] = {
    "master_weights": False,
    "bf16_stochastic_round": False,
    "kahan_sum": False,
    "state_dtype": None,
    "seed": 0,
}


def complete(
    where: str, state: MutableMapping[str, Any], p: Tensor, group: Mapping[str, Any], moments: Sequence[str]
) -> None:
    """Add what is missing from a parameter's state and mend what a plan could not take; sound tensors stay themselves.

    Args:
        where: whose state it is, for the message.
        state: state of the parameter, perhaps empty.
        p: the parameter.
        group: its group.
        moments: keys of the per-element tensors, which start at zero in the group's ``state_dtype``.

    Raises:
        ValueError: a value that others put there and that can't be mended, as one of another shape.
    """
    for key in ELEMENTWISE:
        if state.get(key) is not None:
            check_elements(where, key, state[key], p)
    step = state.get("step", 0.0)
    if not _is_counter(step, p.device):
        check_count(where, step, wait=False)
        state["step"] = _counter(step, p.device)
    for key in moments:
        value = state.get(key)
        if value is None:
            state[key] = torch.zeros_like(p, dtype=state_dtype(p, group), memory_format=torch.preserve_format)
        elif not _lies_like(value, p):
            state[key] = _laid_out(value, p, value.dtype)
    kept = {"master": group["master_weights"], "compensation": group["kahan_sum"]}
    made = {
        key: _companion(key, state, p) for key, wanted in kept.items() if wanted and p.dtype in _NARROW
    }  # before one of them goes: each is made from the other
    for key in kept:
        state.pop(key, None)
    state.update(made)


def _companion(key: str, state: Mapping[str, Any], p: Tensor) -> Tensor:
    """Return the master or the compensation of a parameter: as it is, laid out anew, or made from what there is."""
    dtype = torch.float32 if key == "master" else p.dtype
    value: Tensor | None = state.get(key)
    if value is not None and value.dtype is dtype and _lies_like(value, p):
        return value
    if value is None:
        weight = p.detach().float()
        lost, master = state.get("compensation"), state.get("master")
        if lost is not None:
            weight = weight + lost.to(p.device, torch.float32)
        weight = weight if master is None else master.to(p.device)
        rest = weight - p.detach().float()
        value = weight if key == "master" else torch.where(rest.isfinite(), rest, 0.0)  # not inf - inf
    return _laid_out(value, p, dtype)


def state_dtype(p: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a parameter's moments: the group's ``state_dtype``, else the parameter's; fp64 stays fp64."""
    return p.dtype if group["state_dtype"] is None or p.dtype is torch.float64 else group["state_dtype"]


def load(optimizer: FusedOptimizer, saved: Mapping[str, Any]) -> None:
    """Replace groups and state of ``optimizer`` by copies of what ``saved`` holds.

    Raises:
        ValueError: groups, shapes or the kind of weight decay differ, or a value makes no sense; nothing has been
            changed then.
    """
    owner = type(optimizer).__name__
    check_mapping(f"{owner}.load_state_dict: state_dict", saved)
    saved = dict(saved)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        saved = hook(optimizer, saved) or saved
    check_structure(f"{owner}.load_state_dict", saved)
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved_groups]:
        raise ValueError(
            f"{owner}.load_state_dict: expected groups of {[len(g['params']) for g in groups]} parameters, "
            f"got {[len(g['params']) for g in saved_groups]}"
        )
    merged = [
        _merge(f"{owner}.load_state_dict: group {i}", *pair)
        for i, pair in enumerate(zip(groups, saved_groups, strict=True))
    ]
    for i, group in enumerate(merged):
        check_group(f"{owner}.load_state_dict: group {i}", group)
    owners = {
        key: (p, group)
        for group, saved_group in zip(merged, saved_groups, strict=True)
        for key, p in zip(saved_group["params"], group["params"], strict=True)
    }
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in saved["state"].items():
        if key not in owners:
            state[key] = deepcopy(values)
            continue
        p, group = owners[key]
        where = f"{owner}.load_state_dict: state of parameter {key}"
        state[p] = _copy(where, values, p, group, optimizer.moments(group))
    optimizer.__setstate__({"state": state, "param_groups": merged})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _merge(where: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved group over ours: what it lacks, and how to run and store, stays as it is here."""
    saved = {**saved, **loaded_options(saved)}
    decoupled = saved.get("decoupled_weight_decay", group["decoupled_weight_decay"])
    if isinstance(decoupled, bool) and decoupled is not group["decoupled_weight_decay"]:
        kinds = {True: "AdamW (decoupled weight decay)", False: "Adam (L2 weight decay)"}
        raise ValueError(f"{where}: expected state of {kinds[not decoupled]}, got state of {kinds[decoupled]}")
    merged = {**group, **deepcopy({key: value for key, value in saved.items() if key != "params"})}
    merged.update({key: group[key] for key in RUN_KEYS})
    if any(group[name] for name in KEEPERS):
        merged.update({name: group[name] for name in KEEPERS})
    merged["state_dtype"] = group["state_dtype"] or merged["state_dtype"]
    merged["lr"] = _placed(merged["lr"], group["lr"])
    betas = merged["betas"]
    if isinstance(betas, Sequence) and len(betas) == len(group["betas"]):
        merged["betas"] = tuple(map(_placed, betas, group["betas"]))
    return merged


def _placed(number: Any, ours: Any) -> Any:
    """Return a loaded number, on the device of the tensor it replaces where both are tensors."""
    return number.to(ours.device) if isinstance(number, Tensor) and isinstance(ours, Tensor) else number


def _copy(
    where: str, values: Mapping[str, Any], p: Tensor, group: Mapping[str, Any], moments: Sequence[str]
) -> dict[str, Any]:
    """Return a copy of one parameter's saved state on the parameter's device, laid out like it, in its saved dtypes."""
    check_values(where, values, moments, p)
    copied = {}
    for key, value in values.items():
        if key == "step":
            copied[key] = _counter(value, p.device)
        elif key not in ELEMENTWISE:
            copied[key] = deepcopy(value)
        else:
            companion = {"master": torch.float32, "compensation": p.dtype}.get(key)
            copied[key] = _laid_out(value, p, companion or _loaded_dtype(value, p, group))
    return copied


def _loaded_dtype(value: Tensor, p: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    keeps = group["state_dtype"] is None and p.dtype is not torch.float64 and value.dtype in STATE_DTYPES
    return value.dtype if keeps else state_dtype(p, group)


def _is_counter(step: Any, device: torch.device) -> bool:
    return isinstance(step, Tensor) and step.dtype is torch.float32 and step.ndim == 0 and step.device == device


def _counter(step: float | Tensor, device: torch.device) -> Tensor:
    """Return a new 0-dim fp32 counter."""
    if isinstance(step, Tensor):
        return step.detach().reshape(()).to(device, torch.float32, copy=True)
    return torch.full((), float(step), dtype=torch.float32, device=device)


def _lies_like(value: Tensor, p: Tensor) -> bool:
    if value.device != p.device or value.shape != p.shape:
        return False
    return value.stride() == p.stride() or value.stride() == torch.empty_like(p).stride()


def _laid_out(value: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``value`` on the device and in the memory order of ``p``."""
    return torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(value.detach())
