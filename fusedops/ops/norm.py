"""LayerNorm and RMSNorm over the last dimensions.

The public functions check their arguments, let ``amp`` pick the output dtype and hand over to the backend that
``dispatch`` chooses. The references below are the truth, in plain PyTorch.

Source: Ba, Kiros, Hinton, "Layer Normalization" (2016); Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import amp, registry
from .._options import epsilon
from ..config import CONFIG
from ..dispatch import Call
from ..registry import LAYOUTS, VALUES, Case, OpSpec, Sample
from ._common import (
    FLOATS,
    check_dense,
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


# ---------------------------------------------------------------- references: plain PyTorch


def layer_norm_reference(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``layer_norm`` in plain PyTorch, in fp32 (fp64 for fp64), differentiable any number of times.

    Not on a CPU: PyTorch's own LayerNorm, which is fast there, has wrong third derivatives.
    """
    acc, hidden = wide(input.dtype), math.prod(normalized_shape)
    # Over one dimension: with several and many rows, PyTorch 2.11's dweight has the wrong shape on CUDA.
    x = input.to(acc).reshape(*input.shape[: input.dim() - len(normalized_shape)], hidden)
    w, b = (None if t is None else t.to(acc).reshape(hidden) for t in (weight, bias))
    own = CONFIG.disabled or not input.is_cuda  # see _standardize
    drifts = acc is torch.float64 and not CONFIG.disabled  # its sums over rows on a CPU; these are the truth
    if own and not drifts and (w is not None or b is None):
        y = F.layer_norm(x, (hidden,), w, b, eps)
    else:  # PyTorch has no second derivative of a bias alone
        y = F.layer_norm(x, (hidden,), None, None, eps) if own else _standardize(x, eps)
        y = y if w is None else y * w
        y = y if b is None else y + b
    return y.reshape(input.shape).to(out_dtype or input.dtype)


def rms_norm_reference(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None,
    weight_offset: float = 0.0, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``rms_norm`` in plain PyTorch, in fp32 (fp64 for fp64), differentiable any number of times."""
    acc = wide(input.dtype)
    eps = default_eps(input.dtype) if eps is None else eps
    if input.is_cuda and not CONFIG.disabled:  # see _standardize
        y = _over_root_mean_square(input.to(acc), list(range(-len(normalized_shape), 0)), eps)
    else:
        y = torch.rms_norm(input.to(acc), list(normalized_shape), None, eps)  # F's can't be compiled on a subclass
    return (y if weight is None else y * (weight.to(acc) + weight_offset)).to(out_dtype or input.dtype)


def _standardize(x: Tensor, eps: float) -> Tensor:
    """Return rows of mean 0 and variance 1, with the corrected two-pass variance (Chan, Golub, LeVeque 1983).

    On CUDA PyTorch's own norms (2.11) can't be the truth: LayerNorm's dbias has no elements where dweight is not
    wanted, in wide rows of tiny spread its fp32 results are off by 1.5 of our bound; RMSNorm makes NaN of all of a row
    that has an inf, is off by 2.8 of the bound in dweight at 2^20 columns, and can't be compiled with symbolic sizes.
    """
    x = x - x.mean(-1, keepdim=True)
    x = x - x.mean(-1, keepdim=True)
    return _over_root_mean_square(x, [-1], eps)


def _over_root_mean_square(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps)``.

    The derivative of a rsqrt would be its cube, which fp32 can't hold where rows are of 1e15.
    """
    return x / torch.sqrt(x.square().mean(dims, keepdim=True) + eps)


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


# ---------------------------------------------------------------- autograd over a backend's pair


class _LayerNorm(torch.autograd.Function):
    """One autograd function over any backend's pair; backward is the same backend's as forward."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        y, mean, rstd = module.layer_norm_fwd(x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.module, ctx.eps, ctx.dtype, ctx.bias = module, eps, dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[1:4]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A bias enters linearly: its value does not matter to any derivative.
            bias = None if ctx.bias is None else x.new_zeros(x.shape[1], dtype=ctx.bias).requires_grad_()
            args = (x, weight, bias)
            return (
                None,
                *differentiate(
                    lambda: layer_norm_reference(x, x.shape[1:], weight, bias, ctx.eps, ctx.dtype), args, need, dy
                ),
                None,
                None,
            )
        dy = in_memory(dy if dy.stride(1) == 1 or x.shape[1] == 1 else dy.contiguous())
        return None, *ctx.module.layer_norm_bwd(dy, x, weight, mean, rstd, need, ctx.bias), None, None


class _RMSNorm(torch.autograd.Function):
    """One autograd function over any backend's pair; backward is the same backend's as forward."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        dtype: torch.dtype,
    ) -> Tensor:
        y, rstd = module.rms_norm_fwd(x, weight, eps, weight_offset, dtype)
        ctx.save_for_backward(x, weight, rstd)
        ctx.module, ctx.eps, ctx.weight_offset, ctx.dtype = module, eps, weight_offset, dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[1:3]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (
                None,
                *differentiate(
                    lambda: rms_norm_reference(x, x.shape[1:], weight, ctx.eps, ctx.weight_offset, ctx.dtype),
                    (x, weight),
                    need,
                    dy,
                ),
                None,
                None,
                None,
            )
        dy = in_memory(dy if dy.stride(1) == 1 or x.shape[1] == 1 else dy.contiguous())
        return None, *ctx.module.rms_norm_bwd(dy, x, weight, rstd, ctx.weight_offset, need), None, None, None


