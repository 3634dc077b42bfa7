"""LayerNorm and RMSNorm over the last dimensions.

The public functions check their arguments, let ``amp`` pick the output dtype and hand over to the backend that
``dispatch`` chooses.

Source: Ba, Kiros, Hinton, "Layer Normalization" (2016); Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import amp, registry
from .._options import epsilon
from ..config import CONFIG
from ..dispatch import Call
from ..registry import OpSpec
from . import norm_record as record
from ._common import FLOATS, check_dense, check_out_dtype, check_parameter, choose, default_eps, offset, sizes
from .norm_autograd import wrap_norm
from .norm_reference import layer_norm_reference, rms_norm_reference

Shape = int | Sequence[int]


def layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return ``(input - mean) / sqrt(var + eps) * weight + bias`` over the last ``normalized_shape`` dimensions.

    Args:
        input: (..., *normalized_shape): fp32 | fp16 | bf16 | fp64, any strides.
        normalized_shape: the trailing dimensions to normalise over.
        weight: (*normalized_shape): any of the dtypes above (fp64 only with fp64), or None for ones.
        bias: (*normalized_shape), likewise, or None for zeros.
        eps: added to the variance.
        out_dtype: dtype of the result; None: see *Autocast*.
        backend: force ``"native"``, ``"triton"``, ``"apex"`` or ``"reference"``; None: dispatch chooses.

    Returns:
        Tensor of ``input``'s shape.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value.
        UnsupportedError: the forced backend can't serve the call.

    *Autocast*: returns the autocast dtype (``amp.set_norm_output`` changes that); inputs are never cast.
    *Numerics*: fp32 statistics and arithmetic (fp64 for fp64), the variance from centred values, one rounding of the
    result. Gradients have their tensor's dtype, sums over rows are fp32; deterministic.
    *Source*: Ba, Kiros, Hinton (2016).
    """
    shape = sizes(normalized_shape, "layer_norm")
    dtype = amp.norm_output_dtype(input, out_dtype, "layer_norm")
    eps = epsilon("layer_norm", eps)
    choice = choose("layer_norm", input, (weight, bias), shape, dtype, backend)
    if not choice.checks_arguments:
        check_norm("layer_norm", input, shape, weight, bias)
    try:
        result: Tensor = choice.run(input, shape, weight, bias, eps, dtype)
    except (ValueError, TypeError, RuntimeError):
        check_norm("layer_norm", input, shape, weight, bias)  # the same words, whoever refused
        raise
    return result


