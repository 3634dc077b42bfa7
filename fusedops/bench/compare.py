"""Two runs of the same cells: which of ours became slower, by more than noise.

Two measures, for each is misled where the other is not: the median time changes with the machine's clock, % of the copy
with a mistake in the copy's time. A change that is real shows in both, so the smaller of the two is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import BACKENDS
from . import report
from .records import Record

# What code that did not change differs by from run to run; benchmarks/README.md says how these were found.
NOISE_GPU = 0.04
NOISE_CPU = 0.25


@dataclass(frozen=True)
class Change:
    """One cell in two runs.

    Attributes:
        base: the earlier record, which has a time.
        new: the later one, which may have none; None: the later run has no such backend.
    """

    base: Record
    new: Record | None

    @property
    def _timed(self) -> Record:
        assert self.new is not None
        return self.new

    @property
    def noise(self) -> float:
        """The relative change that says nothing: the least of this kind of machine, or the records' own spread."""
        least = NOISE_CPU if self.base["gpu"] is None else NOISE_GPU
        return max(least, *((r["q3_us"] - r["q1_us"]) / r["median_us"] for r in (self.base, self._timed)))

    @property
    def ratio(self) -> float:
        """New time by old, plain or each by its copy's, whichever is nearer to 1; 1 where the two disagree."""
        time = self._timed["median_us"] / self.base["median_us"]
        by_copy = time * self.base["copy_us"] / self._timed["copy_us"]
        return max(1.0, min(time, by_copy)) if time > 1 else min(1.0, max(time, by_copy))

    @property
    def verdict(self) -> str:
        """``"slower"``, ``"faster"``, ``"same"``, or ``"lost"``: the cell has no time any more."""
        if self.new is None or self.new["status"] != "ok":
            return "lost"
        if self.ratio > 1 + self.noise:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + self.noise) else "same"


def check_machine(name: str, base: Sequence[Record]) -> None:
    """Refuse an earlier run of another machine.

    Args:
        name: this machine, as ``report.machine`` names it.
        base: the earlier run.

    Raises:
        ValueError: nothing in it was measured on such a machine.
    """
    if name not in (known := {report.machine(record) for record in base}):
        raise ValueError(f"base: expected records of {name}, got {' and '.join(sorted(known)) or 'none'}")


def compare(new: Sequence[Record], base: Sequence[Record], backends: Sequence[str] = BACKENDS) -> list[Change]:
    """Pair each cell of ours with the same cell of an earlier run on the same kind of machine.

    Args:
        new: the later run.
        base: the earlier one.
        backends: those of ours that the later run was to measure: one that has no record of a cell that others have a
            record of is gone, and has lost the cell.

    Raises:
        ValueError: the runs are of different machines, or have no cell in common.
    """
    for name in {report.machine(record) for record in new}:
        check_machine(name, base)
    found = {_place(record): record for record in new}
    cells = {_without_backend(record) for record in new}
    timed = {_place(record): record for record in base if record["ours"] and record["status"] == "ok"}
    changes = [
        Change(record, found.get(where))
        for where, record in timed.items()
        if where in found or (record["backend"] in backends and _without_backend(record) in cells)
    ]
    if not changes:
        raise ValueError("base: expected a time of one of these cells of ours at least, got none")
    return changes


def _place(record: Record) -> tuple[str, ...]:
    return (report.machine(record), *report.cell_of(record))


def _without_backend(record: Record) -> tuple[str, ...]:
    return _place({**record, "backend": ""})


def print_changes(changes: Sequence[Change]) -> bool:
    """Print the cells that changed and a count of all.

    Returns:
        Whether any became slower or was lost.
    """
    verdicts = [change.verdict for change in changes]
    rows = [
        _row(change, verdict)
        for wanted in ("lost", "slower", "faster")
        for change, verdict in zip(changes, verdicts, strict=True)
        if verdict == wanted
    ]
    if rows:
        report.print_table("changed by more than noise", ["", "cell", "before", "now", "change", "noise"], rows)
    lost = [change for change, verdict in zip(changes, verdicts, strict=True) if verdict == "lost"]
    for change in lost:
        cell = " ".join(report.cell_of(change.base))
        print(report.reason(change.new) if change.new else f"{cell}: not measured: the backend is not there")
    commits = ", ".join(sorted({str(change.base["commit"] or "unknown")[:12] for change in changes}))
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("lost", "slower", "faster", "same"))
    print(f"Beside commit {commits}: {len(changes)} cells of ours, {counts}.")
    return "slower" in verdicts or bool(lost)


def _row(change: Change, verdict: str) -> list[str]:
    cells = [verdict, " ".join(report.cell_of(change.base)), report.cell(change.base)]
    if verdict == "lost":
        return [*cells, report.cell(change.new) if change.new else "gone", "", ""]
    cells.append(report.cell(change._timed))
    return [*cells, f"{100 * (change.ratio - 1):+.1f}%", f"{100 * change.noise:.1f}%"]
