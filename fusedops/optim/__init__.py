"""Optimizers that update all parameters of a device in one launch, with torch's names, numbers and state dicts."""

from .adam import Adam, AdamW
from .calls import describe, describe_optimizer
from .convert import convert_state_dict

__all__ = ["Adam", "AdamW", "convert_state_dict", "describe", "describe_optimizer"]
