"""Records as JSON lines, a table and charts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .._files import append_records, read_records, write_figure
from .records import Record, ran_out

# Ours stand out; the colours are those that people with colour blindness tell apart (Okabe and Ito).
_COLOURS = {
    "native": "#0072B2", "triton": "#56B4E9", "apex": "#CC79A7", "reference": "#8C8C8C", "torch": "#BFBFBF",
    "compile": "#E69F00", "liger": "#009E73", "quack": "#D55E00", "flash": "#F0E442", "foreach": "#DDDDDD",
    "apex-fused": "#A05195", "apex-fast": "#D45087", "apex-adam": "#A05195",
}  # fmt: skip
_OTHER = "#444444"
_TITLES = {
    "fwd": "forward", "bwd": "backward", "step": "step", "clip+step": "norm + clip + step",
    "amp": "bf16, fp32 weights (amp)", "bf16-master": "bf16, fp32 state and masters", "bf16": "bf16", "fp32": "fp32",
    "fp16": "fp16",
}  # fmt: skip


def write_jsonl(records: Iterable[Record], path: Path) -> None:
    """Append records to a file, one a line; other processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_records(path, records)


def read_jsonl(path: Path) -> list[Record]:
    """Read records; of two of the same cell on the same machine the later one stands.

    Raises:
        ValueError: a line that is no record, with its number.
    """
    found: dict[tuple[Any, ...], Record] = {}
    for number, record in read_records(path):
        if not _is_record(record):
            text = json.dumps(record)[:60]
            raise ValueError(f"{path}:{number}: expected a record of fusedops bench, got {text!r}")
        where = (machine(record), *cell_of(record))
        found[where] = record
    return list(found.values())


_NAMES = ("op", "direction", "dtype", "backend")
_TIMES = ("copy_us", "median_us", "q1_us", "q3_us")
_MOST = 1e15  # beyond all times, and a number that can be reckoned with


def cell_of(record: Record) -> tuple[str, ...]:
    """Return what names a cell: op, direction, dtype, backend, and shape or model."""
    return (*(record[name] for name in _NAMES), _size(record))


def machine(record: Record) -> str:
    """Name the GPU or, without one, the CPU and the number of threads."""
    return str(record["gpu"] or f"{record['cpu']}, {record['threads']} threads")


def _is_record(record: Any) -> bool:
    """Whether a value has what tables and charts are made of."""
    return (
        isinstance(record, dict)
        and record.keys() >= {"status", "ours", "gpu", "cpu", "threads", "commit", "dirty", "torch"}
        and all(_is_text(record.get(name)) for name in (*_NAMES, "status", "torch"))
        and record["op"].isidentifier()  # a chart is named after it
        and (record["commit"] is None or _is_text(record["commit"]))
        and (_is_text(record.get("model")) or _is_shape(record.get("shape")))
        and (record["status"] != "ok" or _is_timed(record))
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and size > 0 for size in value)


def _is_timed(record: Record) -> bool:
    numbers = [record.get(name) for name in (*_TIMES, "percent_of_copy")]
    return all(isinstance(value, int | float) and 0 <= value < _MOST for value in numbers) and all(
        record[name] > 0
        for name in _TIMES  # a rounded percentage may be 0
    )


def _size(record: Record) -> str:
    return str(record["model"]) if "model" in record else "x".join(map(str, record["shape"]))


def _place(record: Record) -> tuple[Any, ...]:
    """Where a record stands in a chart, however old it is: by dtype, then by hidden size and rows."""
    titles = list(_TITLES)
    dtype = titles.index(record["dtype"]) if record["dtype"] in titles else len(titles)
    return (dtype, *reversed(record.get("shape", ())))


def _ordered(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


# ---------------------------------------------------------------- table


def cell(record: Record | None) -> str:
    """Show a record in a few characters: time and % of the copy, FAIL, or why there is nothing."""
    if record is None:
        return ""
    if record["status"] != "ok":
        return str(record["status"])
    text = f"{record['median_us']:,.1f} µs  {record['percent_of_copy']:.0f}%"
    return text + (f"  wall {record['wall_us']:,.0f}" if "wall_us" in record else "")


def print_tables(records: Sequence[Record]) -> None:
    """Print one table for each op, dtype and direction, then the reason of every cell without a time."""
    for op, dtype, direction in _ordered((r["op"], r["dtype"], r["direction"]) for r in records):
        some = [r for r in records if (r["op"], r["dtype"], r["direction"]) == (op, dtype, direction)]
        names = _ordered(r["backend"] for r in some)
        rows = []
        for size in _ordered(map(_size, some)):
            by_name = {r["backend"]: r for r in some if _size(r) == size}
            copy = next((f"{r['copy_us']:,.1f} µs" for r in by_name.values() if r["status"] == "ok"), "")
            rows.append([size, copy, *(cell(by_name.get(name)) for name in names)])
        title = f"{op} {_TITLES.get(direction, direction)}, {_TITLES.get(dtype, dtype)}: median, % of the copy"
        print_table(title, ["size", "copy", *names], rows)
    unmeasured = (r for r in records if r["status"] != "ok")
    for line in _ordered(map(reason, unmeasured)):
        print(line)


def reason(record: Record) -> str:
    """Say why a cell has no time; a FAIL and a lack of memory name their cell, what is merely absent is said once."""
    where = f"{record['op']} {record['dtype']} {record['backend']}"
    if record["status"] == "FAIL" or ran_out(record):
        where += f" {record['direction']} {_size(record)}"
    return f"{record['status']}: {where}: {record.get('reason', 'no reason given')}"


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print one table, as plain text where `rich` is not there."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        print(title)
        for row in (header, *rows):
            print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
        print()
        return
    table = Table()
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(text, style="bold red" if text == "FAIL" else "") for text in row))
    # Piped output has no width of its own; a folded number is unreadable.
    console = Console(width=None if sys.stdout.isatty() else 240)
    console.print(title, style="bold", highlight=False)
    console.print(table)


