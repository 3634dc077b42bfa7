"""Many drawn cases, cell by cell, each named so that it can be made again.

A case depends on its name alone: the cell, the sweep's seed, its number, and ``/large`` where it is. Six of ten are
irregular in memory, one of ten runs forward alone, and on a GPU one of ten is large. Cases of a backend that compiles a
kernel for each kind of call are drawn around a few variants a cell, each kept to one process.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from .. import backends
from .._files import write_text
from ..registry import OPS, OPTIMS, OpSpec, OptimSpec
from . import draw, optimizers
from . import run as runs
from .run import Found

VARIANTS = 8  # of a cell, for backends that compile
_COMPILED = (("triton", "cuda"),)
_INTERPRETED = (("triton", "cpu"),)
_SIZES = {"cuda": draw.Size(elements=2**20, rows=2**18)}
_CPU, _TINY = draw.Size(elements=2**17, rows=2**17), draw.Size(elements=2**11, rows=8, width=2**13)
_MESSAGES = 5  # failures of a cell that are told in full
_FORM = "op/backend/dtypes/seed/number[/large]"
_NAME = re.compile(r"([^/]+/[^/]+/[^/]+)/(-?\d+)/(\d+)(/large)?")
_SAVED = 15.0  # seconds between two states of the results, which is what a killed sweep leaves


@dataclass(frozen=True)
class Target:
    """A cell and how its cases are made.

    Attributes:
        cell: of an op or an optimizer.
        device: where its cases run.
        size: how large they are.
        large_every: one of so many cases is large; 0: none.
    """

    cell: draw.Cell | optimizers.OptimCell
    device: str
    size: draw.Size
    large_every: int

    def name(self, seed: int, number: int) -> str:
        """Return the name of a case of this sweep."""
        large = self.large_every > 0 and _turn(number, self.large_every) == self.large_every - 1
        return f"{self.cell.name}/{seed}/{number}" + ("/large" if large else "")

    def attempt(self, name: str) -> Found | None:
        """Make, run and judge the case of a name; None where the draw could not be judged."""
        case, seed, number, large = _parse(name)
        random = Random(case)
        irregular = (number + number // 10) % 5 < 3
        if isinstance(self.cell, optimizers.OptimCell):
            return optimizers.run(random, self.cell, self.device, self.size.elements, irregular, large)
        compiled = (self.cell.backend, torch.device(self.device).type) in _COMPILED
        source = Random(f"{self.cell.name}/{seed}/{irregular}/{number % VARIANTS}") if compiled else random
        variant = draw.draw_variant(source, self.cell, self.device, self.size, irregular)
        if variant is None:
            return None
        drawn = draw.draw(random, self.cell, variant, self.device, self.size, large=large)
        if _turn(number, 10) == 4:
            drawn = draw.Drawn(drawn.case, (), drawn.seed)
        return runs.run(self.cell, drawn, self.device)


def _turn(number: int, every: int) -> int:
    """Count to ``every`` so that each shard of each cell, which has every eighth number, comes by all counts."""
    return (number // VARIANTS + number % VARIANTS) % every


def _parse(name: str) -> tuple[str, int, int, bool]:
    """Split a case's name: what its numbers are drawn from, seed, number, whether it is large."""
    match = _NAME.fullmatch(name.rstrip("/"))
    if match is None:
        raise ValueError(f"case: expected {_FORM}, got {name!r}")
    return name.rstrip("/").removesuffix("/large"), int(match[2]), int(match[3]), match[4] is not None


@dataclass
class Tally:
    """What was tried in a cell.

    Attributes:
        cell: its name.
        share: cases that are this shard's.
        forward: cases whose output was judged; of an optimizer, its steps' runs.
        backward: cases whose gradients were judged.
        irregular: cases with a tensor that was not contiguous or not at a multiple of 16 bytes.
        large: cases with an input of at least 16 MiB.
        worst: largest error over its bound.
        failures: names of the cases that failed.
    """

    cell: str
    share: int = 0
    forward: int = 0
    backward: int = 0
    irregular: int = 0
    large: int = 0
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, found: Found) -> None:
        """Count a case."""
        self.forward += 1
        self.backward += found.backward
        self.irregular += found.irregular
        self.large += found.large
        self.worst = max(self.worst, found.ratio)


def targets(
    device: str,
    names: Iterable[str] | None = None,
    chosen: Sequence[str] | None = None,
    specs: Mapping[str, OpSpec | OptimSpec] | None = None,
    large_every: int | None = None,
) -> list[Target]:
    """List every cell that can be served on a device.

    Args:
        device: where the cases will run.
        names: ops and optimizers; None: all.
        chosen: backends; None: all that run there.
        specs: the records; None: those of the registry.
        large_every: one of so many cases is large; None: 10 on a GPU, 100 on a CPU.
    """
    specs = {**OPS, **OPTIMS} if specs is None else specs
    kind = torch.device(device).type
    running = [name for name, reason in backends.backends(kind).items() if reason is None]
    found = []
    for spec, backend in itertools.product(specs.values(), running):
        if (names is not None and spec.name not in names) or (chosen is not None and backend not in chosen):
            continue
        interpreted = (backend, kind) in _INTERPRETED
        size = _TINY if interpreted else _SIZES.get(kind, _CPU)
        every = 0 if interpreted else large_every if large_every is not None else 10 if kind == "cuda" else 100
        for cell in _cells(spec, backend, device, size):
            found.append(Target(cell, device, size, every))
    return found