def rms_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return ``input / sqrt(mean(input²) + eps) * (weight + weight_offset)`` over the last dimensions.

    Args:
        input: (..., *normalized_shape): fp32 | fp16 | bf16 | fp64, any strides.
        normalized_shape: the trailing dimensions to normalise over.
        weight: (*normalized_shape): any of the dtypes above (fp64 only with fp64), or None for ones.
        eps: added to the mean square; None: as PyTorch, the epsilon of fp32 (of fp64 for fp64 input).
        weight_offset: added to ``weight``; 1.0 for models whose stored weight is centred on zero (Gemma).
        out_dtype: dtype of the result; None: see *Autocast*.
        backend: force ``"native"``, ``"triton"``, ``"apex"`` or ``"reference"``; None: dispatch chooses.

    Returns:
        Tensor of ``input``'s shape.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value.
        UnsupportedError: the forced backend can't serve the call.

    *Autocast*: returns the autocast dtype (``amp.set_norm_output`` changes that); inputs are never cast.
    *Numerics*: fp32 statistics and arithmetic (fp64 for fp64), one rounding of the result; the offset is added in fp32.
    Gradients have their tensor's dtype, sums over rows are fp32; deterministic.
    *Source*: Zhang, Sennrich (2019).
    """
    shape = sizes(normalized_shape, "rms_norm")
    dtype = amp.norm_output_dtype(input, out_dtype, "rms_norm")
    if CONFIG.disabled and out_dtype is None:
        dtype = input.dtype  # autocast does not know PyTorch's rms_norm
    choice = choose("rms_norm", input, (weight,), shape, dtype, backend)
    eps = default_eps(input.dtype) if eps is None else epsilon("rms_norm", eps)
    if type(weight_offset) is not float or weight_offset != 0.0:
        weight_offset = offset("rms_norm", weight_offset, weight)
    if not choice.checks_arguments:
        check_norm("rms_norm", input, shape, weight)
    try:
        result: Tensor = choice.run(input, shape, weight, eps, weight_offset, dtype)
    except (ValueError, TypeError, RuntimeError):
        check_norm("rms_norm", input, shape, weight)  # the same words, whoever refused
        raise
    return result


# ---------------------------------------------------------------- checks and dispatch


def check_norm(
    op: str, input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None = None
) -> None:
    """Raise ValueError naming the argument, what was expected and what came."""
    check_dense(op, "input", input)
    if input.dtype not in FLOATS:
        raise ValueError(f"{op}: input: expected a dtype of fp32, fp16, bf16 or fp64, got {input.dtype}")
    if any(isinstance(size, float) for size in shape):  # 8.0 == 8, so the shapes may well agree
        raise ValueError(f"{op}: normalized_shape: expected integers, got {shape}")
    if not shape or input.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{op}: normalized_shape: expected the last dimensions of input {tuple(input.shape)}, got {shape}"
        )
    if weight is not None:
        check_parameter(op, "weight", weight, input, shape)
    if bias is not None:
        check_parameter(op, "bias", bias, input, shape)


def _describe_layer_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *, out_dtype: torch.dtype | None = None,
) -> Call:  # fmt: skip
    shape = sizes(normalized_shape, "layer_norm")
    epsilon("layer_norm", eps)
    return describe_norm("layer_norm", input, shape, {"weight": weight, "bias": bias}, out_dtype)


def _describe_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None = None, eps: float | None = None,
    *, weight_offset: float = 0.0, out_dtype: torch.dtype | None = None,
) -> Call:  # fmt: skip
    shape = sizes(normalized_shape, "rms_norm")
    check_rms_options("rms_norm", eps, weight_offset, weight)
    return describe_norm("rms_norm", input, shape, {"weight": weight}, out_dtype)


def check_rms_options(op: str, eps: Any, weight_offset: Any, weight: Tensor | None) -> None:
    """Raise ValueError unless the numbers of an RMS norm are such."""
    if eps is not None:
        epsilon(op, eps)
    offset(op, weight_offset, weight)


def describe_norm(
    op: str, input: Tensor, shape: tuple[int, ...], parameters: dict[str, Tensor | None], out_dtype: torch.dtype | None
) -> Call:
    """Check a call of a norm and describe it."""
    check_norm(op, input, shape, *parameters.values())
    if out_dtype is not None:
        check_out_dtype(op, out_dtype, input.dtype)
    dtypes = (
        ("input", input.dtype),
        *((name, parameter.dtype) for name, parameter in parameters.items() if parameter is not None),
        ("output", amp.norm_output_dtype(input, out_dtype, op)),
    )
    hidden = math.prod(shape)
    most = 2 ** input.numel().bit_length() - 1  # elements of a call of its like; as in choose's key
    rows = most // max(hidden, 1)
    return Call(op, input.device.type, input.get_device(), dtypes, hidden, rows)


# ---------------------------------------------------------------- records

registry.register(
    OpSpec(
        name="layer_norm",
        family="norm",
        function=layer_norm,
        reference=layer_norm_reference,
        wrap=wrap_norm(centred=True),
        describe=_describe_layer_norm,
        grads=("input", "weight", "bias"),
        parameter_shape=record.parameter_shape,
        cases=record.cases(("input", "weight", "bias"), ({"eps": 1e-12}, {"eps": 1e-3})),
        condition=record.condition(centred=True),
        terms=record.terms,
        bytes_moved=record.bytes_moved,
        tolerance_overrides={**record.LAYER_NORM_OVERRIDES, **record.APEX_OVERRIDES},
        draw_options=record.draw_options((1e-5, 1e-12, 0.0)),
    )
)
registry.register(
    OpSpec(
        name="rms_norm",
        family="norm",
        function=rms_norm,
        reference=rms_norm_reference,
        wrap=wrap_norm(centred=False),
        describe=_describe_rms_norm,
        grads=("input", "weight"),
        parameter_shape=record.parameter_shape,
        cases=record.cases(("input", "weight"), ({"eps": 1e-12}, {"weight_offset": 1.0})),
        condition=record.condition(centred=False),
        terms=record.terms,
        bytes_moved=record.bytes_moved,
        tolerance_overrides=record.RMS_OVERRIDES,
        draw_options=record.draw_options((None, 1e-6, 1e-12, 0.0), offset=True),
        defaults=record.rms_defaults,
    )
)
