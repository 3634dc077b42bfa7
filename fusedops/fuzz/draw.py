"""Draws of a case of an op: shape, dtypes, options, numbers, and how each tensor lies in memory."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import torch

from .. import testing
from ..registry import VALUES, Case, Memory, OpSpec, short

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
# Input and output dtype of the cells; what a backend refuses is left out.
MIXES = (*((input, output) for input in _NARROW for output in _NARROW), (torch.float64, torch.float64))
_TRIES = 100


@dataclass(frozen=True)
class Size:
    """How large the cases of a cell are.

    Attributes:
        elements: most elements of an input of several rows.
        rows: most rows.
        width: most elements of a row, be that more than ``elements``.
        large: bytes an input has at least where a large one is asked for.
    """

    elements: int
    rows: int
    width: int = 2**20
    large: int = 2**24


@dataclass(frozen=True)
class Cell:
    """Where cases are counted: an op on a backend with an input and an output dtype."""

    spec: OpSpec
    backend: str
    input: torch.dtype
    output: torch.dtype

    @property
    def name(self) -> str:
        """As ``layer_norm/native/bf16-fp32``."""
        return f"{self.spec.name}/{self.backend}/{short(self.input)}-{short(self.output)}"

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The arguments of the op's function."""
        return inspect.signature(self.spec.function).parameters

    @property
    def converts(self) -> bool:
        """Whether the caller names the output's dtype."""
        return "out_dtype" in self.parameters

    @functools.cached_property
    def normalizes(self) -> bool:
        """Whether the op works over trailing dimensions that the caller names."""
        return any(case.normalized for case in self.spec.cases("quick"))


@dataclass(frozen=True)
class Variant:
    """The part of a case that a compiled kernel may be specialised on."""

    dtypes: Mapping[str, torch.dtype]
    width: int
    wanted: tuple[str, ...]
    memory: Mapping[str, Memory]


@dataclass(frozen=True)
class Drawn:
    """A case, the gradients asked for (none: forward alone), and the seed of its numbers."""

    case: Case
    wanted: tuple[str, ...]
    seed: int


def draw_variant(random: Random, cell: Cell, device: str, size: Size, irregular: bool) -> Variant | None:
    """Draw dtypes, width, wanted gradients and places in memory.

    Args:
        random: where every choice comes from.
        cell: op, backend, input and output dtype.
        device: where it will run.
        size: how large it may be.
        irregular: whether tensors are strided, shifted or expanded.

    Returns:
        A variant the backend serves, or None where none was found.
    """
    for _ in range(_TRIES):
        dtypes = _draw_dtypes(random, cell)
        wanted = tuple(name for name in dtypes if random.random() < 0.8) or ("input",)
        memory = _draw_memory(random, (*dtypes, "grad")) if irregular else {}
        variant = Variant(dtypes, min(_draw_width(random), size.width), wanted, memory)
        shape = (1, variant.width)
        case = Case(shape, int(cell.normalizes), dtypes, cell.output if cell.converts else None)
        if testing.refused(cell.spec, case, cell.backend, device) is None:
            return variant
    return None


def draw(random: Random, cell: Cell, variant: Variant, device: str, size: Size, *, large: bool = False) -> Drawn:
    """Draw the rest of a case.

    Args:
        random: where every choice comes from.
        cell: op, backend, input and output dtype.
        variant: of that cell.
        device: where it will run.
        size: how large it may be.
        large: an input of at least ``size.large`` bytes.
    """
    shape, normalized = _draw_shape(random, cell, variant.width, size, large)
    out_dtype = cell.output if cell.converts and (cell.output is not cell.input or random.random() < 0.5) else None
    options = dict(cell.spec.draw_options(random, variant.dtypes))

    def testable(values: str) -> bool:
        on = cell.backend, torch.device(device).type
        return not testing.untestable(cell.spec, variant.dtypes, out_dtype, options, values, *on)

    values = random.choice([v for v in ("normal", *VALUES) if testable(v)])
    case = Case(
        shape, normalized, variant.dtypes, out_dtype=out_dtype, options=options, values=values, memory=variant.memory
    )
    for _ in range(_TRIES):  # a variant is served with one row; a backend may refuse many
        if testing.refused(cell.spec, case, cell.backend, device) is None:
            break
        shape, normalized = _draw_shape(random, cell, variant.width, size, large=False)
        case = replace(case, shape=shape, normalized=normalized)
    return Drawn(case, variant.wanted, random.getrandbits(31))


