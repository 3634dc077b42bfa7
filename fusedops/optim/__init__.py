"""Optimizers that update all parameters of a device in one launch, with torch's names, numbers and state dicts."""

from .adam import Adam, AdamW
from .calls import describe

__all__ = ["Adam", "AdamW", "describe"]
