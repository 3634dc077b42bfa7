"""What an optimizer refuses before it writes anything, and what it warns about."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends.memory import memory_layout
from ..errors import UnsupportedError

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What keeps the updates that rounding to 16 bits would lose; one of them at most.
KEEPERS = ("master_weights", "kahan_sum", "bf16_stochastic_round")
_FLAGS = ("amsgrad", "maximize", "differentiable", "decoupled_weight_decay", *KEEPERS)
_flags_of = itemgetter(*_FLAGS)
_REAL: Any = Real  # its stub has no order
_NUMBERS, _BOOLS = frozenset((float, int)), frozenset((bool,))
_SEEDS = 2**64
_LARGEST = sys.float_info.max  # an int may be larger than any float
_SAMPLES = 1 << 16
# Where a warning's reader has nothing to mend.
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def check_group(owner: str, group: Mapping[str, Any]) -> None:
    """Check the options and parameters of one group, defaults filled in.

    Args:
        owner: name of the optimizer, for the message.
        group: as in ``param_groups``; parameters may be ``(name, parameter)`` pairs.

    Raises:
        ValueError: an option or a parameter that no Adam can work with.
        UnsupportedError: a sound request that is not served.
    """
    check_options(owner, group)
    _check_parameters(owner, group["params"])


def are_plain(group: Mapping[str, Any]) -> bool:
    """Tell whether the options that a step reads are plain values in range, as they nearly always are.

    A learning rate may be a scalar on a device, which schedules and CUDA graphs have.

    Less than a microsecond, a sixth of ``check_options``, so that every step can ask: schedules write to groups.
    """
    betas, seed = group["betas"], group["seed"]
    if type(betas) not in (tuple, list) or len(betas) != 2:
        return False
    lr, (beta1, beta2), eps, decay = group["lr"], betas, group["eps"], group["weight_decay"]
    if type(lr) is Tensor and not lr.is_cpu and lr.ndim == 0 and lr.is_floating_point():
        lr = 0.0  # a value on a device is not read back
    return (
        _NUMBERS.issuperset(map(type, (lr, beta1, beta2, eps, decay)))
        and 0.0 <= lr <= _LARGEST
        and 0.0 <= beta1 < 1.0
        and 0.0 <= beta2 < 1.0
        and 0.0 <= eps <= _LARGEST
        and 0.0 <= decay <= _LARGEST
        and _BOOLS.issuperset(map(type, _flags_of(group)))
        and not group["differentiable"]
        and type(seed) is int
        and 0 <= seed < _SEEDS
    )


def check_options(owner: str, group: Mapping[str, Any]) -> None:
    """Check the options of one group; see ``check_group``."""
    check_numbers(owner, group)
    for name in _FLAGS:
        if not isinstance(group[name], bool):
            raise ValueError(f"{owner}: {name}: expected True or False, got {group[name]!r}")
    if group["differentiable"]:
        raise UnsupportedError(f"{owner}: differentiable=True: a fused step records no graph; torch.optim's does")
    keepers = [name for name in KEEPERS if group[name]]
    if len(keepers) > 1:
        raise ValueError(f"{owner}: {keepers[1]}: expected no second way to keep small updates beside {keepers[0]}")
    seed = group["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _SEEDS:
        raise ValueError(f"{owner}: seed: expected an int in [0, 2**64), got {seed!r}")
    if group["state_dtype"] not in (None, *STATE_DTYPES):
        expected = ", ".join(map(str, STATE_DTYPES))
        raise ValueError(f"{owner}: state_dtype: expected None or one of {expected}, got {group['state_dtype']!r}")


def check_numbers(owner: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError unless lr, betas, eps and weight_decay are numbers in range; tensors on a device aren't read."""
    _check_number(owner, "lr", group["lr"])
    betas = group["betas"]
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ValueError(f"{owner}: betas: expected a pair of numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        _check_number(owner, f"betas[{i}]", beta, most=math.nextafter(1.0, 0.0))
    for name in ("eps", "weight_decay"):
        if isinstance(group[name], Tensor):
            raise ValueError(f"{owner}: {name}: expected a number, got a tensor of {group[name].dtype}")
        _check_number(owner, name, group[name])


def check_no_group_option(owner: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError where a new group sets what only the optimizer as a whole has."""
    for name in ("max_grad_norm", "backend"):
        if name in group:
            raise ValueError(
                f"{owner}: {name}: expected as {owner}'s own argument, not in a group, got {group[name]!r}"
            )


def check_max_grad_norm(owner: str, value: Any) -> None:
    """Raise ValueError unless the bound of the gradients' norm is None or a number above 0."""
    if value is not None and not (isinstance(value, _REAL) and value > 0):
        raise ValueError(f"{owner}: max_grad_norm: expected None or a number > 0, got {value!r}")


def _check_number(owner: str, name: str, value: Any, most: float = _LARGEST) -> None:
    given = value
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(
                f"{owner}: {name}: expected one floating point element, got {tuple(value.shape)} of {value.dtype}"
            )
        value = value.item() if value.device.type == "cpu" else 0.0  # a value on a device is not read back
    if not isinstance(value, _REAL) or not 0.0 <= value <= most:  # NaN fails every comparison
        bound = "a finite number ≥ 0" if most == _LARGEST else "a number in [0, 1)"
        raise ValueError(f"{owner}: {name}: expected {bound}, got {given!r}")


def _check_parameters(owner: str, params: Iterable[Any]) -> None:
    seen = set()
    for number, p in enumerate(params):
        p = p[1] if isinstance(p, tuple) else p
        if not isinstance(p, Tensor):
            continue  # torch's own TypeError says it
        if id(p) in seen:
            raise ValueError(f"{owner}: params: parameter {number} of shape {tuple(p.shape)} is in the group twice")
        seen.add(id(p))
        frozen = isinstance(p, torch.nn.Parameter) and not p.requires_grad  # these may be quantised
        if p.dtype not in PARAMETER_DTYPES and not frozen:
            expected = ", ".join(map(str, PARAMETER_DTYPES))
            raise ValueError(f"{owner}: params: parameter {number}: expected a dtype of {expected}, got {p.dtype}")


def check_gradient(owner: str, number: int, p: Tensor) -> None:
    """Raise ValueError where parameter ``number`` has a gradient that no step can take."""
    grad = p.grad
    if grad is None:
        return
    where = f"{owner}: gradient of parameter {number}"
    if grad.layout is not torch.strided:
        raise ValueError(f"{where}: expected a dense tensor, got layout {grad.layout}; use torch.optim.SparseAdam")
    if grad.dtype not in PARAMETER_DTYPES:
        raise ValueError(f"{where}: expected a dtype of {', '.join(map(str, PARAMETER_DTYPES))}, got {grad.dtype}")
    if grad.shape != p.shape or grad.device != p.device:
        raise ValueError(
            f"{where}: expected shape {tuple(p.shape)} on {p.device}, got {tuple(grad.shape)} on {grad.device}"
        )


def check_overlaps(owner: str, params: Iterable[Tensor]) -> None:
    """Raise ValueError where two parameters, or two elements of one, share memory: an update would meet another.

    Parameters with gaps may interleave, as columns of one matrix do; only their starts are compared.
    """
    ranges = []
    for number, p in enumerate(params):
        if not is_plain(p) or p.is_meta or not p.numel() or not p.data_ptr():
            continue
        if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
            raise ValueError(
                f"{owner}: params: parameter {number}: expected memory for every element, got strides {p.stride()}"
            )
        elements = p.numel() if memory_layout(p) == p.stride() else 1
        ranges.append((str(p.device), p.data_ptr(), p.data_ptr() + elements * p.element_size(), number))
    ranges.sort()
    for (device, _, end, first), (other, begin, _, second) in pairwise(ranges):
        if device == other and begin < end:
            raise ValueError(
                f"{owner}: params: parameter {second}: expected memory of its own, got memory of parameter {first}"
            )


def lost_updates(params: Iterable[Tensor], lr: float) -> float:
    """Return the share of sampled 16-bit weights from which a step of ``lr`` rounds away.

    A weight loses its update when ``lr`` is below half the spacing of its dtype there. Reads values back to the host.
    """
    narrow = [p.detach() for p in params if p.dtype in (torch.bfloat16, torch.float16) and p.numel() and is_plain(p)]
    narrow = [p for p in narrow if not p.is_meta]
    if not narrow:
        return 0.0
    stride = max(1, sum(p.numel() for p in narrow) // _SAMPLES)
    lost = total = 0.0
    for p in narrow:
        sample = p.flatten()[::stride]
        exponent = torch.frexp(sample.float()).exponent
        spacing = torch.ldexp(torch.full_like(exponent, torch.finfo(p.dtype).eps, dtype=torch.float32), exponent - 1)
        known = sample != 0
        counts = torch.stack([(known & (spacing > 2 * lr)).sum(), known.sum()]).tolist()
        lost, total = lost + counts[0], total + counts[1]
    return lost / total if total else 0.0


def warn_lost_updates(owner: str, group: Mapping[str, Any]) -> bool:
    """Warn when most 16-bit weights of the group would not move at its learning rate; return whether it warned."""
    lr = float(group["lr"])
    if any(group[name] for name in KEEPERS) or not lr:
        return False
    share = lost_updates(group["params"], lr)
    if share <= 0.5:
        return False
    warn(
        f"{owner}: at lr={lr:g}, {share:.0%} of the 16-bit weights are spaced so wide that a step of about lr "
        "rounds away and they will not move. Pass master_weights=True (4 more bytes a parameter), kahan_sum=True (2 "
        "more) or, for bf16, bf16_stochastic_round=True (none; each step adds the noise of a rounding), or keep the "
        "parameters in fp32 under torch.autocast (2 more bytes a parameter for the weight, 2 for its gradient)."
    )
    return True


def warn(message: str) -> None:
    """Raise a UserWarning at the line that called into fusedops, however many of its and torch's frames lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def is_plain(t: Tensor) -> bool:
    """Tell whether ``t`` is an ordinary tensor or parameter, not a subclass with its own memory (DTensor, …)."""
    return type(t) in (Tensor, torch.nn.Parameter) or (isinstance(t, torch.nn.Parameter) and type(t.data) is Tensor)
