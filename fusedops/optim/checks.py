"""What an optimizer refuses before it writes anything, and what it warns about."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAMPLES = 1 << 16


def check_group(owner: str, group: Mapping[str, Any]) -> None:
    """Check the options and parameters of one group, defaults filled in.

    Args:
        owner: name of the optimizer, for the message.
        group: as in ``param_groups``; parameters may be ``(name, parameter)`` pairs.

    Raises:
        ValueError: an option or a parameter that no Adam can work with.
        UnsupportedError: a sound request that is not served.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            raise ValueError(f"{owner}: lr: expected one floating point element, got {tuple(lr.shape)} of {lr.dtype}")
        lr = lr.item() if lr.device.type == "cpu" else 0.0  # a value on a device is not read back
    _check_number(owner, "lr", lr)
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"{owner}: betas: expected a pair of numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor):
            raise UnsupportedError(f"{owner}: betas[{i}]: a tensor is not supported; pass float(beta)")
        _check_number(owner, f"betas[{i}]", beta, below=1.0)
    _check_number(owner, "eps", group["eps"])
    _check_number(owner, "weight_decay", group["weight_decay"])
    if group["differentiable"]:
        raise UnsupportedError(f"{owner}: differentiable=True: a fused step records no graph; use torch.optim.{owner}")
    if group["state_dtype"] not in (None, *STATE_DTYPES):
        expected = ", ".join(map(str, STATE_DTYPES))
        raise ValueError(f"{owner}: state_dtype: expected None or one of {expected}, got {group['state_dtype']!r}")
    _check_parameters(owner, group["params"])


def _check_number(owner: str, name: str, value: Any, below: float = math.inf) -> None:
    if not isinstance(value, Real) or not 0.0 <= float(value) < below:  # NaN fails every comparison
        bound = "a finite number ≥ 0" if below == math.inf else f"a number in [0, {below:g})"
        raise ValueError(f"{owner}: {name}: expected {bound}, got {value!r}")


def _check_parameters(owner: str, params: Iterable[Any]) -> None:
    seen = set()
    for number, p in enumerate(params):
        p = p[1] if isinstance(p, tuple) else p
        if not isinstance(p, Tensor):
            continue  # torch's own TypeError says it
        if id(p) in seen:
            raise ValueError(f"{owner}: params: parameter {number} of shape {tuple(p.shape)} is in the group twice")
        seen.add(id(p))
        if p.dtype not in PARAMETER_DTYPES:
            expected = ", ".join(map(str, PARAMETER_DTYPES))
            raise ValueError(f"{owner}: params: parameter {number}: expected a dtype of {expected}, got {p.dtype}")


def check_gradient(owner: str, p: Tensor) -> None:
    """Raise ValueError where the gradient of ``p`` is sparse."""
    if p.grad is not None and p.grad.layout is not torch.strided:
        raise ValueError(
            f"{owner}: gradient: expected a dense tensor, got layout {p.grad.layout}; use torch.optim.SparseAdam"
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
    if group["master_weights"] or not lr:
        return False
    share = lost_updates(group["params"], lr)
    if share <= 0.5:
        return False
    warnings.warn(
        f"{owner}: at lr={lr:g}, {share:.0%} of the 16-bit weights are spaced so wide that a step of about lr "
        "rounds away and they will not move. Pass master_weights=True (4 more bytes a parameter), or keep the "
        "parameters in fp32 under torch.autocast (2 more bytes a parameter for the weight, 2 for its gradient).",
        UserWarning,
        stacklevel=4,
    )
    return True


def is_plain(t: Tensor) -> bool:
    """Tell whether ``t`` is an ordinary tensor or parameter, not a subclass with its own memory (DTensor, …)."""
    return type(t) in (Tensor, torch.nn.Parameter) or (isinstance(t, torch.nn.Parameter) and type(t.data) is Tensor)
