"""Write what `fusedops parity --fuzz` tried into docs/reliability.md.

    fusedops parity --fuzz 110000 --per-cell 300 --shard 0/12 --out runs/fuzz-0.jsonl      (and so on)
    cat runs/fuzz-*.jsonl > benchmarks/results/nvidia-h200-fuzz.jsonl
    python benchmarks/reliability.py

A table stands between `<!-- tried: FILE -->` and `<!-- end -->`; files that are not there leave it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fusedops._files import read_records, write_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
_TABLE = re.compile(r"<!-- tried: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
_SUMS = ("share", "forward", "backward", "irregular", "large")

Record = dict[str, Any]


def read(records: Iterable[Record]) -> tuple[list[Record], dict[str, Record]]:
    """Return the run records, and of each cell the sum of its records over all runs."""
    runs: list[Record] = []
    cells: dict[str, Record] = {}
    for record in records:
        if record["kind"] == "run":
            runs.append(record)
            continue
        known = cells.setdefault(record["cell"], {**dict.fromkeys(_SUMS, 0), "worst": 0.0, "failures": []})
        for key in _SUMS:
            known[key] += record.get(key, 0)
        known["worst"] = max(known["worst"], record["worst"])
        known["failures"] += record["failures"]
    return runs, cells


def render(runs: Sequence[Record], cells: dict[str, Record]) -> str:
    """Return the text of one table: the run, its sums by op and backend, and the cases of every cell."""
    return "\n".join([*_head(runs, cells), "", *_sums(cells), "", *_cases(cells)])


def _head(runs: Sequence[Record], cells: dict[str, Record]) -> list[str]:
    def every(key: str, length: int | None = None) -> str:
        return ", ".join(dict.fromkeys(str(run[key])[:length] for run in runs if run.get(key) is not None))

    total = sum(cell["forward"] for cell in cells.values())
    share = {key: 100 * sum(cell[key] for cell in cells.values()) / max(total, 1) for key in ("irregular", "large")}
    failed = sum(len(cell["failures"]) for cell in cells.values())
    place = f"one {every('gpu')}, driver {every('driver')}" if every("gpu") else f"a CPU ({every('cpu')})"
    unfinished = "" if all(run["complete"] for run in runs) else " **Not every process came to its end.**"
    short = [f"{name} ({cell['forward']} of {cell['share']})" for name, cell in cells.items()
             if cell["forward"] < cell["share"]]  # fmt: skip
    lacking = f" **Fewer cases than meant: {', '.join(short)}.**" if short else ""
    return [
        f"**{total:,} cases in {len(cells)} cells on {place}**: torch {every('torch')}, Triton {every('triton')}, "
        f"commit {every('commit', 12)}, {every('date', 10)}, seed {every('seed')}. "
        f"{share['irregular']:.0f} % not contiguous or not at a multiple of 16 bytes, "
        f"{share['large']:.1f} % of at least 16 MiB; {failed} failed.{unfinished}{lacking}"
    ]


def _sums(cells: dict[str, Record]) -> list[str]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for name, cell in cells.items():
        op, backend, _ = name.split("/")
        groups.setdefault((op, backend), []).append(cell)
    rows = []
    for (op, backend), some in groups.items():
        forward, backward = ([cell[key] for cell in some] for key in ("forward", "backward"))
        worst, failed = max(cell["worst"] for cell in some), sum(len(cell["failures"]) for cell in some)
        fewest = min(backward) if any(backward) else "–"
        rows.append((op, backend, len(some), f"{sum(forward):,}", min(forward), fewest, f"{100 * worst:.0f} %", failed))
    head = ("op", "backend", "cells", "cases", "fewest forward", "fewest backward", "worst, of the bound", "failed")
    return _table(head, rows)


def _cases(cells: dict[str, Record]) -> list[str]:
    """Return a table an op: backends down, dtypes across, cases forward · backward."""
    lines: list[str] = []
    parts = {name: name.split("/") for name in cells}
    for op in dict.fromkeys(part[0] for part in parts.values()):
        own = {(part[1], part[2]): cells[name] for name, part in parts.items() if part[0] == op}
        backends, mixes = (tuple(dict.fromkeys(key[i] for key in own)) for i in (0, 1))
        rows = [(backend, *(_count(own.get((backend, mix))) for mix in mixes)) for backend in backends]
        lines += [f"`{op}`", "", *_table(("", *(mix.replace("-", " → ", 1) for mix in mixes)), rows), ""]
    return lines[:-1]


def _count(cell: Record | None) -> str:
    if cell is None:
        return "–"
    return f"{cell['forward']} · {cell['backward']}" if cell["backward"] else str(cell["forward"])


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def update(page: str, root: Path = ROOT) -> str:
    """Return the page with each table made anew from its file."""

    def fill(match: re.Match[str]) -> str:
        file = root / match[1]
        if not file.exists():
            return match[0]
        return f"<!-- tried: {match[1]} -->\n{render(*read(record for _, record in read_records(file)))}\n<!-- end -->"

    return _TABLE.sub(fill, page)


if __name__ == "__main__":
    write_text(PAGE, update(PAGE.read_text()))
    print(PAGE)
