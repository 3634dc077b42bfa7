"""What is tested of an add + norm, how exact it has to be, and the bytes it moves: the parts of its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..registry import LAYOUTS, VALUES, Case, Sample
from . import norm_record
from ._common import sizes
from .add_norm_reference import Pair
from .dropout import draw_seed, dropout_factor

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


def cases(names: tuple[str, ...], options: tuple[dict[str, Any], ...]) -> Callable[[str], Iterator[Case]]:
    """Return the cases of an add + norm by level, each once; see ``norm_record.cases``."""

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


def condition(centred: bool) -> Callable[[Sample, Pair], dict[str, Tensor]]:
    """Return the condition numbers of an add + norm, as an ``OpSpec`` has them."""
    of_norm = norm_record.condition(centred)

    def of_sample(sample: Sample, grads: Pair) -> dict[str, Tensor]:
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

    return of_sample


def terms(case: Case) -> dict[str, int]:
    """Count terms: the norm's, and the two summands."""
    of_norm = norm_record.terms(case)
    residual_out = of_norm["output"] if case.options.get("post_norm") else 2
    return {**of_norm, "residual": of_norm["input"], "residual_out": residual_out}


def pinned(function: Callable[..., Pair], kwargs: Mapping[str, Any], results: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sum as it was rounded; a post-norm call shows it only in its like without ``post_norm``."""
    if not kwargs.get("post_norm"):
        return {"rounded": results["residual_out"]}
    with torch.no_grad():
        return {"rounded": function(**{**kwargs, "post_norm": False})[1]}


def bytes_moved(sample: Sample, direction: str) -> int:
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


def draw_options(
    eps: tuple[float | None, ...], offset: bool = False
) -> Callable[[Random, Mapping[str, torch.dtype]], dict[str, Any]]:
    """Return how options of a fuzzed add + norm are drawn; see ``norm_record.draw_options``."""
    of_norm = norm_record.draw_options(eps, offset)

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


def defaults(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seed that a call draws, where it drops anything."""
    seed = draw_seed(kwargs.get("dropout_p", 0.0), kwargs["input"])
    return {} if seed is None else {"seed": seed}


def rms_defaults(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seed, and the eps where none is given."""
    return {**defaults(kwargs), **norm_record.rms_defaults(kwargs)}
