"""What is measured: one op or optimizer with its dtypes and its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import testing
from ..bench import ops, optimizers
from ..dispatch import Call
from ..optim import describe
from ..registry import OPS, Case, short

# What an optimizer is timed on: few large tensors and many small ones.
LISTS = {"cuda": ("gpt2-124M", "1000x1024"), "cpu": ("16x1048576", "1000x1024")}


@dataclass(frozen=True)
class Cell:
    """One cell of the table of times.

    Attributes:
        call: as dispatch sees it.
        dtypes: in short, for people; of an optimizer a key of ``bench.optimizers.CONFIGS``.
        size: ``"<rows>x<hidden>"``, of an optimizer a name that ``bench.optimizers.model_shapes`` knows.
        case: what an op is called with; None: an optimizer.
    """

    call: Call
    dtypes: str
    size: str
    case: Case | None = None

    def __str__(self) -> str:
        return f"{self.call.op} {self.dtypes} {self.size}"


def op_cells(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[tuple[int, int]], device: torch.device
) -> Iterator[Cell]:
    """Yield a cell for each op, dtype mix (of ``bench.ops.DTYPES``) and shape."""
    for name in names:
        for mix in dtypes:
            for shape in shapes:
                case = ops.make_case(OPS[name], mix, shape)
                yield Cell(testing.describe(OPS[name], case, str(device)), mix, _size(shape), case)


def default_shapes(device: torch.device) -> list[tuple[int, int]]:
    """Return (rows, hidden): the sizes that ``fusedops bench`` takes, and a sixteenth of their rows."""
    sizes = ops.default_shapes(device, quick=False)
    return [(max(1, rows // part), hidden) for rows, hidden in sizes for part in (16, 1)]


def optimizer_cells(names: Sequence[str], configs: Sequence[str], device: torch.device) -> Iterator[Cell]:
    """Yield a cell for each optimizer, configuration (of ``bench.optimizers.CONFIGS``) and list of tensors."""
    for name in names:
        for config in configs:
            for model in LISTS[device.type]:
                dtype, state_dtype, masters = optimizers.CONFIGS[config]
                params = [torch.empty(shape, dtype=dtype, device="meta") for shape in optimizers.model_shapes(model)]
                call = describe(name, params, state_dtype=state_dtype, master_weights=masters)
                index = -1 if device.index is None else device.index
                yield Cell(replace(call, device=device.type, index=index), config, model)


def recorded_cell(call: Call, rows: int, out_dtype: torch.dtype, options: dict[str, Any]) -> Cell:
    """Return the cell of a call that ``dispatch.recorder`` was told of."""
    spec, shape = OPS[call.op], (rows, call.hidden or 1)
    dtypes = {name: dtype for name, dtype in call.dtypes if name in spec.grads}
    given = {name: value for name, value in options.items() if value is not None}
    case = Case(shape, min(1, next(iter(spec.cases("quick"))).normalized), dtypes, out_dtype, given)
    return Cell(call, _mix(call), _size(shape), case)


def _size(shape: tuple[int, int]) -> str:
    return "x".join(map(str, shape))


def _mix(call: Call) -> str:
    """Name the input's dtype, then the others' by argument."""
    (_, main), *others = call.dtypes
    return ",".join([short(main), *(f"{name}={short(dtype)}" for name, dtype in others if dtype is not main)])
