"""What is tested of cross-entropy, how exact it has to be, and the bytes it moves: the parts of its record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..registry import VALUES, Case, Sample
from .cross_entropy_reference import class_dim, cross_entropy_reference

_32, _16, _B, _64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
_SHAPES = (
    (3, 1), (5, 2), (9, 7), (33, 64), (9, 257), (5, 1023), (4, 1024), (3, 4104), (2, 8192), (2, 12291), (7,), (0, 16),
    (3, 0), (2, 5, 7), (3, 33, 2, 3), (2, 3, 0), (300, 10),
)  # fmt: skip
_FULL_SHAPES = (
    (65537, 8), (70000, 2, 3), (300, 1000), (64, 12288), (5, 50257), (3, 65536), (2, 128256), (2, 262144),
    (1, 1 << 20), (37, 16384), (4, 21, 65, 65),
)  # fmt: skip
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"reduction": "none"}, {"reduction": "sum"}, {"ignore_index": 2}, {"label_smoothing": 0.1},
    {"label_smoothing": 1.0}, {"z_loss": 1e-3}, {"softcap": 3.0}, {"reduction": "none", "z_loss": 0.1, "softcap": 30.0},
    {"reduction": "sum", "label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 5.0},
    {"inplace_backward": False, "reduction": "none", "label_smoothing": 0.1},
)  # fmt: skip
# An expanded gradient, and one that is a slice, are those of a loss per row.
_INPUT_LAYOUTS = ("rows_strided", "transposed", "misaligned")
_GRAD_LAYOUTS = ("expanded_grad", "strided_grad")
SIZES = ((16384, 50257), (8192, 128256))


def cases(level: str) -> Iterator[Case]:
    """Yield the cases of a level, each once."""
    return iter({case.id: case for case in _listed(level == "full")}.values())


def _listed(full: bool) -> Iterator[Case]:
    def case(shape: tuple[int, ...], dtype: torch.dtype, weight: torch.dtype | None = None, **more: Any) -> Case:
        return Case(shape, 1, {"input": dtype, **({} if weight is None else {"weight": weight})}, **more)

    yield from (case(s, dtype) for s in _SHAPES + (_FULL_SHAPES if full else ()) for dtype in (_32, _B))
    yield from (case((33, 136), dtype) for dtype in (_32, _16, _B, _64))
    for options in _OPTIONS:
        yield from (case((9, 771), dtype, options=options) for dtype in (_32, _B, _64))
        yield from (case((9, 771), _B, weight, options=options) for weight in (_32, _B))
        yield case((3, 33, 5), _16, _16, options=options)
    yield from (case((9, 768), dtype, layout=layout) for layout in _INPUT_LAYOUTS for dtype in (_32, _B))
    yield from (case((9, 1001), _B, layout=layout) for layout in _INPUT_LAYOUTS)
    yield from (
        case((9, 768), dtype, layout=layout, options={"reduction": "none"})
        for layout in (*_GRAD_LAYOUTS, "misaligned")
        for dtype in (_32, _B)
    )
    yield from (
        case((6, 512), dtype, values=values, options={"reduction": reduction})
        for values in VALUES
        for dtype in (_32, _16, _B)
        for reduction in ("mean", "none")
        if values != "normal"
    )


def constants(input: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes: all of them by turns, every fifth row ignored but never the first."""
    dim, ignored = class_dim(input), options.get("ignore_index", -100)
    classes = input.shape[dim]
    shape = (*input.shape[:dim], *input.shape[dim + 1 :])
    index = torch.arange(math.prod(shape), device=input.device)
    if classes == 0:
        return {"target": torch.full_like(index, ignored).reshape(shape)}
    return {"target": torch.where(index % 5 == 4, ignored, index * 7919 % classes).reshape(shape)}


