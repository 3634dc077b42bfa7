"""Times of the backends in one cell after another, with the clock and the parity gate of ``fusedops bench``."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..bench import ops, optimizers
from ..bench.records import Record
from ..dispatch import refusals
from ..dispatch_table import SHIPPED, automatic, dtype_name
from ..registry import OPS
from .cells import Cell
from .store import Store
from .table import Measured

_OP_REPEATS, _OPTIMIZER_REPEATS = 40, 10
_BAR = 24  # characters
_OPTIONS = ("amsgrad", "keep")  # of a call, that a row can name
clock = time.monotonic


@dataclass(frozen=True)
class Tuned:
    """What came of some cells: those measured now or before, and those that the budget did not reach."""

    measured: list[Measured]
    not_reached: list[Cell]


def tune_cells(cells: Sequence[Cell], device: torch.device, store: Store, budget: float) -> Tuned:
    """Measure what the store does not have yet, show how far that is, and keep each cell as it comes.

    Args:
        cells: in the order of their importance.
        device: where.
        store: keeps what was measured and writes the rows.
        budget: seconds; a cell that would outlast it, judging by the slowest one so far, is not begun.
    """
    begin, slowest = clock(), 0.0
    known = store.known()
    found: dict[str, Measured] = {}
    not_reached: list[Cell] = []
    for number, cell in enumerate(cells):
        key = describe(cell).key
        if key in known:
            found[key] = known[key]
            continue
        cell_begin = clock()
        left = budget - (cell_begin - begin)
        if left <= slowest:
            not_reached.append(cell)
            continue
        _show(f"[{'#' * (number * _BAR // len(cells)):<{_BAR}}] {number}/{len(cells)} {cell}")
        measured = measure(cell, device, lambda: clock() - begin > budget)
        if measured is None:
            not_reached.append(cell)
            continue
        slowest = max(slowest, clock() - cell_begin)
        store.add(measured)
        found[key] = known[key] = measured
    _show("")
    if found:
        store.write()
    return Tuned(list(found.values()), not_reached)


def _show(text: str) -> None:
    """Let a line of a terminal say this."""
    if sys.stderr.isatty():
        print(f"\033[K{text}", end="\r", file=sys.stderr, flush=True)


def describe(cell: Cell) -> Measured:
    """Return the cell as it is kept, without times yet."""
    call = cell.call
    found = call.capability
    return Measured(
        op=call.op,
        device=call.device,
        capability=None if found is None else 10 * found[0] + found[1],
        arguments={name: dtype_name(dtype) for name, dtype in call.dtypes},
        hidden=call.hidden,
        rows=call.rows,
        dtypes=cell.dtypes,
        size=cell.size,
        options={name: value for name, value in call.options if name in _OPTIONS},
        date=datetime.date.today().isoformat(),
    )


def measure(cell: Cell, device: torch.device, spent: Callable[[], bool]) -> Measured | None:
    """Time forward and backward, or an optimizer's step, on every backend that is right there.

    Args:
        cell: what to time.
        device: where.
        spent: tells that time is up; looked at between backends.

    Returns:
        Times and, for the backends without, reasons; None where time was up before all were seen.
    """
    shipped = next(row for row in SHIPPED if row.matches(cell.call))
    names = list(dict.fromkeys((*shipped.backends, *automatic(device.type))))
    if "apex" not in names and not refusals("apex", cell.call):
        names.append("apex")  # for people alone: it has no place in a row
    found: dict[str, list[Record]] = {}
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for record in _run(cell, device, names):
            found.setdefault(record["backend"], []).append(record)
            if len(found) < len(names) and spent():
                return None
    times: dict[str, tuple[float, float]] = {}
    problems: dict[str, str] = {}
    for name, records in found.items():
        wrong = next((record for record in records if record["status"] != "ok"), None)
        if wrong is None:
            device_us, host_us = (sum(float(record[key]) for record in records) for key in ("median_us", "host_us"))
            times[name] = (round(device_us, 2), round(host_us, 2))
        else:
            problems[name] = f"{wrong['status']}: {wrong['reason']}"
    return replace(describe(cell), times=times, problems=problems)


def _run(cell: Cell, device: torch.device, backends: Sequence[str]) -> Iterator[Record]:
    """Let ``fusedops bench`` judge and time backends."""
    if cell.case is not None:
        options = ops.Options(device, (), (), ops.DIRECTIONS, backends, (), _OP_REPEATS, energy=False)
        return ops.run_case(OPS[cell.call.op], cell.case, cell.dtypes, options)
    steps = optimizers.Options(
        device, (cell.size,), (cell.dtypes,), False, backends, (), _OPTIMIZER_REPEATS, energy=False
    )
    return optimizers.run([cell.call.op], steps)
