"""NVIDIA Apex, where its extension modules are installed. Its code is called, never copied.

Apex is known by its extensions, never by the name ``apex``, which on PyPI belongs to another project. They are loaded
at the first call that asks for them: ``fused_layer_norm_cuda`` serves the norms, ``fast_layer_norm`` LayerNorm at its
own list of widths. What Apex gets wrong is refused: its Adam (1 - beta2 in fp32), 16-bit weights (x̂, scaling and
shift are each rounded to 16 bits: up to 1,200 times the bound near zero, measured on an H200), 16-bit input with fp32
weights (its dispatch has no such case), rows wider than 16,384 (sums lose digits: 2.6 times the bound at 65,535), more
than 2¹⁷ rows with parameters (dbias adds up many of them one after another: 26 times the bound at 545,239), 2³¹
elements or more (32-bit offsets), tracing. The memory-efficient variant is not used (it loses the gradient of weights
near zero). Its launches follow the current device, so the tensor's is made current.

Numerics: fp32 statistics by Welford's method, sums over rows one after another: LayerNorm may be off by up to 8 times
our bound on rows that are nearly constant or all alike (measured on an H200: 5.3), which is why no shipped row of the
dispatch table names Apex. Built with fast math, so subnormals are flushed to zero; a row whose squares are more than
fp32 holds becomes NaN (PyTorch's becomes the bias). Deterministic.

Source: https://github.com/NVIDIA/apex (BSD-3-Clause).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor

from ..dispatch import Call, Limits
from ..errors import UnsupportedError

NAME = "apex"

EXTENSIONS = {
    "fused_layer_norm_cuda": "LayerNorm and RMSNorm",
    "fast_layer_norm": "LayerNorm at fixed widths",
}
FAST_WIDTHS = frozenset({
    768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 14336, 15360, 16384,
})  # fmt: skip
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_NARROW = (torch.float16, torch.bfloat16)
_MAX_ELEMENTS = 2**31 - 1
_MAX_ROWS = 2**17


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a stand-in that somebody put into sys.modules has no spec
        return False


@functools.cache
def extension(name: str) -> ModuleType | str:
    """Return an extension module of Apex, or the reason why there is none."""
    if not _installed(name):
        return f"{name} is not installed"
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        return f"{name} was built for another PyTorch and must be rebuilt: {error}"


def parts() -> dict[str, str | None]:
    """Return each extension's name with the reason why it is absent, or None where it is there."""
    found = {name: extension(name) for name in EXTENSIONS}
    return {name: module if isinstance(module, str) else None for name, module in found.items()}


def unavailable(device_type: str) -> str | None:
    """Say why Apex cannot serve tensors on ``device_type``, or None when a part of it can."""
    if device_type != "cuda":
        return f"its kernels are for CUDA devices, not for {device_type}"
    absent = parts()
    if None in absent.values():
        return None
    reasons = "; ".join(str(reason) for reason in absent.values())
    if "apex" in sys.modules or _installed("apex"):
        return f"a package named apex is there, but not NVIDIA Apex's extensions (PyPI's apex is not it): {reasons}"
    return f"NVIDIA Apex's extensions are not there: {reasons}"


def _need(name: str) -> ModuleType:
    module = extension(name)
    if isinstance(module, str):
        raise UnsupportedError(f"apex: {module}")
    return module


def _refuse_norm(call: Call) -> str | None:
    """Fp32 throughout, or one dtype without parameters."""
    module = extension("fused_layer_norm_cuda")
    if isinstance(module, str):
        return module
    dtypes = dict(call.dtypes)
    if call.op == "layer_norm" and ("weight" in dtypes) != ("bias" in dtypes):
        return "it takes weight and bias together or neither"
    if len(set(dtypes.values())) > 1:
        return "it takes one dtype throughout"
    if "weight" in dtypes and dtypes["weight"] in _NARROW:
        return f"with {dtypes['weight']} weights it rounds three times where one rounding is promised"
    if "weight" in dtypes and (call.rows or 0) > _MAX_ROWS:
        return f"with parameters it is right up to {_MAX_ROWS} rows, whose gradients it adds up one after another"
    return None


def _refuse_adam(call: Call) -> str:
    return (
        "its Adam computes 1 - beta2 in fp32, which moves exp_avg_sq by 1.3e-5 of itself: "
        "43 times what a step is allowed (measured on an H200)"
    )


