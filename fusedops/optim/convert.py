"""State dicts of ours and of torch.optim, made into each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from .checks import check_numbers, warn
from .saved import MOMENTS, check_structure, check_values, loaded_options, named_ids
from .states import OURS

_NUMBERS = ("lr", "betas", "eps", "weight_decay")
_COMPANIONS = {"master": "fp32 master", "compensation": "compensation"}


def convert_state_dict(state_dict: Mapping[str, Any], to: str) -> dict[str, Any]:
    """Return an Adam's state dict as torch.optim's Adam and AdamW, or ours, have it.

    Args:
        state_dict: of one of our optimizers or of torch's of the same name; left as it is. Tensors are shared with it.
        to: ``"torch"`` drops ``master`` and ``compensation``, what they held beyond their 16-bit parameters being lost,
            and our own group options; counters go to the CPU, whence torch takes them to where it wants them; moments
            keep their dtype here, but torch's ``load_state_dict`` casts those of a 16-bit parameter to its dtype.
            ``"fusedops"`` leaves our group options to the optimizer that loads the result: that one rebuilds masters or
            compensations from its parameters where it was made with ``master_weights`` or ``kahan_sum``, and widens
            moments where with ``state_dtype``. Counters are 0-dim fp32 tensors in both.

    Returns:
        A new state dict.

    Raises:
        ValueError: ``to`` is another word, or ``state_dict`` is not an Adam's; names the key, what was expected there
            and what came.

    Whatever is dropped, or will be rounded by torch, is told in one UserWarning. A state dict does not hold the dtypes
    of its parameters: those with a master or a compensation have 16 bits, those of a group with ``state_dtype`` or
    ``bf16_stochastic_round`` may have. What ``"torch"`` dropped does not come back: the masters that ``"fusedops"``
    leads to are the rounded parameters.
    """
    if to not in ("torch", "fusedops"):
        raise ValueError(f'convert_state_dict: to: expected "torch" or "fusedops", got {to!r}')
    check_structure("convert_state_dict", state_dict)
    for i, group in enumerate(state_dict["param_groups"]):
        _check_group(f"convert_state_dict: param_groups[{i}]", group)
    named = named_ids(state_dict)
    state = {key: dict(values) for key, values in state_dict["state"].items() if key in named}
    for key, values in state.items():
        check_values(f"convert_state_dict: state[{key!r}]", values, MOMENTS[:2])
    groups = [
        {**{k: deepcopy(v) for k, v in group.items() if k not in OURS and k != "params"}, "params": [*group["params"]]}
        for group in state_dict["param_groups"]
    ]
    for values in filter(None, state.values()):
        values["step"] = torch.as_tensor(values["step"], dtype=torch.float32).reshape(())
        if to == "torch":
            values["step"] = values["step"].cpu()  # on a GPU torch would read it back in every step, for each parameter
    if to == "torch":
        _tell(state, state_dict["param_groups"])
        for values in state.values():
            for name in _COMPANIONS:
                values.pop(name, None)
    else:
        for group, given in zip(groups, state_dict["param_groups"], strict=True):
            group.update({name: given[name] for name in OURS if name in given})
    return {**state_dict, "state": {**state_dict["state"], **state}, "param_groups": groups}


def _check_group(where: str, group: Mapping[str, Any]) -> None:
    if missing := [name for name in _NUMBERS if name not in group]:
        raise ValueError(f"{where}: expected the options of an Adam, but {', '.join(missing)} is missing")
    check_numbers(where, {**group, **loaded_options(group)})


def _tell(state: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn of what torch will not keep."""
    lost = [
        f"dropped the {words} of {count} parameters"
        for name, words in _COMPANIONS.items()
        if (count := sum(name in values for values in state.values()))
    ]
    wide = {key for key, values in state.items() if any(_is_fp32(values.get(name)) for name in MOMENTS)}
    narrow = {key for key in wide if any(name in state[key] for name in _COMPANIONS)}
    maybe = {
        key
        for group in groups
        if group.get("state_dtype") is torch.float32 or group.get("bf16_stochastic_round")
        for key in group["params"]
    }
    if narrow:
        lost.append(f"torch will round the fp32 moments of {len(narrow)} 16-bit parameters when it loads them")
    if unknown := wide & maybe - narrow:
        lost.append(f"torch will round the fp32 moments of {len(unknown)} parameters, where these have 16 bits")
    if lost:
        warn(f"convert_state_dict: {'; '.join(lost)}")


def _is_fp32(value: Any) -> bool:
    return getattr(value, "dtype", None) is torch.float32
