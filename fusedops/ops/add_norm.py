"""Residual add and norm in one pass: the input is dropped out and added to the residual, the sum is normalised.

The sum leaves as the new residual, in a dtype of its own, beside the norm of it; in a post-norm model, whose residual
is the norm, that leaves twice. The references below are the truth, in plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import amp, registry
from .._options import epsilon, flag, probability
from ..config import CONFIG
from ..dispatch import Call
from ..registry import LAYOUTS, VALUES, Case, OpSpec, Sample
from ._common import (
    check_out_dtype,
    check_parameter,
    choose,
    default_eps,
    differentiate,
    flat_parameter,
    in_memory,
    offset,
    rows_of,
    sizes,
    wide,
)
from .dropout import draw_seed, drop, dropout_factor
from .norm import (
    LAYER_NORM_OVERRIDES,
    RMS_OVERRIDES,
    Shape,
    check_norm,
    check_rms_options,
    describe_norm,
    draw_norm_options,
    layer_norm_reference,
    norm_condition,
    norm_parameter_shape,
    rms_norm_reference,
)

Pair = tuple[Tensor, Tensor]


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


# ---------------------------------------------------------------- references: plain PyTorch


def add_layer_norm_reference(
    input: Tensor, residual: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, dropout_p: float = 0.0, post_norm: bool = False,
    out_dtype: torch.dtype | None = None, residual_dtype: torch.dtype | None = None, *, seed: Tensor | None = None,
    rounded: Tensor | None = None,
) -> Pair:  # fmt: skip
    """Compute ``add_layer_norm`` in plain PyTorch, in fp32 (fp64 for fp64); derivatives as ``layer_norm_reference``.

    ``seed`` and ``rounded`` repeat what another call drew, and what its sum was rounded to.
    """
    normalised, total = _sum(input, residual, len(normalized_shape), dropout_p, residual_dtype, seed, rounded)
    norm = layer_norm_reference(normalised, normalized_shape, weight, bias, eps, wide(input.dtype))
    return _results(norm, total, post_norm, out_dtype or input.dtype)


def add_rms_norm_reference(
    input: Tensor, residual: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None, weight_offset: float = 0.0, dropout_p: float = 0.0, post_norm: bool = False,
    out_dtype: torch.dtype | None = None, residual_dtype: torch.dtype | None = None, *, seed: Tensor | None = None,
    rounded: Tensor | None = None,
) -> Pair:  # fmt: skip
    """Compute ``add_rms_norm`` in plain PyTorch; see ``add_layer_norm_reference``."""
    normalised, total = _sum(input, residual, len(normalized_shape), dropout_p, residual_dtype, seed, rounded)
    norm = rms_norm_reference(normalised, normalized_shape, weight, eps, weight_offset, wide(input.dtype))
    return _results(norm, total, post_norm, out_dtype or input.dtype)


def _sum(
    input: Tensor, residual: Tensor, dims: int, p: float, dtype: torch.dtype | None, seed: Tensor | None,
    rounded: Tensor | None,
) -> Pair:  # fmt: skip
    """Return the sum, as it is normalised: rounded, yet with the derivative of the sum; and as it is returned."""
    acc = wide(input.dtype)
    total = residual.to(acc) + drop(input.to(acc), p, dims, seed)
    result = total.to(dtype or residual.dtype)
    rounded = (result if rounded is None else rounded).detach().to(acc)
    return total + torch.where(rounded == total, 0.0, rounded - total).detach(), result


def _results(norm: Tensor, total: Tensor, post_norm: bool, dtype: torch.dtype) -> Pair:
    """Return the norm, and the sum or the norm once more: a tensor of its own, also where their dtypes are one."""
    return norm.to(dtype), norm.to(total.dtype, copy=True) if post_norm else total


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


# ---------------------------------------------------------------- autograd over a backend's pair


class _AddNorm(torch.autograd.Function):
    """One autograd function over any backend's pairs; a gradient that is absent stays absent."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        centred: bool,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        eps: float,
        weight_offset: float,
        p: float,
        post_norm: bool,
        keep_total: bool,
        dtype: torch.dtype,
        residual_dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        mean: Tensor | None = None
        if centred:
            y, residual_out, total, mean, rstd = module.add_layer_norm_fwd(
                x, residual, weight, bias, eps, seed, p, post_norm, keep_total, dtype, residual_dtype
            )
        else:
            y, residual_out, total, rstd = module.add_rms_norm_fwd(
                x, residual, weight, eps, weight_offset, seed, p, post_norm, keep_total, dtype, residual_dtype
            )
        ctx.set_materialize_grads(False)
        # The sum is an output even where nobody sees it: second derivatives, which compiled code does not have, find
        # their way back through it.
        hidden = () if total is None or torch.compiler.is_compiling() else (total,)
        sums = hidden if post_norm else (residual_out,)
        if not (ctx.needs_input_grad[2] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(*sums)
        ctx.save_for_backward(total if post_norm else residual_out, weight, mean, rstd, seed)
        ctx.module, ctx.eps, ctx.weight_offset, ctx.p, ctx.post_norm = module, eps, weight_offset, p, post_norm
        ctx.dtypes = (x.dtype, residual.dtype, None if bias is None else bias.dtype)
        return y, residual_out, *hidden

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None, dtotal: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd, seed = ctx.saved_tensors
        need = ctx.needs_input_grad[2:6]
        if ctx.post_norm and dy is None:
            dy, dresidual_out = dresidual_out, None  # one gradient of the norm is as good as the other
        second = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if dy is None or dtotal is not None or second:
            grads = _bwd_in_torch(ctx, dy, dresidual_out, dtotal, total, weight, mean is not None, seed, need)
        else:
            dy, dresidual_out = _unit_stride(dy), None if dresidual_out is None else _unit_stride(dresidual_out)
            x_dtype, residual_dtype, bias_dtype = ctx.dtypes
            given = (dy, dresidual_out, total, weight)
            if mean is not None:
                dx, dresidual, dweight, dbias = ctx.module.add_layer_norm_bwd(
                    *given, mean, rstd, seed, ctx.p, ctx.post_norm, need, x_dtype, residual_dtype, bias_dtype
                )
            else:
                dx, dresidual, dweight = ctx.module.add_rms_norm_bwd(
                    *given, rstd, ctx.weight_offset, seed, ctx.p, ctx.post_norm, need[:3], x_dtype, residual_dtype
                )
                dbias = None
            grads = (dresidual if need[0] and dx is None else dx, dresidual, dweight, dbias)
        return None, None, *grads, *(None,) * 8


def _unit_stride(grad: Tensor) -> Tensor:
    return in_memory(grad if grad.stride(1) == 1 or grad.shape[1] == 1 else grad.contiguous())


def _bwd_in_torch(
    ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None, dtotal: Tensor | None, total: Tensor,
    weight: Tensor | None, centred: bool, seed: Tensor | None, need: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, residual, weight and bias in differentiable torch ops, from whichever dy there are."""
    acc = wide(total.dtype)
    dy, dresidual_out, dsum = (None if grad is None else grad.to(acc) for grad in (dy, dresidual_out, dtotal))
    if not ctx.post_norm:
        dsum = dresidual_out
    elif dy is not None and dresidual_out is not None:
        dy = dy + dresidual_out
    dweight = dbias = None
    x_dtype, residual_dtype, bias_dtype = ctx.dtypes
    if dy is not None:
        # A bias enters linearly: its value does not matter to any derivative.
        bias = None if bias_dtype is None else total.new_zeros(total.shape[1], dtype=bias_dtype).requires_grad_()
        with torch.enable_grad():
            x = total.to(acc) if total.requires_grad else total.to(acc, copy=True).requires_grad_()

        def norm() -> Tensor:
            if centred:
                return layer_norm_reference(x, x.shape[1:], weight, bias, ctx.eps)
            return rms_norm_reference(x, x.shape[1:], weight, ctx.eps, ctx.weight_offset)

        wanted = (need[0] or need[1], *need[2:])
        dnorm, dweight, dbias = differentiate(norm, (x, weight, bias), wanted, dy)
        if dnorm is not None:
            dsum = dnorm if dsum is None else dsum + dnorm
    if dsum is None:
        return None, None, dweight, dbias
    dx = dsum if seed is None else dsum * dropout_factor(seed, ctx.p, dsum.shape, 1, acc)
    return dx.to(x_dtype) if need[0] else None, dsum.to(residual_dtype) if need[1] else None, dweight, dbias


def _wrap(centred: bool) -> Callable[[ModuleType], Callable[..., Pair]]:
    """Make a whole op of a backend's pair."""

    def wrap(module: ModuleType) -> Callable[..., Pair]:
        def run(input: Tensor, residual: Tensor, shape: Sequence[int], weight: Tensor | None, *rest: Any) -> Pair:
            bias, eps, weight_offset, p, post_norm, dtype, residual_dtype = (
                (rest[0], rest[1], 0.0, *rest[2:]) if centred else (None, *rest)
            )
            hidden = math.prod(shape)
            weight, bias = (None if t is None else flat_parameter(t, hidden) for t in (weight, bias))
            differentiable = (t is not None and t.requires_grad for t in (input, residual, weight, bias))
            keep_total = post_norm and torch.is_grad_enabled() and any(differentiable)
            y, residual_out, *_ = _AddNorm.apply(
                module, centred, rows_of(input, hidden), rows_of(residual, hidden), weight, bias, draw_seed(p, input),
                eps, weight_offset, p, post_norm, keep_total, dtype, residual_dtype or residual.dtype,
            )  # fmt: skip
            return y.view(input.shape), residual_out.view(input.shape)

        return run

    return wrap


# ---------------------------------------------------------------- records

_32, _16, _B, _64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# (input, residual, residual_out, weight, bias) → output: uniform dtypes, an fp32 residual stream, and odd mixes.
_MIXES: tuple[tuple[torch.dtype | None, ...], ...] = (
    (_32, _32, None, _32, _32, None), (_B, _B, None, _B, _B, None), (_16, _16, None, _16, _16, None),
    (_B, _32, None, _32, _32, None), (_16, _32, None, _16, _32, None), (_B, _B, _32, _32, _32, None),
    (_B, _32, _B, _B, _B, _32), (_32, _B, None, _32, _32, _B), (_16, _32, _16, _32, _32, _16),
    (_32, _16, _B, _16, _B, _32), (_64, _64, None, _64, _64, None),
)  # fmt: skip
_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3, 1), 1), ((4, 7), 1), ((2, 3, 64), 1), ((5, 257), 1), ((9, 768), 1), ((4, 1023), 1), ((3, 5120), 1),
    ((9, 2056), 1), ((2, 12288), 1), ((2, 3, 4, 16), 2), ((7,), 1), ((0, 16), 1),
)  # fmt: skip
_FULL_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((65537, 8), 1), ((70000, 2, 8), 2), ((33, 1024), 1), ((2, 65537), 1), ((1, 1 << 20), 1), ((300, 3072), 1),
    ((64, 8192), 1), ((37, 16384), 1), ((5, 50257), 1),
)  # fmt: skip