_NORM = Limits(_FLOATS, max_hidden=2**14, max_elements=_MAX_ELEMENTS, traceable=False, extra=_refuse_norm)
_ADAM = Limits(_FLOATS, extra=_refuse_adam)
LIMITS = {"layer_norm": _NORM, "rms_norm": _NORM, "adam": _ADAM, "adamw": _ADAM}


def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each row; arguments and results as ``triton.norm.layer_norm_fwd``. Strided rows are copied."""
    x, hidden = x.contiguous(), [x.shape[1]]
    if x.numel() == 0:
        return _empty(x, out_dtype), _row(x), _row(x)
    with torch.cuda.device(x.device):
        if weight is None or bias is None:
            y, mean, rstd = _need("fused_layer_norm_cuda").forward(x, hidden, eps)
        elif _fast_serves(x, weight, bias):
            y, mean, rstd = _need("fast_layer_norm").ln_fwd(x, weight, bias, eps)
        else:
            y, mean, rstd = _need("fused_layer_norm_cuda").forward_affine(x, hidden, weight, bias, eps)
    return y, mean, rstd


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    need: tuple[bool, bool, bool],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``layer_norm_fwd``; arguments and results as ``triton.norm.layer_norm_bwd``."""
    dy, x, hidden = dy.contiguous(), x.contiguous(), [x.shape[1]]
    if x.numel() == 0:
        return _masked((_empty(x, x.dtype), _zeros(weight), _zeros(weight)), need)
    dweight = dbias = None
    with torch.cuda.device(x.device):
        # The plain backward is told eps and the bias but uses them only in its memory-efficient variant.
        if weight is None:
            dx = _need("fused_layer_norm_cuda").backward(dy, mean, rstd, x, hidden, 0.0, False)
        elif _fast_serves(x, weight, dy):
            dx, dweight, dbias, *_ = _need("fast_layer_norm").ln_bwd(dy, x, mean, rstd, weight, None, False)
        else:
            backward = _need("fused_layer_norm_cuda").backward_affine
            dx, dweight, dbias = backward(dy, mean, rstd, x, hidden, weight, weight, 0.0, False)
    return _masked((dx, dweight, dbias), need)


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale each row; arguments and results as ``triton.norm.rms_norm_fwd``. Strided rows are copied."""
    weight = _shifted(weight, weight_offset)
    x, hidden = x.contiguous(), [x.shape[1]]
    if x.numel() == 0:
        return _empty(x, out_dtype), _row(x)
    fused = _need("fused_layer_norm_cuda")
    with torch.cuda.device(x.device):
        if weight is None:
            y, rstd = fused.rms_forward(x, hidden, eps)
        else:
            y, rstd = fused.rms_forward_affine(x, hidden, weight, eps)
    return y, rstd


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, need: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``rms_norm_fwd``; arguments and results as ``triton.norm.rms_norm_bwd``."""
    weight = _shifted(weight, weight_offset)
    dy, x, hidden = dy.contiguous(), x.contiguous(), [x.shape[1]]
    dweight = None
    if x.numel() == 0:
        dx, dweight = _empty(x, x.dtype), _zeros(weight)
    else:
        fused = _need("fused_layer_norm_cuda")
        with torch.cuda.device(x.device):
            if weight is None:
                dx = fused.rms_backward(dy, rstd, x, hidden, 0.0, False)
            else:
                dx, dweight = fused.rms_backward_affine(dy, rstd, x, hidden, weight, 0.0, False)
    return dx if need[0] else None, dweight if need[1] else None


def _fast_serves(x: Tensor, weight: Tensor, other: Tensor) -> bool:
    """Tell whether ``fast_layer_norm`` can: its widths, 16-byte alignment (which it does not check)."""
    return (
        x.shape[1] in FAST_WIDTHS
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, other))
        and not isinstance(extension("fast_layer_norm"), str)
    )


def _shifted(weight: Tensor | None, weight_offset: float) -> Tensor | None:
    """Add the offset that Apex does not know to the weight, which is fp32 wherever it is served."""
    return weight if weight is None or not weight_offset else weight + weight_offset


def _masked(
    grads: tuple[Tensor, Tensor | None, Tensor | None], need: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx, dweight, dbias = (grad if wanted else None for grad, wanted in zip(grads, need, strict=True))
    return dx, dweight, dbias


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _row(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)


def _zeros(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else torch.zeros_like(weight)