def _wrap_layer_norm(module: ModuleType) -> Callable[..., Tensor]:
    """Make a whole op of a backend's ``layer_norm_fwd`` and ``layer_norm_bwd``."""

    def run(
        input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        hidden = math.prod(shape)
        flat = [None if p is None else flat_parameter(p, hidden) for p in (weight, bias)]
        y: Tensor = _LayerNorm.apply(module, rows_of(input, hidden), *flat, eps, dtype)
        return y.view(input.shape)

    return run


def _wrap_rms_norm(module: ModuleType) -> Callable[..., Tensor]:
    """Make a whole op of a backend's ``rms_norm_fwd`` and ``rms_norm_bwd``."""

    def run(
        input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float, weight_offset: float, dtype: torch.dtype
    ) -> Tensor:
        hidden = math.prod(shape)
        flat = None if weight is None else flat_parameter(weight, hidden)
        y: Tensor = _RMSNorm.apply(module, rows_of(input, hidden), flat, eps, weight_offset, dtype)
        return y.view(input.shape)

    return run


# ---------------------------------------------------------------- records

_32, _16, _B, _64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# (input, weight, bias) → output: uniform dtypes, what amp gives, and a few that meet in real models.
_MIXES: tuple[tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None], ...] = (
    (_32, _32, _32, None), (_B, _B, _B, None), (_16, _16, _16, None), (_B, _32, _32, None), (_16, _32, _32, None),
    (_B, _32, _32, _32), (_32, _B, _B, _B), (_16, _B, _32, _32), (_64, _64, _64, None),
)  # fmt: skip
_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3, 1), 1), ((4, 7), 1), ((2, 3, 64), 1), ((5, 257), 1), ((9, 768), 1), ((33, 1024), 1), ((4, 1023), 1),
    ((9, 2056), 1), ((3, 5120), 1), ((2, 8200), 1), ((2, 12288), 1), ((2, 3, 4, 16), 2), ((7,), 1), ((0, 16), 1),
)  # fmt: skip
_FULL_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((65537, 8), 1), ((70000, 2, 8), 2), ((1, 65536), 1), ((2, 65537), 1), ((1, 1 << 20), 1), ((300, 3072), 1),
    ((1000, 768), 1), ((64, 12288), 1), ((37, 16384), 1), ((5, 50257), 1),
)  # fmt: skip


def _cases(names: tuple[str, ...], options: tuple[dict[str, Any], ...]) -> Callable[[str], Iterator[Case]]:
    def cases(level: str) -> Iterator[Case]:
        return iter({case.id: case for case in listed(level)}.values())

    def listed(level: str) -> Iterator[Case]:
        full = level == "full"

        def case(
            shape: tuple[int, ...],
            n: int,
            mix: tuple[torch.dtype | None, ...],
            keep: Sequence[str] = names,
            **more: Any,
        ) -> Case:
            dtypes = {name: dtype for name, dtype in zip(names, mix, strict=False) if name in keep and dtype}
            return Case(shape, n, dtypes, mix[-1], **more)

        amp_mix, base = _MIXES[3], ((9, 768), 1)
        mixes = [(*m, o) for m in product((_32, _16, _B), repeat=3) for o in (None, _32, _16, _B)] if full else []
        yield from (
            case(shape, n, mix)
            for shape, n in _SHAPES + (_FULL_SHAPES if full else ())
            for mix in (_MIXES[0], amp_mix, _MIXES[1])
        )
        yield from (case((33, 136), 1, mix) for mix in (*_MIXES, *mixes))
        yield from (
            case(*base, mix, layout=layout)
            for layout in LAYOUTS
            for mix in (_MIXES[0], _MIXES[1])
            if layout != "contiguous"
        )
        yield from (
            case((6, 512), 1, mix, values=values)
            for values in VALUES
            for mix in (_MIXES[0], amp_mix)
            if values != "normal"
        )
        yield from (case(*base, amp_mix, options=option) for option in options)
        yield from (
            case(*base, amp_mix, keep=keep)
            for keep in [names[:1], *((names[0], name) for name in names[1:] if len(names) > 2)]
        )

    return cases


