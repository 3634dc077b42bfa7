"""What an optimizer refuses before it writes anything, and what it warns about."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._options import LARGEST, flag, number, plain
from ..errors import UnsupportedError
from ..ops._common import check_dense

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What keeps the updates that rounding to 16 bits would lose; one of them at most.
KEEPERS = ("master_weights", "kahan_sum", "bf16_stochastic_round")
FLAGS = ("amsgrad", "maximize", "differentiable", "decoupled_weight_decay", *KEEPERS)
_flags_of = itemgetter(*FLAGS)
_NUMBERS, _BOOLS = frozenset((float, int)), frozenset((bool,))
_SEEDS = 2**64
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
        and 0.0 <= lr <= LARGEST
        and 0.0 <= beta1 < 1.0
        and 0.0 <= beta2 < 1.0
        and 0.0 <= eps <= LARGEST
        and 0.0 <= decay <= LARGEST
        and _BOOLS.issuperset(map(type, _flags_of(group)))
        and not group["differentiable"]
        and type(seed) is int
        and 0 <= seed < _SEEDS
    )


def check_options(owner: str, group: Mapping[str, Any]) -> None:
    """Check the options of one group; see ``check_group``."""
    check_numbers(owner, group)
    for name in FLAGS:
        flag(owner, name, group[name])
    if group["differentiable"]:
        raise UnsupportedError(f"{owner}: differentiable=True: a fused step records no graph; torch.optim's does")
    keepers = [name for name in KEEPERS if group[name]]
    if len(keepers) > 1:
        raise ValueError(f"{owner}: {keepers[1]}: expected no second way to keep small updates beside {keepers[0]}")
    seed = plain(group["seed"])
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _SEEDS:
        raise ValueError(f"{owner}: seed: expected an int in [0, 2**64), got {group['seed']!r}")
    if group["state_dtype"] not in (None, *STATE_DTYPES):
        expected = ", ".join(map(str, STATE_DTYPES))
        raise ValueError(f"{owner}: state_dtype: expected None or one of {expected}, got {group['state_dtype']!r}")


def check_numbers(owner: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError unless lr, betas, eps and weight_decay are numbers in range; tensors on a device aren't read."""
    finite = "a finite number ≥ 0"
    _check_number(owner, "lr", group["lr"], finite)
    betas = group["betas"]
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ValueError(f"{owner}: betas: expected a pair of numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        _check_number(owner, f"betas[{i}]", beta, "a number in [0, 1)", math.nextafter(1.0, 0.0))
    for name in ("eps", "weight_decay"):
        number(owner, name, group[name], finite, 0.0)


def check_no_group_option(owner: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError where a new group sets what only the optimizer as a whole has."""
    for name in ("max_grad_norm", "backend"):
        if name in group:
            raise ValueError(
                f"{owner}: {name}: expected as {owner}'s own argument, not in a group, got {group[name]!r}"
            )


def check_max_grad_norm(owner: str, value: Any) -> None:
    """Raise ValueError unless the bound of the gradients' norm is None or a number above 0; inf only measures."""
    if value is not None:
        number(owner, "max_grad_norm", value, "None or a number > 0", math.ulp(0.0), math.inf)


def _check_number(owner: str, name: str, value: Any, expected: str, most: float = LARGEST) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(
                f"{owner}: {name}: expected one floating point element, got {tuple(value.shape)} of {value.dtype}"
            )
        value = value.item() if value.device.type == "cpu" else 0.0  # a value on a device is not read back
    number(owner, name, value, expected, 0.0, most)


def _check_parameters(owner: str, params: Iterable[Any]) -> None:
    seen = set()
    for i, p in enumerate(params):
        p = p[1] if isinstance(p, tuple) else p
        if not isinstance(p, Tensor):
            continue  # torch's own TypeError says it
        if id(p) in seen:
            raise ValueError(f"{owner}: params: parameter {i} of shape {tuple(p.shape)} is in the group twice")
        seen.add(id(p))
        if is_frozen(p):  # these may be quantised
            continue
        where = f"{owner}: params: parameter {i}"
        if p.layout is not torch.strided:
            raise ValueError(f"{where}: expected a dense tensor, got layout {p.layout}")
        if p.dtype not in PARAMETER_DTYPES:
            raise ValueError(f"{where}: expected a dtype of {', '.join(map(str, PARAMETER_DTYPES))}, got {p.dtype}")


def check_gradients(owner: str, params: Iterable[Tensor]) -> None:
    """Raise ValueError naming the first parameter whose gradient no step can take."""
    for i, p in enumerate(params):
        grad = p.grad
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:
            raise ValueError(
                f"{owner}: gradient of parameter {i}: expected a dense tensor, got layout {grad.layout}; use "
                "torch.optim.SparseAdam"
            )
        check_gradient(owner, i, grad)
        if grad.shape != p.shape or grad.device != p.device:
            raise ValueError(
                f"{owner}: gradient of parameter {i}: expected shape {tuple(p.shape)} on {p.device}, got "
                f"{tuple(grad.shape)} on {grad.device}"
            )


def check_gradient(owner: str, i: int, grad: Tensor) -> None:
    """Raise ValueError unless the gradient of parameter ``i`` is dense, in memory and of a dtype that is served."""
    check_dense(owner, f"gradient of parameter {i}", grad)
    if grad.dtype not in PARAMETER_DTYPES:
        expected = ", ".join(map(str, PARAMETER_DTYPES))
        raise ValueError(f"{owner}: gradient of parameter {i}: expected a dtype of {expected}, got {grad.dtype}")


def check_scaling(owner: str, grad_scale: Any, found_inf: Any) -> None:
    """Raise ValueError unless what a gradient scaler set on the optimizer is None or one fp32 element."""
    for name, value in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        if value is None or (isinstance(value, Tensor) and value.dtype is torch.float32 and value.numel() == 1):
            continue
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{owner}: {name}: expected a one-element tensor of torch.float32, got {got}")


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
    return type(t) in (Tensor, torch.nn.Parameter) or (
        isinstance(t, torch.nn.Parameter) and type(t.data) is Tensor and not is_lazy(t)
    )


def is_frozen(p: Tensor) -> bool:
    """Tell whether ``p`` is a parameter that gets no gradient from autograd."""
    return isinstance(p, torch.nn.Parameter) and not p.requires_grad
