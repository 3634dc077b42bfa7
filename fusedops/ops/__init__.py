"""The ops: one file a family, with its public functions, its references and its records."""

from .norm import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