def draw_norm_options(
    eps: tuple[float | None, ...], offset: bool = False
) -> Callable[[Random, Mapping[str, torch.dtype]], dict[str, Any]]:
    """Return how options of a fuzzed norm are drawn, as an ``OpSpec`` has it."""

    def draw(random: Random, dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
        options = {"eps": random.choice((*eps, 10 ** random.uniform(-12, 0)))}
        if offset and "weight" in dtypes and random.random() < 0.5:
            options["weight_offset"] = random.choice((1.0, -0.5))
        return options

    return draw


_ANY_NUMBER = 1e200  # a condition beyond all results, and still finite when added up over rows


def norm_condition(centred: bool) -> Callable[[Sample, Tensor], dict[str, Tensor]]:
    """Return the condition numbers of a norm, as an ``OpSpec`` has them."""

    def condition(sample: Sample, dy: Tensor) -> dict[str, Tensor]:
        """Sizes of what is summed.

        The mean of x is off by u·mean|x|, so each x̂ by u·``shift``, shift = mean|x|·rstd; below the smallest normal
        number errors are absolute, u·tiny. The variance is then off by the square of that, and by u·tiny itself:
        rstd by u·``lost``. dx and dweight inherit both through x̂ and rstd.

        Where that is no longer small beside the variance itself (a row of equal numbers), rstd may be anything up to
        1/√eps, and x̂ up to ``reach``: results are as good as any other of their size. Without an eps that the
        arithmetic can hold there is no such size: rstd may be inf, what comes of it anything, and the condition is inf.
        Where squares add up to more than the arithmetic holds, rstd is 0 and any number passes, but not NaN. A row with
        inf or NaN has a NaN here, and keeps it.
        """
        args = sample.kwargs
        shape = sizes(args["normalized_shape"])
        dims, x = tuple(range(-len(shape), 0)), args["input"]
        hidden, weight, bias = math.prod(shape), args.get("weight"), args.get("bias")
        w = (torch.ones((), dtype=x.dtype, device=x.device) if weight is None else weight) + args.get(
            "weight_offset", 0.0
        )
        arithmetic = torch.finfo(sample.arithmetic)
        eps, tiny, unit = args.get("eps", 1e-5), arithmetic.tiny, arithmetic.eps / 2
        centre = x - x.mean(dims, keepdim=True) if centred else x
        square = centre.square().mean(dims, keepdim=True)
        rstd = (square + eps).rsqrt()
        xhat, wdy = (centre * rstd).abs(), (w * dy).abs()
        size = (x.abs().mean(dims, keepdim=True) if centred else 0.0) + tiny
        shift = size * rstd
        lost = unit * shift.square() + tiny * rstd.square()
        y = w.abs() * ((x.abs().amax(dims, keepdim=True) + tiny) * rstd + xhat * (1 + tiny * rstd.square()))
        dx = wdy + wdy.mean(dims, keepdim=True) + xhat * (wdy * (xhat + shift)).mean(dims, keepdim=True)
        dx = rstd * (1 + lost) * (dx + shift * (wdy * xhat).mean(dims, keepdim=True))
        dweight = dy.abs() * (xhat + shift) * (1 + lost)

        gone = lost * unit > 2.0**-5
        if gone.any():
            most = eps**-0.5 if eps >= tiny else math.inf
            reach = most * (centre.abs() + 4 * unit * math.sqrt(math.log2(max(hidden, 2))) * size)
            y = torch.where(gone, w.abs() * reach / unit, y)
            any_dx = wdy + wdy.mean(dims, keepdim=True) + reach * (wdy * reach).mean(dims, keepdim=True)
            dx = torch.where(gone, most * any_dx / unit, dx)
            dweight = torch.where(gone, dy.abs() * reach / unit, dweight)
        beyond, boundless = (square * hidden > arithmetic.max) & square.isfinite(), gone & (eps < tiny)
        y, dx, dweight = (
            torch.where(boundless, math.inf, torch.where(beyond, _ANY_NUMBER, t)) for t in (y, dx, dweight)
        )
        rows = tuple(range(x.dim() - len(shape)))
        return {
            "output": y if bias is None else y + bias.abs(),
            "input": dx,
            "weight": dweight.sum(rows) if rows else dweight,
            "bias": dy.abs().sum(rows) if rows else dy.abs(),
        }

    return condition


def norm_terms(case: Case) -> dict[str, int]:
    """Count terms; dweight adds up rows of x̂, each of which already comes from sums over hidden."""
    hidden = math.prod(case.shape[len(case.shape) - case.normalized :])
    rows = math.prod(case.shape) // max(hidden, 1)
    return {"output": hidden, "input": hidden, "weight": rows * hidden, "bias": rows}


def _one_after_another(terms: int) -> float:
    """Return how far the worst error of such a sum, a rounding a term, is beyond that of a pairwise one."""
    return max(1.0, terms / (4 * math.sqrt(math.log2(max(terms, 2)))))


def _times(factor: float) -> Callable[[int], float]:
    return lambda terms: factor


Overrides = Mapping[tuple[str, str, str], tuple[Callable[[int], float], str]]
LAYER_NORM_OVERRIDES: Overrides = {
    # It shows where all rows are alike, as from an expanded gradient: 285 times the bound at 23,020 rows.
    ("reference", "cpu", "bias"): (_one_after_another, "PyTorch's LayerNorm adds rows up one after another on a CPU"),
    **{
        ("reference", "cpu", name): (
            _times(2.5),
            "PyTorch's LayerNorm makes dx of Σ dy·x that is not centred on a CPU: 1.65 times the bound in rows of four "
            "with a tiny spread, where native comes to 0.4",
        )
        for name in ("input", "residual")
    },
}
_APEX_OVERRIDES: Overrides = {
    ("apex", "cuda", name): (
        _times(8.0),
        "Welford's variance in fp32 and sums of rows one after another: up to 3.5 times the bound in fp32 rows nearly "
        "equal, 3 in equal rows of 16 bits, 5.3 in dbias of 143,118 equal rows (an H200)",
    )
    for name in ("output", "input", "weight", "bias")
}
RMS_OVERRIDES: Overrides = {
    ("reference", "cuda", name): (
        _times(1.25), "PyTorch's derivatives of the norm's parts round more often: 1.08 times the bound at width 82"
    )
    for name in ("input", "residual")
}  # fmt: skip


def _bytes_moved(sample: Sample, direction: str) -> int:
    """Count input + output forward, input + dy + dx backward; parameters and statistics are noise beside them."""
    x = sample.kwargs["input"]
    out = (sample.kwargs.get("out_dtype") or x.dtype).itemsize
    return x.numel() * (x.itemsize + out if direction == "fwd" else 2 * x.itemsize + out)


def norm_parameter_shape(case: Case) -> tuple[int, ...]:
    """Return the shape of weight and bias."""
    return case.shape[len(case.shape) - case.normalized :]


registry.register(
    OpSpec(
        name="layer_norm",
        family="norm",
        function=layer_norm,
        reference=layer_norm_reference,
        wrap=_wrap_layer_norm,
        describe=_describe_layer_norm,
        grads=("input", "weight", "bias"),
        parameter_shape=norm_parameter_shape,
        cases=_cases(("input", "weight", "bias"), ({"eps": 1e-12}, {"eps": 1e-3})),
        condition=norm_condition(centred=True),
        terms=norm_terms,
        bytes_moved=_bytes_moved,
        tolerance_overrides={**LAYER_NORM_OVERRIDES, **_APEX_OVERRIDES},
        draw_options=draw_norm_options((1e-5, 1e-12, 0.0)),
    )
)
registry.register(
    OpSpec(
        name="rms_norm",
        family="norm",
        function=rms_norm,
        reference=rms_norm_reference,
        wrap=_wrap_rms_norm,
        describe=_describe_rms_norm,
        grads=("input", "weight"),
        parameter_shape=norm_parameter_shape,
        cases=_cases(("input", "weight"), ({"eps": 1e-12}, {"weight_offset": 1.0})),
        condition=norm_condition(centred=False),
        terms=norm_terms,
        bytes_moved=_bytes_moved,
        tolerance_overrides=RMS_OVERRIDES,
        draw_options=draw_norm_options((None, 1e-6, 1e-12, 0.0), offset=True),
        defaults=lambda kwargs: {"eps": default_eps(kwargs["input"].dtype)} if kwargs.get("eps") is None else {},
    )
)
