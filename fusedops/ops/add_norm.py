"""Residual add and norm in one pass: the input is dropped out and added to the residual, the sum is normalised.

The sum leaves as the new residual, in a dtype of its own, beside the norm of it; in a post-norm model, whose residual
is the norm, that leaves twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import amp, registry
from .._options import epsilon, flag, probability
from ..config import CONFIG
from ..dispatch import Call
from ..registry import OpSpec
from . import add_norm_record as record
from ._common import check_out_dtype, check_parameter, choose, default_eps, offset, sizes
from .add_norm_autograd import wrap_add_norm
from .add_norm_reference import Pair, add_layer_norm_reference, add_rms_norm_reference
from .norm import Shape, check_norm, check_rms_options, describe_norm
from .norm_record import LAYER_NORM_OVERRIDES, RMS_OVERRIDES, parameter_shape


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    post_norm: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Pair:
    """Return ``(layer_norm(sum), sum)``, where ``sum = residual + dropout(input)``; or the norm twice (post_norm).

    Args:
        input: (..., *normalized_shape): fp32 | fp16 | bf16 | fp64, any strides.
        residual: of ``input``'s shape: any of the dtypes above (fp64 only with fp64), any strides.
        normalized_shape: the trailing dimensions to normalise over.
        weight: (*normalized_shape): any of the dtypes above (fp64 only with fp64), or None for ones.
        bias: (*normalized_shape), likewise, or None for zeros.
        eps: added to the variance.
        dropout_p: the share of ``input``'s elements that is dropped, the others being divided by ``1 - dropout_p``.
        training: whether to drop at all.
        post_norm: the second result is the norm as well, in ``residual_dtype``: the residual of a post-norm model,
            wanted in fp32 for the next add and in 16 bits for the next matmul.
        out_dtype: dtype of the norm; None: see *Autocast*.
        residual_dtype: dtype of the sum and of the second result; None: the residual's own.
        backend: force ``"native"``, ``"triton"`` or ``"reference"``; None: dispatch chooses.

    Returns:
        Two tensors of ``input``'s shape: the norm, and the sum (post_norm: the norm) for the next residual.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value.
        UnsupportedError: the forced backend can't serve the call.

    *Autocast*: the norm has the autocast dtype (``amp.set_norm_output`` changes that), the second result
    ``residual_dtype`` as ever; inputs are never cast.
    *Numerics*: as ``layer_norm``'s. The sum is made in fp32 (fp64 for fp64) and rounded once; the norm is that of the
    *rounded* sum, statistics included. So it is what ``layer_norm`` makes of the sum that is returned, and backward,
    which reads that tensor, is the exact derivative of forward; rounding itself counts as the identity. With
    ``post_norm`` the sum is rounded all the same, and stored only where backward will read it; both results are
    roundings of one fp32 norm. Gradients of both results are added up in fp32 and rounded once. Dropout is a function
    of a seed from the device's generator, the row and the column, the same in every backend; no mask is stored.
    *Source*: Ba, Kiros, Hinton (2016); Salmon et al. (2011) for the random bits.
    """
    shape, p = sizes(normalized_shape, "add_layer_norm"), _dropped("add_layer_norm", dropout_p, training)
    dtype = amp.norm_output_dtype(input, out_dtype, "add_layer_norm")
    eps = epsilon("add_layer_norm", eps)
    if residual_dtype is not None:
        _check_residual_dtype("add_layer_norm", residual_dtype, input)
    if post_norm is not False:
        post_norm = flag("add_layer_norm", "post_norm", post_norm)
    choice = choose(
        "add_layer_norm", input, (residual, weight, bias), shape, dtype, backend, (("residual_dtype", residual_dtype),)
    )
    if not choice.checks_arguments:
        _check("add_layer_norm", input, residual, shape, weight, bias)
    try:
        result: Pair = choice.run(input, residual, shape, weight, bias, eps, p, post_norm, dtype, residual_dtype)
    except (ValueError, TypeError, RuntimeError):
        _check("add_layer_norm", input, residual, shape, weight, bias)  # the same words, whoever refused
        raise
    return result


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    post_norm: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Pair:
    """Return ``(rms_norm(sum), sum)``, where ``sum = residual + dropout(input)``; or the norm twice (post_norm).

    Args:
        input: (..., *normalized_shape): fp32 | fp16 | bf16 | fp64, any strides.
        residual: of ``input``'s shape: any of the dtypes above (fp64 only with fp64), any strides.
        normalized_shape: the trailing dimensions to normalise over.
        weight: (*normalized_shape): any of the dtypes above (fp64 only with fp64), or None for ones.
        eps: added to the mean square; None: as PyTorch, the epsilon of fp32 (of fp64 for fp64 input).
        weight_offset: added to ``weight``; 1.0 for models whose stored weight is centred on zero (Gemma).
        dropout_p: the share of ``input``'s elements that is dropped, the others being divided by ``1 - dropout_p``.
        training: whether to drop at all.
        post_norm: the second result is the norm as well, in ``residual_dtype``: the residual of a post-norm model,
            wanted in fp32 for the next add and in 16 bits for the next matmul.
        out_dtype: dtype of the norm; None: see *Autocast*.
        residual_dtype: dtype of the sum and of the second result; None: the residual's own.
        backend: force ``"native"``, ``"triton"`` or ``"reference"``; None: dispatch chooses.

    Returns:
        Two tensors of ``input``'s shape: the norm, and the sum (post_norm: the norm) for the next residual.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value.
        UnsupportedError: the forced backend can't serve the call.

    *Autocast*: the norm has the autocast dtype (``amp.set_norm_output`` changes that), the second result
    ``residual_dtype`` as ever; inputs are never cast.
    *Numerics*: as ``rms_norm``'s; of the sum and of dropout as ``add_layer_norm``'s.
    *Source*: Zhang, Sennrich (2019); Salmon et al. (2011) for the random bits.
    """
    shape, p = sizes(normalized_shape, "add_rms_norm"), _dropped("add_rms_norm", dropout_p, training)
    dtype = amp.norm_output_dtype(input, out_dtype, "add_rms_norm")
    if CONFIG.disabled and out_dtype is None:
        dtype = input.dtype  # autocast does not know PyTorch's rms_norm
    if residual_dtype is not None:
        _check_residual_dtype("add_rms_norm", residual_dtype, input)
    if post_norm is not False:
        post_norm = flag("add_rms_norm", "post_norm", post_norm)
    choice = choose(
        "add_rms_norm", input, (residual, weight), shape, dtype, backend, (("residual_dtype", residual_dtype),)
    )
    eps = default_eps(input.dtype) if eps is None else epsilon("add_rms_norm", eps)
    if type(weight_offset) is not float or weight_offset != 0.0:
        weight_offset = offset("add_rms_norm", weight_offset, weight)
    if not choice.checks_arguments:
        _check("add_rms_norm", input, residual, shape, weight)
    try:
        result: Pair = choice.run(
            input, residual, shape, weight, eps, weight_offset, p, post_norm, dtype, residual_dtype
        )
    except (ValueError, TypeError, RuntimeError):
        _check("add_rms_norm", input, residual, shape, weight)  # the same words, whoever refused
        raise
    return result


# ---------------------------------------------------------------- checks and dispatch


def _dropped(op: str, dropout_p: Any, training: Any) -> float:
    """Return the share of elements that this call drops."""
    p = probability(op, "dropout_p", dropout_p)
    if training is True:
        return p
    return p if flag(op, "training", training) else 0.0


def _check_residual_dtype(op: str, dtype: torch.dtype, input: Tensor) -> None:
    check_out_dtype(op, dtype, input.dtype, "residual_dtype")


def _check(
    op: str, input: Tensor, residual: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None = None
) -> None:
    if residual is None:
        raise ValueError(f"{op}: residual: expected a tensor, got None")
    check_norm(op, input, shape, weight, bias)
    check_parameter(op, "residual", residual, input, tuple(input.shape))


def _describe(
    op: str, input: Tensor, residual: Tensor, shape: tuple[int, ...], parameters: dict[str, Tensor | None],
    dropout_p: float, training: bool, post_norm: bool, out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    _dropped(op, dropout_p, training)
    _check(op, input, residual, shape, *parameters.values())
    post_norm = flag(op, "post_norm", post_norm)
    if residual_dtype is not None:
        _check_residual_dtype(op, residual_dtype, input)
    call = describe_norm(op, input, shape, parameters, out_dtype)
    streams = (("residual", residual.dtype), ("residual_out", residual_dtype or residual.dtype))
    return replace(call, dtypes=(call.dtypes[0], *streams, *call.dtypes[1:]))


def _describe_add_layer_norm(
    input: Tensor, residual: Tensor, normalized_shape: Shape, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *, dropout_p: float = 0.0, training: bool = True, post_norm: bool = False,
    out_dtype: torch.dtype | None = None, residual_dtype: torch.dtype | None = None,
) -> Call:  # fmt: skip
    epsilon("add_layer_norm", eps)
    return _describe(
        "add_layer_norm", input, residual, sizes(normalized_shape, "add_layer_norm"), {"weight": weight, "bias": bias},
        dropout_p, training, post_norm, out_dtype, residual_dtype,
    )  # fmt: skip


def _describe_add_rms_norm(
    input: Tensor, residual: Tensor, normalized_shape: Shape, weight: Tensor | None = None, eps: float | None = None,
    *, weight_offset: float = 0.0, dropout_p: float = 0.0, training: bool = True, post_norm: bool = False,
    out_dtype: torch.dtype | None = None, residual_dtype: torch.dtype | None = None,
) -> Call:  # fmt: skip
    check_rms_options("add_rms_norm", eps, weight_offset, weight)
    return _describe(
        "add_rms_norm", input, residual, sizes(normalized_shape, "add_rms_norm"), {"weight": weight},
        dropout_p, training, post_norm, out_dtype, residual_dtype,
    )  # fmt: skip


# ---------------------------------------------------------------- records

registry.register(
    OpSpec(
        name="add_layer_norm",
        family="norm",
        function=add_layer_norm,
        reference=add_layer_norm_reference,
        wrap=wrap_add_norm(centred=True),
        describe=_describe_add_layer_norm,
        grads=("input", "residual", "weight", "bias"),
        like_input=("residual",),
        outputs=("output", "residual_out"),
        pinned=record.pinned,
        parameter_shape=parameter_shape,
        cases=record.cases(("input", "residual", "weight", "bias"), ({"eps": 1e-12}, {"dropout_p": 1e-3})),
        condition=record.condition(centred=True),
        terms=record.terms,
        bytes_moved=record.bytes_moved,
        tolerance_overrides=LAYER_NORM_OVERRIDES,
        draw_options=record.draw_options((1e-5, 1e-12, 0.0)),
        defaults=record.defaults,
    )
)
registry.register(
    OpSpec(
        name="add_rms_norm",
        family="norm",
        function=add_rms_norm,
        reference=add_rms_norm_reference,
        wrap=wrap_add_norm(centred=False),
        describe=_describe_add_rms_norm,
        grads=("input", "residual", "weight"),
        like_input=("residual",),
        outputs=("output", "residual_out"),
        pinned=record.pinned,
        parameter_shape=parameter_shape,
        cases=record.cases(("input", "residual", "weight"), ({"eps": 1e-12}, {"weight_offset": 1.0, "dropout_p": 0.5})),
        condition=record.condition(centred=False),
        terms=record.terms,
        bytes_moved=record.bytes_moved,
        tolerance_overrides=RMS_OVERRIDES,
        draw_options=record.draw_options((None, 1e-6, 1e-12, 0.0), offset=True),
        defaults=record.rms_defaults,
    )
)
