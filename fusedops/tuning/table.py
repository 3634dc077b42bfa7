"""What was measured, and the rows of the dispatch table that are made of it.

*What a row speaks for*: exactly the dtypes, the width and the compute capability that were measured. Rows up to the
geometric middle between two measured numbers of them go to the nearer one; fewer than the fewest and more than the most
count down to a quarter and up to four times. A row of an optimizer speaks for any list of tensors, so it is made once
all of ``cells.LISTS`` were measured, and for the options that were: without amsgrad, and one way to keep updates.

*What decides*: of forward and backward together the larger of device and host time. Another backend goes before the
first one of the shipped row only if it is faster by ``MARGIN``, an optimizer's on each list; those that were not right
have no place in the row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .. import dispatch_table
from ..config import BACKENDS
from .cells import LISTS

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
        options: of an optimizer, those that a row names.
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
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What the cell is known by among those of one machine."""
        return json.dumps([self.group, self.size if self.hidden is None else self.rows])

    @property
    def group(self) -> str:
        """What cells have in common that share a row, or a range of rows."""
        return json.dumps([self.op, self.arguments, self.options, self.hidden], sort_keys=True)

    def cost(self, backend: str) -> float:
        """Return the microseconds that decide."""
        return max(self.times[backend])


def order(together: Sequence[Measured]) -> tuple[str, ...]:
    """Return the backends of the row that cells share, best first; empty where none was right in each."""
    names = [
        name
        for name in together[0].times
        if name in dispatch_table.automatic(together[0].device) and all(name in one.times for one in together)
    ]
    if not names:
        return ()

    def worst(name: str) -> float:
        return max(one.cost(name) / one.cost(names[0]) for one in together)

    best = min(names, key=worst)
    if worst(best) >= 1 - MARGIN:
        best = names[0]
    return (best, *(name for name in names if name != best))


def make_rows(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """Return rows of the dispatch table, as they stand in its file."""
    rows = []
    for group in _groups(measured):
        if group[0].hidden is None:
            rows += [make_row(group, None)] if _is_whole(group) and order(group) else []
            continue
        right = sorted((one for one in group if order([one])), key=lambda one: one.rows or 0)
        limits = _limits([one.rows or 0 for one in right])
        rows += [make_row([one], range_) for one, range_ in zip(right, limits, strict=True)]
    return rows


def _groups(measured: Iterable[Measured]) -> list[list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for one in measured:
        found.setdefault(one.group, []).append(one)
    return [*found.values()]


def _is_whole(group: Sequence[Measured]) -> bool:
    """Tell whether an optimizer was measured on every list of tensors."""
    return {one.size for one in group} >= {*LISTS[group[0].device]}


def _limits(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the fewest and the most rows that each of some ascending numbers of rows speaks for."""
    middles = [math.isqrt(fewer * more) for fewer, more in pairwise(counts)]
    if not counts:
        return []
    first, last = counts[0] // _BEYOND, counts[-1] * _BEYOND
    return list(zip([first, *(middle + 1 for middle in middles)], [*middles, last], strict=True))


def make_row(together: Sequence[Measured], rows: tuple[int, int] | None) -> dict[str, Any]:
    """Return the row that cells share, as it stands in the file.

    Args:
        together: one cell of an op, or those of an optimizer; a backend was right in each.
        rows: the fewest and the most that it speaks for; None: an optimizer.
    """
    one, backends = together[0], order(together)
    times = "; ".join(f"at {each.size} {each.dtypes}: {_times(each, backends)}" for each in together)
    row: dict[str, Any] = {
        "ops": [one.op],
        "device": one.device,
        "backends": list(backends),
        "why": f"tuned {one.date}, larger of device and host time in µs {times}",
        "arguments": one.arguments,
    }
    if one.options:
        row["options"] = one.options
    if one.capability is not None:
        row["capability"] = [one.capability] * 2
    if rows is not None:
        row |= {"hidden": [one.hidden] * 2, "rows": list(rows)}
    return row


def _times(one: Measured, backends: Sequence[str]) -> str:
    return ", ".join(f"{name} {one.cost(name):.4g}{' (host)' if _is_host(one, name) else ''}" for name in backends)


def _is_host(one: Measured, backend: str) -> bool:
    """Tell whether the calling thread decides; on a CPU the two are one."""
    device_us, host_us = one.times[backend]
    return one.device == "cuda" and host_us > device_us


def as_text(measured: Sequence[Measured]) -> str:
    """Lay times out as a table for people: the larger of device and host time, and what is chosen."""
    backends = [name for name in BACKENDS if any(name in {**one.times, **one.problems} for one in measured)]
    lines = [("op", "dtypes", "size", *backends, "choice")]
    groups = {one.key: group for group in _groups(measured) for one in group}
    for one in measured:
        times = [_shown(one, name) for name in backends]
        lines.append((one.op, one.dtypes, one.size, *times, _chosen(one, groups[one.key])))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head = "µs of forward + backward or step: the larger of device time and host time (h); apex serves who asks for it"
    rows = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    reasons = dict.fromkeys(f"{name} {text}" for one in measured for name, text in one.problems.items())
    return "\n".join([head, *rows, *reasons])


def _chosen(one: Measured, group: Sequence[Measured]) -> str:
    if one.hidden is None and not _is_whole(group):
        return f"open: needs {' and '.join(LISTS[one.device])}"
    return next(iter(order(group if one.hidden is None else [one])), "none is right")


def _shown(one: Measured, backend: str) -> str:
    if backend not in one.times:
        return one.problems.get(backend, "-").partition(":")[0]
    return f"{one.cost(backend):.1f}{'h' if _is_host(one, backend) else ''}"
