"""What was measured on a machine, kept as it comes: cells that a second run goes on from, and the table made of them.

The files are this user's. What is in them and was not understood stays as it is: lines that are no cells are passed
over, and a file of another kind or owner is refused.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .. import _files, dispatch_table, machine
from ..config import BACKENDS
from .table import Measured, make_row, make_rows, order

_MOST_US = 1e12  # eleven days
_BEGIN = '{"machine": "'


class Store:
    """What was measured on one machine, in two files: the table that dispatch reads, and beside it the cells.

    Each cell is appended to the second, of which the first is made anew as a whole, both under one lock: a second run
    goes on where one was stopped, and two at once add up. Cells of other machines are left alone and out of the table,
    and so are, with a warning, lines that hold none.

    Raises:
        OSError: the files can't be read or written.
        ValueError: one of them is there already and another user's or, as far as can be told, none of these.
    """

    def __init__(self, table: Path, here: machine.Facts) -> None:
        self.table, self.cells = table, table.with_name(f"{table.name}.cells.jsonl")
        self._here, self._digest = here, machine.digest(here)
        table.parent.mkdir(parents=True, exist_ok=True)
        _check_table(table, alone=not self.cells.exists())
        with _files.locked(self.cells, wait=True):
            _check_end(self.cells)
            bad: list[str] = []
            self._read(lambda problem: bad.append(str(problem)))
        if bad:
            told = f"fusedops: lines that hold no measurement are ignored ({len(bad)}), the first: {bad[0]:.300}"
            warnings.warn(told, UserWarning, stacklevel=2)

    def known(self) -> dict[str, Measured]:
        """Return what this machine has measured, by key; of two of one cell the later."""
        return self._read(lambda problem: None)

    def _read(self, bad: Callable[[ValueError], None]) -> dict[str, Measured]:
        found: dict[str, Measured] = {}
        for number, record in _files.read_records(self.cells, own=True, bad=bad):
            try:
                one = _parse(record, self._here["device"], self._digest)
            except ValueError as error:
                bad(ValueError(f"{self.cells}:{number}: {error}"))
                continue
            if one is not None:
                found.pop(one.key, None)
                found[one.key] = one
        return found

    def add(self, measured: Measured) -> None:
        """Keep a cell, and write the table anew."""
        _files.append_records(self.cells, [{"machine": self._digest, **asdict(measured)}])
        self.write()

    def write(self) -> None:
        """Make the table of all cells anew, also of one whose run was killed before it did."""
        with _files.locked(self.cells, wait=True):
            rows = make_rows(self.known().values())
            lines = ",\n".join(json.dumps(row) for row in rows)
            text = f'{{"machine": {json.dumps(self._here)}, "rows": [\n{lines}\n]}}\n'
            _files.write_text(self.table, text)


def _check_table(table: Path, *, alone: bool) -> None:
    """Raise ValueError if a table is another user's or, without cells beside it, was written by somebody else."""
    if not table.exists():
        return
    content = _files.read_bytes(table, own=True)
    try:
        data = _files.parse_json(content.decode("utf-8"))
    except ValueError:
        data = None
    if alone and not (isinstance(data, dict) and "machine" in data):
        raise ValueError(f"{table}: expected a table that fusedops tune wrote, or no file")


def _check_end(cells: Path) -> None:
    """Raise ValueError if an unfinished last line, which an append would cut, is not the beginning of a cell."""
    end = _files.read_bytes(cells, own=True).rpartition(b"\n")[2][: len(_BEGIN)].decode("utf-8", "replace")
    if not _BEGIN.startswith(end):
        raise ValueError(f"{cells}: expected cells that fusedops tune wrote, or no file, got {end!r} at the end")


_NAMES = [item.name for item in fields(Measured)]


def _parse(record: Any, device: str, digest: str) -> Measured | None:
    """Return a cell that a line of the file holds; None for another machine's.

    Raises:
        ValueError: it is none.
    """
    if isinstance(record, dict) and isinstance(record.get("machine"), str) and record["machine"] != digest:
        return None
    if not isinstance(record, dict) or record.keys() != {"machine", *_NAMES}:
        raise ValueError(f"expected an object with the keys of a cell, got {record!r:.80}")
    for name, expected, sound in _EXPECTED:
        if not sound(record[name]):
            raise ValueError(f"{name}: expected {expected}, got {record[name]!r:.80}")
    if record["device"] != device:
        raise ValueError(f"device: expected {device}, got {record['device']!r:.80}")
    times = {name: (float(time[0]), float(time[1])) for name, time in record["times"].items()}
    one = Measured(**{**{name: record[name] for name in _NAMES}, "times": times})
    if order([one]):
        dispatch_table.make_row(make_row([one], None if one.hidden is None else (one.rows or 0, one.rows or 0)), "", "")
    return one


def _is_number(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_times(value: Any) -> bool:
    return isinstance(value, dict) and all(name in BACKENDS and _is_time(time) for name, time in value.items())


def _is_time(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(
        type(time) in (int, float) and 0 < time < _MOST_US for time in value
    )  # fmt: skip


_EXPECTED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    *((name, "text", lambda value: isinstance(value, str)) for name in ("op", "device", "dtypes", "size", "date")),
    *((name, "an integer or null", _is_number) for name in ("capability", "hidden", "rows")),
    *((name, "texts by name", _are_texts) for name in ("arguments", "problems")),
    ("options", "an object", lambda value: isinstance(value, dict)),
    ("times", "pairs of microseconds by backend", _are_times),
)
