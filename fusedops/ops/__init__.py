"""The ops: ``<stem>.py`` has a family's public functions and records, and is its only file where that is short.

Else ``<stem>_reference.py`` has the truth, ``<stem>_autograd.py`` makes whole ops of a backend's pairs, and
``<stem>_record.py`` has what is tested and how exact it has to be.
"""

from .add_norm import add_layer_norm, add_rms_norm
from .cross_entropy import cross_entropy
from .norm import layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "cross_entropy", "layer_norm", "rms_norm"]
