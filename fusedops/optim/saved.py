"""What a state dict of Adam has to be before anything is made of it: a file may hold whatever its writer liked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .._options import number, plain
from .checks import FLAGS

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
ELEMENTWISE = (*MOMENTS, "master", "compensation")
_MOST_STEPS = 2.0**53


def check_structure(where: str, saved: Any) -> None:
    """Check what a state dict is made of: groups that name parameters, and a dict of state for some of these.

    State may hold more, under keys that are no ints: torch passes such notes through, and so do we.

    Args:
        where: who is told, for the message.
        saved: the state dict, of whatever optimizer.

    Raises:
        ValueError: naming the key, what was expected there and what came.
    """
    check_mapping(f"{where}: state_dict", saved)
    if missing := [key for key in ("state", "param_groups") if key not in saved]:
        raise ValueError(f"{where}: expected a dict with {missing[0]!r}, got keys {list(saved)}")
    check_mapping(f"{where}: state", saved["state"])
    _expect(f"{where}: param_groups", "a list", (list, tuple), saved["param_groups"])
    named: set[int | str] = set()
    for i, group in enumerate(saved["param_groups"]):
        check_mapping(f"{where}: param_groups[{i}]", group)
        if "params" not in group:
            raise ValueError(f"{where}: param_groups[{i}]: expected a dict with 'params', got keys {list(group)}")
        _expect(f"{where}: param_groups[{i}]['params']", "a list of ids", (list, tuple), group["params"])
        for key in group["params"]:
            _expect(f"{where}: param_groups[{i}]['params']", "ids that are ints or strings", (int, str), key)
            if key in named:
                raise ValueError(f"{where}: param_groups[{i}]['params']: expected every id once, got {key!r} again")
            named.add(key)
    for key, values in saved["state"].items():
        if key in named:
            check_mapping(f"{where}: state[{key!r}]", values)
        elif isinstance(key, int):  # other keys are notes of the user's own
            raise ValueError(f"{where}: state: expected ids that param_groups name, got {key!r}")


def loaded_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of a saved group that torch steps with, but ours keep as bool, float or float tensor.

    In a file of torch's a flag may be any number or None, a number a bool, and eps and decay may be tensors, for which
    this waits. What makes no sense stays as it is, to be refused.
    """
    options = {name: _as_flag(group[name]) for name in FLAGS if name in group}
    options.update({name: _as_float(group[name]) for name in ("eps", "weight_decay") if name in group})
    if "lr" in group:
        options["lr"] = _as_rate(group["lr"])
    betas: Any = group.get("betas")
    if isinstance(betas, Sequence) or getattr(betas, "shape", None) == (2,):  # an array or a tensor
        options["betas"] = tuple(map(_as_rate, betas))
    if "seed" in group:
        options["seed"] = plain(group["seed"])
    return options


def _as_flag(value: Any) -> Any:
    value = plain(value.item() if _is_one_number(value) else value)
    return bool(value) if value is None or isinstance(value, Real) else value


def _as_float(value: Any) -> Any:
    value = plain(value.item() if _is_one_number(value) else value)
    return float(value) if isinstance(value, bool) else value


def _as_rate(value: Any) -> Any:
    if _is_one_number(value):
        return value if value.is_floating_point() else value.to(torch.float32)
    return _as_float(value)


def _is_one_number(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.numel() == 1
        and value.layout is torch.strided
        and not (value.is_complex() or value.is_meta)
    )


def named_ids(saved: Mapping[str, Any]) -> set[int | str]:
    """Return the ids of parameters that the groups of a state dict name."""
    return {key for group in saved["param_groups"] for key in group["params"]}


def check_mapping(where: str, found: Any) -> None:
    """Raise ValueError unless what was found is a dict or like one."""
    _expect(where, "a dict", Mapping, found)


def _expect(where: str, words: str, kind: type | tuple[type, ...], found: Any) -> None:
    if not isinstance(found, kind):
        raise ValueError(f"{where}: expected {words}, got {type(found).__name__}")


def check_values(where: str, values: Mapping[str, Any], moments: Sequence[str], p: Tensor | None = None) -> None:
    """Check one parameter's saved state: nothing at all, or a count of steps and dense floating-point tensors.

    Args:
        where: whose state it is, for the message.
        values: the state by its keys.
        moments: keys of the per-element tensors that have to be there.
        p: the parameter, if it is there; per-element tensors have its shape.

    Raises:
        ValueError: naming the key, what was expected there and what came.
    """
    if values and (missing := [key for key in ("step", *moments) if key not in values]):
        raise ValueError(f"{where}: expected {', '.join(('step', *moments))}, but {', '.join(missing)} is missing")
    for key in filter(values.__contains__, ELEMENTWISE):
        check_elements(where, key, values[key], p)
    if "step" in values:
        check_count(where, values["step"])


def check_elements(where: str, key: str, value: Any, p: Tensor | None) -> None:
    """Raise ValueError unless one value of a state is dense floating point, of the shape of ``p`` if that is there."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{where}: {key}: expected a tensor, got {type(value).__name__}")
    if not value.is_floating_point() or value.layout is not torch.strided:
        raise ValueError(f"{where}: {key}: expected dense floating point, got {value.dtype}, {value.layout}")
    if p is not None and (value.shape != p.shape or (value.is_meta and not p.is_meta)):
        raise ValueError(f"{where}: {key}: expected shape {tuple(p.shape)}, got {tuple(value.shape)} on {value.device}")


def check_count(where: str, step: Any, wait: bool = True) -> None:
    """Raise ValueError unless ``step`` is a number of steps, read from another device only with ``wait``."""
    if isinstance(step, Tensor):
        if step.numel() != 1 or step.is_complex() or step.is_meta or step.layout is not torch.strided:
            raise ValueError(f"{where}: step: expected one number, got {step.dtype} of shape {tuple(step.shape)}")
        if not wait and not step.is_cpu:
            return
        step = step.item()
    number(where, "step", step, "a number of steps", 0.0, _MOST_STEPS)