def _cases(names: tuple[str, ...], options: tuple[dict[str, Any], ...]) -> Callable[[str], Iterator[Case]]:
    def case(
        shape: tuple[int, ...], n: int, mix: tuple[torch.dtype | None, ...], keep: Sequence[str] = names, **more: Any
    ) -> Case:
        dtypes = dict(zip(("input", "residual", "weight", "bias"), (*mix[:2], *mix[3:5]), strict=True))
        given = {"residual_dtype": mix[2]} if mix[2] else {}
        found = {name: dtype for name, dtype in dtypes.items() if name in keep and dtype}
        return Case(shape, n, found, mix[5], {**given, **more.pop("options", {})}, **more)

    def listed(level: str) -> Iterator[Case]:
        full = level == "full"
        uniform, narrow, stream = _MIXES[0], _MIXES[1], _MIXES[3]
        yield from (
            case(shape, n, mix, options={"dropout_p": 0.25} if mix is stream else {})
            for shape, n in _SHAPES + (_FULL_SHAPES if full else ())
            for mix in (uniform, narrow, stream)
        )
        yield from (
            case(shape, n, stream, options={"post_norm": True}) for shape, n in _SHAPES + (_FULL_SHAPES if full else ())
        )
        mixes = [
            (x, r, o, w, w, y) for x in (_32, _16, _B) for r in (_32, _16, _B) for o in (None, _32, _16, _B)
            for w in (_32, x) for y in (None, _32, _16, _B)
        ] if full else []  # fmt: skip
        yield from (
            case((33, 136), 1, mix, options=option)
            for mix in (*_MIXES, *mixes)
            for option in ({}, {"dropout_p": 0.5}, {"dropout_p": 0.5, "post_norm": True})
        )
        yield from (
            case((9, 768), 1, mix, layout=layout, options=option)
            for layout in LAYOUTS
            for mix, option in (
                (uniform, {"dropout_p": 0.1}),
                (narrow, {"dropout_p": 0.1}),
                (stream, {"post_norm": True}),
            )
            if layout != "contiguous"
        )
        yield from (
            case((6, 512), 1, mix, values=values, options=option)
            for values in VALUES
            for mix, option in ((uniform, {}), (stream, {}), (stream, {"post_norm": True}))
            if values != "normal"
        )
        yield from (case((9, 768), 1, stream, options=option) for option in ({"dropout_p": 1.0}, *options))
        yield from (case((9, 768), 1, stream, keep=(*names[:2], *extra)) for extra in ((), *((n,) for n in names[2:])))

    return lambda level: iter({found.id: found for found in listed(level)}.values())


