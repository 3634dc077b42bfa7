"""Optimizers."""
from __future__ import annotations

from typing import Any


def describe(name: str, *args: Any, **kwargs: Any) -> Any:
    """Describe an optimizer call."""
    raise NotImplementedError
