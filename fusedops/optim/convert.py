"""State dicts of ours and of torch.optim, made into each other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .states import OURS

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_COMPANIONS = {"master": "fp32 master", "compensation": "compensation"}


def convert_state_dict(state_dict: Mapping[str, Any], to: str) -> dict[str, Any]:
    """Return an Adam's state dict as torch.optim's Adam and AdamW, or ours, have it.

    Args:
        state_dict: of one of our optimizers or of torch's of the same name; left as it is. Tensors are shared with it.
        to: ``"torch"`` drops ``master`` and ``compensation``, what they held beyond their 16-bit parameters being lost,
            and our own group options; moments keep their dtype here, but torch's ``load_state_dict`` casts those of a
            16-bit parameter to its dtype. ``"fusedops"`` makes counters 0-dim fp32 tensors and leaves our group options
            to the optimizer that loads the result: that one rebuilds masters or compensations from its parameters
            where it was made with ``master_weights`` or ``kahan_sum``, and widens moments where with ``state_dtype``.

    Returns:
        A new state dict.

    Raises:
        ValueError: ``to`` is another word, or ``state_dict`` is not an Adam's.

    Whatever is dropped, or will be rounded by torch, is told in one UserWarning. What ``"torch"`` dropped does not
    come back: the masters that ``"fusedops"`` leads to are the rounded parameters.
    """
    if to not in ("torch", "fusedops"):
        raise ValueError(f'convert_state_dict: to: expected "torch" or "fusedops", got {to!r}')
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("convert_state_dict: state_dict: expected a dict with 'state' and 'param_groups'")
    for key, values in state_dict["state"].items():
        if values and (missing := [name for name in ("step", *_MOMENTS[:2]) if name not in values]):
            raise ValueError(
                f"convert_state_dict: state_dict: expected state of an Adam, got parameter {key} without {missing[0]}"
            )
    state = {key: dict(values) for key, values in state_dict["state"].items()}
    groups = [
        {**{k: deepcopy(v) for k, v in group.items() if k not in OURS and k != "params"}, "params": [*group["params"]]}
        for group in state_dict["param_groups"]
    ]
    if to == "torch":
        _tell(state)
        for values in state.values():
            for name in _COMPANIONS:
                values.pop(name, None)
    else:
        for group, given in zip(groups, state_dict["param_groups"], strict=True):
            group.update({name: given[name] for name in OURS if name in given})
        for values in state.values():
            if values:
                values["step"] = torch.as_tensor(values["step"], dtype=torch.float32).reshape(())
    return {**state_dict, "state": state, "param_groups": groups}


def _tell(state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Warn of what torch will not keep."""
    lost = [
        f"dropped the {words} of {count} parameters"
        for name, words in _COMPANIONS.items()
        if (count := sum(name in values for values in state.values()))
    ]
    wide = sum(
        any(name in values for name in _COMPANIONS)
        and any(isinstance(m := values.get(key), Tensor) and m.dtype is torch.float32 for key in _MOMENTS)
        for values in state.values()
    )
    if wide:
        lost.append(f"torch will round the fp32 moments of {wide} 16-bit parameters when it loads them")
    if lost:
        warnings.warn(f"convert_state_dict: {'; '.join(lost)}", UserWarning, stacklevel=3)