def _cells(
    spec: OpSpec | OptimSpec, backend: str, device: str, size: draw.Size
) -> Iterator[draw.Cell | optimizers.OptimCell]:
    if isinstance(spec, OptimSpec):
        mixes = (optimizers.OptimCell(spec, backend, *mix) for mix in optimizers.MIXES)
        yield from (cell for cell in mixes if cell.refused(device) is None)
    else:
        for cell in (draw.Cell(spec, backend, *mix) for mix in draw.MIXES):
            if not cell.converts and cell.input is not cell.output:
                continue
            if draw.draw_variant(Random(0), cell, device, size, irregular=False):
                yield cell


def find(name: str, device: str) -> Target:
    """Return the target of a case's name.

    Raises:
        ValueError: no case of that name can run on the device.
    """
    cell = _parse(name)[0].rsplit("/", 2)[0]
    for target in targets(device, [cell.partition("/")[0]]):
        if target.cell.name == cell:
            return target
    raise ValueError(f"case: expected {_FORM} of a cell that runs on {device}, got {name!r}")


@dataclass
class Sweep:
    """The results of a sweep or of one shard of it."""

    tallies: dict[str, Tally]
    messages: list[str] = field(default_factory=list)
    complete: bool = False
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """How many cases were judged."""
        return sum(tally.forward for tally in self.tallies.values())

    @property
    def failures(self) -> list[str]:
        """The names of all cases that failed."""
        return [name for tally in self.tallies.values() for name in tally.failures]

    @property
    def short(self) -> list[str]:
        """The names of cells with fewer cases than they should have, with both numbers."""
        lacking = [tally for tally in self.tallies.values() if tally.forward < tally.share]
        return [f"{tally.cell} ({tally.forward} of {tally.share})" for tally in lacking]

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write one line for the run and one for each cell."""
        run = {"kind": "run", **facts, "cases": self.cases, "complete": self.complete, "seconds": round(self.seconds)}
        lines = [run, *({"kind": "cell", **asdict(tally)} for tally in self.tallies.values() if tally.share)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def sweep(
    cells: Sequence[Target],
    seed: int,
    per_cell: int,
    *,
    shard: tuple[int, int] = (0, 1),
    seconds: float = math.inf,
    until_failure: bool = False,
    save: Callable[[Sweep], None] | None = None,
) -> Sweep:
    """Run so many cases of each cell, all cells in turn.

    A draw that could not be judged is made up for by further numbers, within twice as many as there should be and 64.

    Args:
        cells: from ``targets``.
        seed: another seed, other cases.
        per_cell: cases of each cell, over all shards.
        shard: (i, n): this process runs the i-th of n parts.
        seconds: stop by then.
        until_failure: stop at the first case that fails.
        save: called with the results now and then and at the end, so that a sweep that is killed leaves some.
    """
    begun = saved = time.monotonic()
    result = Sweep({target.cell.name: Tally(target.cell.name) for target in cells})
    for _, target in _mine(cells, per_cell, shard):
        result.tallies[target.cell.name].share += 1
    for number, target in _mine(cells, 2 * per_cell + 8 * VARIANTS, shard):
        tally = result.tallies[target.cell.name]
        if number >= per_cell and tally.forward >= tally.share:
            continue
        result.seconds = time.monotonic() - begun
        if result.seconds > seconds:
            break
        if save is not None and begun + result.seconds > saved + _SAVED:
            saved = begun + result.seconds
            save(result)
        if not _count(result, target, seed, number) or (until_failure and result.failures):
            break
    else:
        result.complete = True
    result.seconds = time.monotonic() - begun
    if save is not None:
        save(result)
    return result


def _mine(cells: Sequence[Target], per_cell: int, shard: tuple[int, int]) -> Iterator[tuple[int, Target]]:
    """Yield the numbers and cells of a shard: of each cell every eighth number, so a kernel is compiled once."""
    part, parts = shard
    for number in range(per_cell):
        for place, target in enumerate(cells):
            if (place * VARIANTS + number % VARIANTS) % parts == part:
                yield number, target


def _count(result: Sweep, target: Target, seed: int, number: int) -> bool:
    """Try a case; return whether the device can go on."""
    name, tally, alive = target.name(seed, number), result.tallies[target.cell.name], True
    problem: str | None
    try:
        found = target.attempt(name)
        if found is None:
            return True
        tally.add(found)
        problem = found.problem
    except Exception as error:  # a crash is a failure, and the others are still worth knowing
        problem = f"{type(error).__name__}: {error}"
        alive = "CUDA error" not in problem  # which no later call of this process survives
    if problem is not None:
        tally.failures.append(name)
        if len(tally.failures) <= _MESSAGES:
            again = f"fusedops parity --case {name} --device {torch.device(target.device).type}"
            result.messages.append(f"{again}\n  {problem}")
    return alive