def _condition(centred: bool) -> Callable[[Sample, Pair], dict[str, Tensor]]:
    of_norm = norm_condition(centred)

    def condition(sample: Sample, grads: Pair) -> dict[str, Tensor]:
        """Sizes of what is summed: by the add, by the norm of the rounded sum, and by both gradients of that."""
        args, (dy, dsum) = sample.kwargs, grads
        dims = len(sizes(args["normalized_shape"]))
        factor, p = torch.ones((), dtype=dy.dtype, device=dy.device), args.get("dropout_p", 0.0)
        if args.get("seed") is not None:
            factor = dropout_factor(args["seed"], p, dy.shape, dims, dy.dtype)
        of_total = replace(sample, kwargs={**args, "input": args["rounded"]})
        if args.get("post_norm"):  # both gradients are the norm's
            found = of_norm(of_total, dy + dsum)
            both, residual_out = found["input"], found["output"]
        else:
            found = of_norm(of_total, dy)
            both = found["input"] + dsum.abs()
            residual_out = args["residual"].abs() + args["input"].abs() * factor + torch.finfo(sample.arithmetic).tiny
        return {
            **found,
            "residual_out": residual_out,
            "residual": both,
            "input": torch.where(both.isinf(), both, both * factor),  # 0·inf is no bound either
        }

    return condition