def draw_options(random: Random, dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Draw the options of a fuzzed call, as an ``OpSpec`` has it."""
    options: dict[str, Any] = {"reduction": random.choice(("none", "sum", "mean"))}
    if random.random() < 0.4:
        options["label_smoothing"] = random.choice((1.0, 0.1, random.random()))
    if random.random() < 0.4:
        options["z_loss"] = 10 ** random.uniform(-6, 0)
    if random.random() < 0.4:
        options["softcap"] = 10 ** random.uniform(-1, 3)
    if random.random() < 0.3:
        options["ignore_index"] = random.choice((0, 1, -1, 255))
    return options


def condition(sample: Sample, dloss: Tensor) -> dict[str, Tensor]:
    """Sizes of what is added up, from the float64 sample.

    With m the row's largest logit, s the sum of the exponentials of z - m, and lse = m + ln s: a loss is w·(ln s + m -
    z_target), each of which counts with its size, and s, whose relative error is ln s's absolute one, with 1. A capped
    logit is off by units of itself, so there z and m count as well. Label smoothing adds up all of the row's z; the
    square of lse counts twice its own error.

    The softmax p = exp(z - m - ln s) is off by p times what its exponent is off by, which counts with its parts' sizes.
    A gradient is g·(a·p - b), a and b being what weights, smoothing and the square of lse make of them; a cap
    multiplies it by 1 - tanh², which is off by units of tanh². Below the smallest normal number errors are absolute.

    A mean is divided by the sum of weights, which may cancel.
    """
    args = sample.kwargs
    x, target, weight = args["input"], args["target"], args.get("weight")
    dim, ignored, cap = class_dim(x), args.get("ignore_index", -100), args.get("softcap")
    smooth, z_loss, reduction = args.get("label_smoothing", 0.0), args.get("z_loss", 0.0), args.get("reduction", "mean")
    classes = x.shape[dim]
    if x.numel() == 0:
        nothing = x.new_zeros(target.shape if reduction == "none" else ())
        return {"output": nothing, "input": torch.zeros_like(x)}
    rows = x.movedim(dim, -1)
    slope = torch.tanh(rows / cap).square() if cap else torch.zeros_like(rows)
    z = cap * torch.tanh(rows / cap) if cap else rows
    kept = target != ignored
    at = torch.where(kept, target, 0)
    w = x.new_ones(classes) if weight is None else weight
    w_row = torch.where(kept, w[at], 0.0)
    largest = z.amax(-1)
    lse = torch.logsumexp(z, -1)
    z_at = z.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    capped = z_at.abs() + largest.abs() if cap else 0.0
    share = smooth / classes
    loss = (1 - smooth) * w_row.abs() * (1 + (lse - largest).abs() + (largest - z_at).abs() + capped)
    if smooth:
        loss = loss + share * (w.abs() * (1 + z.abs() + lse.abs().unsqueeze(-1))).sum(-1)
    loss = loss + 2 * z_loss * lse.abs() * (1 + lse.abs())
    loss = torch.where(kept, loss, 0.0)
    total, weights = w_row.sum(), w_row.abs().sum()
    g = dloss.abs() / total.abs() * (weights / total.abs()) if reduction == "mean" else dloss.abs()

    p = torch.exp(z - lse.unsqueeze(-1))
    parts = 1 + (largest.unsqueeze(-1) - z).abs() + (lse - largest).abs().unsqueeze(-1)
    parts = parts + z.abs() + largest.abs().unsqueeze(-1) if cap else parts
    amplified = torch.where(p > 0, p * parts, p)
    a = (1 - smooth) * w_row.abs() + share * w.abs().sum() + 2 * z_loss * lse.abs()
    tiny = torch.finfo(sample.arithmetic).tiny
    dz = a.unsqueeze(-1) * (amplified + tiny) + 2 * z_loss * (1 + lse.abs()).unsqueeze(-1) * p + share * w.abs()
    dz = dz.scatter_add(-1, at.unsqueeze(-1), ((1 - smooth) * w_row.abs()).unsqueeze(-1))
    dz = torch.where(kept.unsqueeze(-1), dz * (1 + slope) * g.unsqueeze(-1), 0.0)

    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = (loss.sum() + cross_entropy_reference(**args).abs() * weights) / total.abs()
    return {"output": loss, "input": dz.movedim(-1, dim)}


def terms(case: Case) -> dict[str, int]:
    """Count terms: a loss adds up a row, its reduction all of them; the gradient of a mean has their weights' sum."""
    return {"output": math.prod(case.shape), "input": math.prod(case.shape)}


def bytes_moved(sample: Sample, direction: str) -> int:
    """Count the logits forward, logits and gradient backward; what there is one of per row is noise beside them."""
    logits: int = sample.kwargs["input"].nbytes
    return logits if direction == "fwd" else 2 * logits


def parameter_shape(case: Case) -> tuple[int, ...]:
    """Return the shape of the weight: one for each class."""
    return (case.shape[min(1, len(case.shape) - 1)],)