# ---------------------------------------------------------------- charts


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw one PNG for each op: bars of % of a copy by size, a panel for each direction and dtype.

    Args:
        records: of one or more runs on one machine; a cell that failed says FAIL, one that was not run leaves a gap.
        folder: where the files go.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # of names that hold a $
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    drawn = sorted((r for r in records if r["status"] in ("ok", "FAIL")), key=_place)
    for op in _ordered(r["op"] for r in drawn if r["status"] == "ok"):
        some = [r for r in drawn if r["op"] == op]
        directions, dtypes = (_ordered(r[key] for r in some) for key in ("direction", "dtype"))
        found = _ordered(r["backend"] for r in some)
        names = [*(name for name in _COLOURS if name in found), *(name for name in found if name not in _COLOURS)]
        sizes = len(_ordered(map(_size, some)))
        figure, axes = pyplot.subplots(
            len(dtypes),
            len(directions),
            figsize=(
                min(8.0, max(4.6, 0.055 * sizes * (len(names) + 2) + 1)) * len(directions),
                2.6 * len(dtypes) + 1.1,
            ),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for row, dtype in enumerate(dtypes):
            for column, direction in enumerate(directions):
                panel = [r for r in some if (r["direction"], r["dtype"]) == (direction, dtype)]
                _bars(axes[row][column], panel, names)
                title = f"{_TITLES.get(direction, direction)}, {_TITLES.get(dtype, dtype)}"
                axes[row][column].set_title(title, size=10)
            axes[row][0].set_ylabel("% of a copy's speed")
        highest = max(1.05 * r["percent_of_copy"] for r in some if r["status"] == "ok")
        axes[0][0].set_ylim(0, max(110.0, highest))  # all panels share it
        figure.suptitle(_title(op, some), size=11)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS.get(name, _OTHER)) for name in names]
        labels = [f"fusedops {name}" if _is_ours(some, name) else name for name in names]
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 9), frameon=False, fontsize=9)
        paths.append(folder / f"{op}.png")
        write_figure(paths[-1], figure)
        pyplot.close(figure)
    return paths


def _is_ours(records: Sequence[Record], name: str) -> bool:
    return any(r["ours"] for r in records if r["backend"] == name)


def _title(op: str, records: Sequence[Record]) -> str:
    """Name what was measured, where and from which source; of more than one version all are named."""
    commits = ", ".join(
        _ordered(f"{(r['commit'] or 'unknown')[:12]}{' + changes' if r['dirty'] else ''}" for r in records)
    )
    versions = " and ".join(_ordered(f"torch {r['torch']}" for r in records))
    what = f"{op}: speed against a copy that moves the same bytes (higher is better)"
    return f"{what}\n{machine(records[0])} · commit {commits} · {versions}"


def _bars(axes: Any, records: Sequence[Record], names: Sequence[str]) -> None:
    sizes = _ordered(map(_size, records))
    width = 0.84 / len(names)
    present = [name for name in names if any(r["backend"] == name for r in records)]
    for position, name in enumerate(present):
        by_size = {_size(r): r.get("percent_of_copy") for r in records if r["backend"] == name}
        at = {s: i + (position - (len(present) - 1) / 2) * width for i, s in enumerate(sizes) if s in by_size}
        axes.bar(list(at.values()), [by_size[s] or 0.0 for s in at], width, color=_COLOURS.get(name, _OTHER))
        for size in (s for s in at if by_size[s] is None):
            axes.text(at[size], 2, "FAIL", color="#B00020", size=7, rotation=90, ha="center", va="bottom")
    axes.axhline(100, color="black", linewidth=0.8, linestyle="--")
    hidden = ["model" not in r for r in records]
    labels = [size.rpartition("x")[2] if all(hidden) and _unique_hidden(sizes) else size for size in sizes]
    axes.set_xticks(range(len(sizes)), labels, size=8, rotation=45 if len(sizes) > 6 else 0)
    if all(hidden):
        last = "classes" if any(r.get("family") == "cross_entropy" for r in records) else "hidden size"
        axes.set_xlabel(last if _unique_hidden(sizes) else f"rows × {last}", size=9)
    axes.grid(axis="y", color="#E5E5E5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _unique_hidden(sizes: Sequence[str]) -> bool:
    return len({size.rpartition("x")[2] for size in sizes}) == len(sizes)