def _terms(case: Case) -> dict[str, int]:
    hidden = math.prod(norm_parameter_shape(case))
    rows = math.prod(case.shape) // max(hidden, 1)
    across = dict.fromkeys(("output", "input", "residual"), hidden)
    of_residual_out = hidden if case.options.get("post_norm") else 2
    return {**across, "residual_out": of_residual_out, "weight": rows * hidden, "bias": rows}


def _pinned(function: Callable[..., Pair], kwargs: Mapping[str, Any], results: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sum as it was rounded; a post-norm call shows it only in its like without ``post_norm``."""
    if not kwargs.get("post_norm"):
        return {"rounded": results["residual_out"]}
    with torch.no_grad():
        return {"rounded": function(**{**kwargs, "post_norm": False})[1]}


def _bytes_moved(sample: Sample, direction: str) -> int:
    """Count input, residual, sum and output forward; sum, dy, dsum and the summands' gradients backward.

    Those are one tensor where neither dropout nor a dtype tells them apart. The call is one whose backward may follow,
    as in a benchmark: a post-norm call then stores the sum as well, which it does not where no gradient is wanted.
    """
    x, residual = sample.kwargs["input"], sample.kwargs["residual"]
    out = (sample.kwargs.get("out_dtype") or x.dtype).itemsize
    total = (sample.kwargs.get("residual_dtype") or residual.dtype).itemsize
    if direction == "fwd":
        stored = 2 * total if sample.kwargs.get("post_norm") else total
        return int(x.numel() * (x.itemsize + residual.itemsize + stored + out))
    one = x.dtype is residual.dtype and not sample.kwargs.get("dropout_p")
    return int(x.numel() * (2 * total + out + residual.itemsize + (0 if one else x.itemsize)))


def _draw_options(
    of_norm: Callable[[Random, Mapping[str, torch.dtype]], dict[str, Any]],
) -> Callable[[Random, Mapping[str, torch.dtype]], dict[str, Any]]:
    def draw(random: Random, dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
        options = of_norm(random, dtypes)
        if random.random() < 0.5:
            options["dropout_p"] = random.choice((0.1, 0.5, 1.0, random.random()))
        if random.random() < 0.5 and dtypes["residual"] is not _64:
            options["residual_dtype"] = random.choice((_32, _16, _B))
        if random.random() < 0.3:
            options["post_norm"] = True
        return options

    return draw


def _defaults(kwargs: Any) -> dict[str, Any]:
    seed = draw_seed(kwargs.get("dropout_p", 0.0), kwargs["input"])
    return {} if seed is None else {"seed": seed}


def _rms_defaults(kwargs: Any) -> dict[str, Any]:
    eps = {"eps": default_eps(kwargs["input"].dtype)} if kwargs.get("eps") is None else {}
    return {**_defaults(kwargs), **eps}


registry.register(
    OpSpec(
        name="add_layer_norm",
        family="norm",
        function=add_layer_norm,
        reference=add_layer_norm_reference,
        wrap=_wrap(centred=True),
        describe=_describe_add_layer_norm,
        grads=("input", "residual", "weight", "bias"),
        like_input=("residual",),
        outputs=("output", "residual_out"),
        pinned=_pinned,
        parameter_shape=norm_parameter_shape,
        cases=_cases(("input", "residual", "weight", "bias"), ({"eps": 1e-12}, {"dropout_p": 1e-3})),
        condition=_condition(centred=True),
        terms=_terms,
        bytes_moved=_bytes_moved,
        tolerance_overrides=LAYER_NORM_OVERRIDES,
        draw_options=_draw_options(draw_norm_options((1e-5, 1e-12, 0.0))),
        defaults=_defaults,
    )
)
registry.register(
    OpSpec(
        name="add_rms_norm",
        family="norm",
        function=add_rms_norm,
        reference=add_rms_norm_reference,
        wrap=_wrap(centred=False),
        describe=_describe_add_rms_norm,
        grads=("input", "residual", "weight"),
        like_input=("residual",),
        outputs=("output", "residual_out"),
        pinned=_pinned,
        parameter_shape=norm_parameter_shape,
        cases=_cases(("input", "residual", "weight"), ({"eps": 1e-12}, {"weight_offset": 1.0, "dropout_p": 0.5})),
        condition=_condition(centred=False),
        terms=_terms,
        bytes_moved=_bytes_moved,
        tolerance_overrides=RMS_OVERRIDES,
        draw_options=_draw_options(draw_norm_options((None, 1e-6, 1e-12, 0.0), offset=True)),
        defaults=_rms_defaults,
    )
)
