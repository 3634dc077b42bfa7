"""Fused kernels for training transformers with PyTorch: less time and energy a step, the same results.

    import fusedops
    y = fusedops.layer_norm(x, (768,), weight, bias)      # or fusedops.nn.LayerNorm(768)
    optimizer = fusedops.optim.AdamW(model.parameters(), max_grad_norm=1.0)

``fusedops.report()`` says what runs here, ``fusedops.explain("layer_norm", x, 768, weight, bias)`` what a call runs on
and why. Importing replaces nothing in torch.
"""

from . import amp, backends, nn, optim
from .cli.report import report
from .dispatch import check_forced, explain, load_table, use_backend
from .errors import FallbackWarning, UnsupportedError
from .ops import add_layer_norm, add_rms_norm, cross_entropy, layer_norm, rms_norm
from .optim.clip import clip_grad_norm_
from .patch import PatchReport, patch, patched, unpatch
from .tuning.model import TuneReport, tune, warmup

__all__ = [
    "FallbackWarning",
    "PatchReport",
    "TuneReport",
    "UnsupportedError",
    "add_layer_norm",
    "add_rms_norm",
    "amp",
    "backends",
    "clip_grad_norm_",
    "cross_entropy",
    "explain",
    "layer_norm",
    "nn",
    "optim",
    "patch",
    "patched",
    "report",
    "rms_norm",
    "tune",
    "unpatch",
    "use_backend",
    "warmup",
]
__version__ = "0.1.0"

check_forced()  # only now are all ops known
load_table()
backends.get("native")  # defines torch.ops.fusedops, which exported graphs name
