"""What is tested of a norm, how exact it has to be, and the bytes it moves: the parts of its record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..registry import LAYOUTS, VALUES, Case, Sample
from ._common import default_eps, sizes

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


def cases(names: tuple[str, ...], options: tuple[dict[str, Any], ...]) -> Callable[[str], Iterator[Case]]:
    """Return the cases of a norm by level, each once: arguments by ``names``, and some with ``options``."""

    def unique(level: str) -> Iterator[Case]:
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
        yield from (case(shape, 1, _MIXES[-1]) for shape in ((9, 768), (600, 64)))  # fp64: a kernel's largest memory
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

    return unique


def draw_options(
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


def condition(centred: bool) -> Callable[[Sample, Tensor], dict[str, Tensor]]:
    """Return the condition numbers of a norm, as an ``OpSpec`` has them."""

    def of_sample(sample: Sample, dy: Tensor) -> dict[str, Tensor]:
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

    return of_sample


def terms(case: Case) -> dict[str, int]:
    """Count terms; dweight adds up rows of x̂, each of which already comes from sums over hidden."""
    hidden = math.prod(parameter_shape(case))
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
APEX_OVERRIDES: Overrides = {
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


def bytes_moved(sample: Sample, direction: str) -> int:
    """Count input + output forward, input + dy + dx backward; parameters and statistics are noise beside them."""
    x = sample.kwargs["input"]
    out = (sample.kwargs.get("out_dtype") or x.dtype).itemsize
    return x.numel() * (x.itemsize + out if direction == "fwd" else 2 * x.itemsize + out)


def parameter_shape(case: Case) -> tuple[int, ...]:
    """Return the shape of weight and bias."""
    return case.shape[len(case.shape) - case.normalized :]


def rms_defaults(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the eps that an RMS norm takes where none is given."""
    return {"eps": default_eps(kwargs["input"].dtype)} if kwargs.get("eps") is None else {}
