"""Runs one drawn case of an op and judges it, on the device it ran on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import testing
from .draw import Cell, Drawn

_POOL = 1_048_573  # a prime: rows of any width start at other places of the pool


@dataclass(frozen=True)
class Found:
    """What became of a case.

    Attributes:
        backward: gradients were judged as well.
        irregular: a tensor was not contiguous or not at a multiple of 16 bytes.
        large: the input had at least 16 MiB.
        ratio: worst error over its bound; at most 1 passes.
        problem: what is wrong, or None.
    """

    backward: bool
    irregular: bool
    large: bool
    ratio: float
    problem: str | None


@functools.cache
def _pool(device: str) -> Tensor:
    """Normal numbers, the same on every device, so that a case needs no generator of its own there."""
    generator = torch.Generator().manual_seed(0)
    return testing.normal((_POOL,), generator).to(device)


def pooled(device: str) -> testing.Noise:
    """Return noise that is a stretch of one pool of numbers on ``device``, begun where the generator says."""

    def noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        count = torch.Size(shape).numel()
        start = int(torch.randint(_POOL, (1,), generator=generator, device="cpu"))
        pool = _pool(device)
        if start + count > _POOL:
            pool = pool.repeat(-(-(start + count) // _POOL))
        return pool[start : start + count].clone().view(shape)

    return noise


def run(cell: Cell, drawn: Drawn, device: str) -> Found:
    """Run a case and judge it.

    Args:
        cell: op, backend, input and output dtype.
        drawn: a case of the cell.
        device: where it runs and is judged.
    """
    case, noise = drawn.case, pooled(device)
    sample = testing.make_sample(cell.spec, case, device, drawn.seed, noise)
    kept: list[Any] = []

    def grad(output: Any) -> Any:
        kept.append(testing.make_grad(case, output, drawn.seed, noise))
        return kept[-1]

    with testing.poisoned():
        results = testing.run(
            lambda **kwargs: cell.spec.function(**kwargs, backend=cell.backend), sample, grad, drawn.wanted
        )
    if not drawn.wanted:
        outputs = tuple(results[name] for name in sample.outputs)
        grad(outputs if len(outputs) > 1 else outputs[0])
    judge = functools.partial(
        testing.judge, cell.spec, case, sample, kept[-1], results, backend=cell.backend, seed=drawn.seed, on=device
    )
    outcome = judge(beside=False)
    outcome = outcome if outcome.passed else judge(beside=True)
    tensors = [*(sample.kwargs[name] for name in sample.grads), *testing.outputs_of(kept[-1])]
    return Found(
        backward=bool(drawn.wanted),
        irregular=any(not t.is_contiguous() or t.data_ptr() % 16 for t in tensors),
        large=tensors[0].nbytes >= 2**24,
        ratio=max(c.ratio for c in outcome.comparisons),
        problem=None if outcome.passed else str(outcome),
    )