def _draw_dtypes(random: Random, cell: Cell) -> dict[str, torch.dtype]:
    """Give arguments dtypes: often all the input's or all fp32, else each its own. Optional ones may be left out."""
    common = random.choice((cell.input, torch.float32, None))
    dtypes = {"input": cell.input}
    for name in cell.spec.grads:
        if name == "input" or (cell.parameters[name].default is None and random.random() < 0.2):
            continue
        dtypes[name] = torch.float64 if cell.input is torch.float64 else common or random.choice(_NARROW)
    return dtypes


def _draw_shape(random: Random, cell: Cell, width: int, size: Size, large: bool) -> tuple[tuple[int, ...], int]:
    """Return a shape and the number of trailing dimensions the op works over."""
    if large:
        rows = -(-random.randint(size.large, size.large * 5 // 4) // (cell.input.itemsize * width))
    elif random.random() < 0.02:
        rows = 0
    else:
        rows = log_uniform(random, 1, max(1, min(size.rows, size.elements // width)))
    lead = () if rows == 1 and random.random() < 0.3 else factors(random, rows, random.randint(1, 3))
    if not cell.normalizes:
        return (*lead, width), 0
    tail = factors(random, width, random.choice((1, 1, 1, 2, 3)))
    return (*lead, *tail), len(tail)


def _draw_width(random: Random) -> int:
    """Draw from all sizes alike; near powers of two and at multiples of 8 kernels change their ways."""
    width = log_uniform(random, 1, 2**20)
    kind = random.randrange(4)
    if kind == 0:
        return width
    if kind == 1:
        return max(8, width // 8 * 8)
    return max(1, 2 ** (width.bit_length() - 1) + random.choice((-1, 0, 0, 1)))


def log_uniform(random: Random, low: int, high: int) -> int:
    """Draw an integer of [low, high] whose logarithm is uniform."""
    return min(high, max(low, round(math.exp(random.uniform(math.log(low), math.log(high))))))


def factors(random: Random, number: int, parts: int) -> tuple[int, ...]:
    """Write a number as a product of so many factors, in any order."""
    found = []
    for _ in range(parts - 1):
        divisors = [d for d in range(1, 65) if number % d == 0] if number else [1, 3]
        found.append(random.choice(divisors))
        number //= found[-1]
    found.append(number)
    random.shuffle(found)
    return tuple(found)


def _draw_memory(random: Random, names: tuple[str, ...]) -> dict[str, Memory]:
    """Give at least one tensor an unusual place."""
    chosen = [name for name in names if random.random() < 0.5] or [random.choice(names)]
    return {name: draw_memory(random) for name in chosen}


def draw_memory(random: Random) -> Memory:
    """Draw an unusual place of a tensor."""
    return random.choice(_MEMORIES)(random)


def _offset(random: Random) -> int:
    return random.choice((0, 1, 2, 3, 4, 5, 7, 8, 16))


# Shifted, strided between rows, in every dimension or within a row, transposed, expanded.
_MEMORIES: tuple[Callable[[Random], Memory], ...] = (
    lambda random: Memory(offset=random.choice((1, 2, 3, 4, 5, 7))),
    lambda random: Memory(_offset(random), gaps=(random.choice((1, 2, 3, 8, 64)),)),
    lambda random: Memory(_offset(random), gaps=(0, random.randint(1, 9), random.randint(0, 9))),
    lambda random: Memory(_offset(random), step=random.randint(2, 3)),
    lambda random: Memory(_offset(random), roll=random.randint(1, 3), gaps=(random.randint(0, 3),)),
    lambda random: Memory(_offset(random), expand=True),
)
