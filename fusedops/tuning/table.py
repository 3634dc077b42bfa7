"""What was measured, kept as it comes, and the rows of the dispatch table that are made of it.

*What a row speaks for*: exactly the dtypes, the width and the compute capability that were measured. Rows up to the
geometric middle between two measured numbers of them go to the nearer one; fewer than the fewest and more than the most
count down to a quarter and up to four times. Rows of optimizers speak for any list of tensors.

*What decides*: of forward and backward together the larger of device and host time. Another backend goes before the
first one of the shipped row only if it is faster by ``MARGIN``; those that were not right have no place in the row.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import _files, dispatch_table, machine
from ..config import BACKENDS

MARGIN = 0.03
_BEYOND = 4  # times fewer or more rows than were measured


@dataclass(frozen=True)
class Measured:
    """One cell and its times.

    Attributes:
        op: name of the op or optimizer.
        device: device type.
        capability: ``10 * major + minor`` of a GPU, else None.
        arguments: name and dtype of every tensor.
        hidden: width of a row; None: an optimizer.
        rows: as dispatch counts them; None: an optimizer.
        dtypes: for people.
        size: for people.
        date: of the measurement.
        times: microseconds of device and host, forward and backward together, by backend in the shipped row's order.
        problems: why other backends have no times.
    """

    op: str
    device: str
    capability: int | None
    arguments: dict[str, str]
    hidden: int | None
    rows: int | None
    dtypes: str
    size: str
    date: str
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What the cell is known by among those of one machine."""
        return json.dumps([self.op, self.arguments, self.hidden, self.rows], sort_keys=True)

    def cost(self, backend: str) -> float:
        """Return the microseconds that decide."""
        return max(self.times[backend])

    def order(self) -> tuple[str, ...]:
        """Return the backends of the cell's row, best first; empty where none was right."""
        order = [name for name in self.times if name in dispatch_table.automatic(self.device)]
        if not order:
            return ()
        best = min(order, key=self.cost)
        if self.cost(best) >= (1 - MARGIN) * self.cost(order[0]):
            best = order[0]
        return (best, *(name for name in order if name != best))


