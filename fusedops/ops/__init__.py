"""The ops: one file a family, with its public functions, its references and its records."""

from .add_norm import add_layer_norm, add_rms_norm
from .norm import layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
