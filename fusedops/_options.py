"""What a caller gives beside tensors: one opinion, for every op and optimizer, of what a number and a flag are."""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any

from torch import Tensor

LARGEST = sys.float_info.max


def number(owner: str, name: str, value: Any, expected: str, least: float, most: float = LARGEST) -> float:
    """Return a caller's number as a float.

    NumPy's real scalars are numbers. A bool is none, for it stands where its giver meant another argument; nor is a
    tensor, as its value may have to be waited for.

    Args:
        owner: op, module or optimizer whose argument it is, for the message.
        name: the argument.
        value: what came.
        expected: the range below in words.
        least: smallest number allowed.
        most: largest number allowed.

    Raises:
        ValueError: no number, or one out of range; NaN is out of every range.
    """
    if type(value) is float and least <= value <= most:
        return value
    value = plain(value)
    shown = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else None
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            shown = "a number that no float can hold"  # nor may it have too many digits to be printed
        else:
            if least <= found <= most:
                return found
    raise ValueError(f"{owner}: {name}: expected {expected}, got {repr(value) if shown is None else shown}")


def plain(value: Any) -> Any:
    """Return a scalar of NumPy's as Python's own, everything else as it is."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # traced code, to which they are arrays, has a number from here on
    return value


def epsilon(owner: str, value: Any) -> float:
    """Return what is added to a variance as a float; see ``number``."""
    if type(value) is float and 0.0 <= value <= LARGEST:  # every call of a norm asks; a second call would show
        return value
    return number(owner, "eps", value, "a finite number ≥ 0", 0.0)


def probability(owner: str, name: str, value: Any) -> float:
    """Return a probability as a float; see ``number``."""
    return number(owner, name, value, "a probability from 0 to 1", 0.0, 1.0)


def cap(owner: str, value: Any) -> float:
    """Return what caps logits as a float; see ``number``."""
    return number(owner, "softcap", value, "None or a finite number > 0", 2.0**-126)


def flag(owner: str, name: str, value: Any) -> bool:
    """Return a caller's flag, NumPy's too, as a bool; anything else than True or False raises ValueError."""
    found = plain(value)
    if not isinstance(found, bool):
        raise ValueError(f"{owner}: {name}: expected True or False, got {value!r}")
    return found