def make_rows(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """Return rows of the dispatch table, as they stand in its file."""
    groups: dict[str, list[Measured]] = {}
    for one in measured:
        if one.order():
            groups.setdefault(json.dumps([one.op, one.arguments, one.hidden], sort_keys=True), []).append(one)
    rows = []
    for group in groups.values():
        group.sort(key=lambda one: one.rows or 0)
        limits = _limits([one.rows or 0 for one in group])
        rows += [_row(one, range_) for one, range_ in zip(group, limits, strict=True)]
    return rows


def _limits(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the fewest and the most rows that each of some ascending numbers of rows speaks for."""
    middles = [math.isqrt(fewer * more) for fewer, more in pairwise(counts)]
    first, last = counts[0] // _BEYOND, counts[-1] * _BEYOND
    return list(zip([first, *(middle + 1 for middle in middles)], [*middles, last], strict=True))


def _row(one: Measured, rows: tuple[int, int]) -> dict[str, Any]:
    order = one.order()
    times = ", ".join(f"{name} {one.cost(name):.4g}{' (host)' if _is_host(one, name) else ''}" for name in order)
    row: dict[str, Any] = {
        "ops": [one.op],
        "device": one.device,
        "backends": list(order),
        "why": f"tuned {one.date} at {one.size} {one.dtypes}: larger of device and host time in µs: {times}",
        "arguments": one.arguments,
    }
    if one.capability is not None:
        row["capability"] = [one.capability] * 2
    if one.hidden is not None:
        row |= {"hidden": [one.hidden] * 2, "rows": list(rows)}
    return row


def _is_host(one: Measured, backend: str) -> bool:
    """Tell whether the calling thread decides; on a CPU the two are one."""
    device_us, host_us = one.times[backend]
    return one.device == "cuda" and host_us > device_us


class Store:
    """What was measured on one machine, in two files: the table that dispatch reads, and beside it the cells.

    Each cell is appended to the second, of which the first is made anew as a whole, both under one lock: a second run
    goes on where one was stopped, and two at once add up. Cells of other machines are left alone and out of the table.

    Raises:
        OSError: the files can't be read or written.
        ValueError: the table is there already, and none of these.
    """

    def __init__(self, table: Path, here: machine.Facts) -> None:
        self.table, self.cells = table, table.with_name(f"{table.name}.cells.jsonl")
        self._here, self._digest = here, machine.digest(here)
        table.parent.mkdir(parents=True, exist_ok=True)
        if table.exists() and not self.cells.exists() and not _is_tuned(table):
            raise ValueError(f"{table}: expected a table that fusedops tune wrote, or no file")
        with _files.locked(self.cells, wait=True):
            try:
                self.known()
            except ValueError as error:
                warnings.warn(f"fusedops: earlier measurements are ignored: {error}", UserWarning, stacklevel=2)
                _files.write_text(self.cells, "")

    def known(self) -> dict[str, Measured]:
        """Return what this machine has measured, by key; of two of one cell the later."""
        found = [_parse(record, self._digest) for _, record in _files.read_records(self.cells, own=True)]
        return {one.key: one for one in found if one is not None}

    def add(self, measured: Measured) -> None:
        """Keep a cell, and write the table anew."""
        _files.append_records(self.cells, [{"machine": self._digest, **asdict(measured)}])
        self.write()

    def write(self) -> None:
        """Make the table of all cells anew, also of one whose run was killed before it did."""
        with _files.locked(self.cells, wait=True):
            rows = make_rows(self.known().values())
            lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            text = f'{{"machine": {json.dumps(self._here)}, "rows": [\n{lines}\n]}}\n'
            _files.write_text(self.table, text)


def _is_tuned(table: Path) -> bool:
    try:
        data = _files.read_json(table)
    except ValueError:
        return False
    return isinstance(data, dict) and "machine" in data


_NAMES = [item.name for item in fields(Measured)]


def _parse(record: Any, digest: str) -> Measured | None:
    """Return a cell that a line of the file holds; None for another machine's, and for what is none."""
    if not (isinstance(record, dict) and record.pop("machine", None) == digest and record.keys() == {*_NAMES}):
        return None
    if not (
        all(isinstance(record[name], str) for name in ("op", "device", "dtypes", "size", "date"))
        and all(record[name] is None or type(record[name]) is int for name in ("capability", "hidden", "rows"))
        and all(_are_texts(record[name]) for name in ("arguments", "problems"))
        and isinstance(record["times"], dict)
        and all(name in BACKENDS and _are_times(time) for name, time in record["times"].items())
    ):
        return None
    times = {name: (float(time[0]), float(time[1])) for name, time in record["times"].items()}
    one = Measured(**{**record, "times": times})
    try:
        for row in make_rows([one]):
            dispatch_table.make_row(row, "", "")
    except ValueError:
        return None
    return one


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_times(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(
        type(time) in (int, float) and 0 < time < math.inf for time in value
    )  # fmt: skip


def as_text(measured: Sequence[Measured]) -> str:
    """Lay times out as a table for people: the larger of device and host time, and what is chosen."""
    backends = [name for name in BACKENDS if any(name in {**one.times, **one.problems} for one in measured)]
    lines = [("op", "dtypes", "size", *backends, "choice")]
    for one in measured:
        times = [_shown(one, name) for name in backends]
        lines.append((one.op, one.dtypes, one.size, *times, next(iter(one.order()), "none is right")))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head = "µs of forward + backward or step: the larger of device time and host time (h); apex serves who asks for it"
    rows = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    reasons = dict.fromkeys(f"{name} {text}" for one in measured for name, text in one.problems.items())
    return "\n".join([head, *rows, *reasons])


def _shown(one: Measured, backend: str) -> str:
    if backend not in one.times:
        return one.problems.get(backend, "-").partition(":")[0]
    return f"{one.cost(backend):.1f}{'h' if _is_host(one, backend) else ''}"
