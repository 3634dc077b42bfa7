"""`fusedops parity`: check every op on this machine against plain torch in float64."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .. import backends, testing
from ..config import BACKENDS
from ..registry import OPS, OPTIMS, Case, OpSpec, short
from . import fuzz, listed, parse_device

_HEAD = ("op", "dtypes", "backend", "cells", "output ULP", "torch's", "gradient ULP", "torch's", "of the bound", "")
_FOOT = (
    "Worst errors of all cells against float64, ours beside plain torch's in the same dtypes, in ULPs of the element\n"
    "(of 1/16 of what was added up to make it, where terms cancel). Judged by their share of the bound: up to 100 %."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("parity", help="check every op against plain torch in float64", description=__doc__)
    add = parser.add_argument
    add("--op", type=listed(*OPS, *OPTIMS), help=f"any of {', '.join(OPS)}; with --fuzz {', '.join(OPTIMS)} as well")
    add("--backend", type=listed(*BACKENDS), help=f"any of {', '.join(BACKENDS)} (default: all that run here)")
    add("--device", type=parse_device, help="default: the GPU if there is one")
    add("--full", action="store_true", help="every case, not the quick selection")
    add("--seed", type=int, default=0, help="of the random numbers (default 0)")
    fuzz.add_arguments(parser)


@dataclass
class Row:
    """The cells of one op, dtype mix and backend."""

    op: str
    dtypes: str
    backend: str
    outcomes: list[testing.Outcome] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)

    @property
    def cells(self) -> int:
        """Return how many were tried: those that crashed have no outcome."""
        return len(self.outcomes) + len(self.failures) - sum(not outcome.passed for outcome in self.outcomes)

    def columns(self) -> tuple[str, ...]:
        """Return what the table shows."""
        found = [c for outcome in self.outcomes for c in outcome.comparisons]
        output = [c for c in found if c.name == "output"]
        gradients = [c for c in found if c.name != "output"]
        share = max((c.ratio for c in found), default=0.0)
        if not self.outcomes and not self.failures:
            return (self.op, self.dtypes, self.backend, "0", "", "", "", "", "", "not served")
        return (
            self.op,
            self.dtypes,
            self.backend,
            str(self.cells),
            *(_number(max((getattr(c, key) for c in part), default=0.0))
              for part in (output, gradients) for key in ("ulps", "torch_ulps")),
            f"{100 * share:.0f} %" if share < 100 else f"{share:.2g} ×",
            "FAIL" if self.failures else "ok",
        )  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1e}"


def run(args: argparse.Namespace) -> int:
    """Check and print; 1 when a cell is wrong or a backend that was asked for can't run."""
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.case:
        return fuzz.run_case(args.case, device)
    if args.fuzz is not None:
        return fuzz.run(args, device)
    if optimizers := [name for name in args.op or () if name not in OPS]:
        print(f"{', '.join(optimizers)}: optimizers are checked by --fuzz and by the tests")
        return 2
    absent = {name: reason for name, reason in backends.backends(device.type).items() if reason}
    names = args.backend or [name for name in BACKENDS if name not in absent]
    rows: dict[tuple[str, str, str], Row] = {}
    with testing.poisoned():
        for spec, case, name in _cells(args.op or list(OPS), names, "full" if args.full else "quick"):
            row = rows.setdefault((spec.name, _mix(case), name), Row(spec.name, _mix(case), name))
            if name not in absent:
                _check(row, spec, case, str(device), args.seed)
    print(f"Parity on {_device_name(device)}, torch {torch.__version__}, {'all' if args.full else 'quick'} cells")
    if table := [row.columns() for row in rows.values() if row.backend not in absent]:
        _print_table(table)
        print(_FOOT)
    for reason in dict.fromkeys(f"{row.backend}: {text}" for row in rows.values() for text in row.passed_over):
        print(f"not served by {reason}")
    for name, reason in absent.items():
        print(f"{name} does not run here: {reason}")
    failures = [text for row in rows.values() for text in row.failures]
    for text in failures:
        print(f"\nFAIL {text}")
    refused = [name for name in names if name in absent]
    if failures:
        print(f"\n{len(failures)} of {sum(row.cells for row in rows.values())} cells are wrong.")
    return 1 if failures or refused else 0


def _cells(ops: Sequence[str], names: Sequence[str], level: str) -> Iterator[tuple[OpSpec, Case, str]]:
    cells = [(OPS[op], case, name) for op in ops for case in OPS[op].cases(level) for name in names]
    for number, (spec, case, name) in enumerate(cells, 1):
        if sys.stderr.isatty():
            print(f"\033[K{number}/{len(cells)} {spec.name} on {name}", end="\r", file=sys.stderr)
        yield spec, case, name
    if sys.stderr.isatty():
        print("\033[K", end="\r", file=sys.stderr)


def _mix(case: Case) -> str:
    """Name input and output, and the parameters where they differ from the input."""
    main = case.dtypes["input"]
    output = case.out_dtype or main
    others = dict.fromkeys(short(dtype) for name, dtype in case.dtypes.items() if name != "input" and dtype is not main)
    parts = [short(main), f"({', '.join(others)} parameters)" if others else ""]
    return " ".join([*filter(None, parts), *([f"→ {short(output)}"] if output is not main else [])])


def _check(row: Row, spec: OpSpec, case: Case, device: str, seed: int) -> None:
    reason = testing.refused(spec, case, row.backend, device)
    if reason:
        row.passed_over.append(reason)
        return
    try:
        outcome = testing.check(spec, case, row.backend, device, seed)
    except Exception:  # a crash is a wrong cell, and the others are still worth knowing
        row.failures.append(f"{spec.name} on {row.backend} ({device}), case {case.id}\n{traceback.format_exc()}")
        return
    row.outcomes.append(outcome)
    if not outcome.passed:
        row.failures.append(str(outcome))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {str(device).upper()}"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print with rich, or in plain columns where it is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
        for row in (_HEAD, *rows):
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, name in enumerate(_HEAD):
        table.add_column(name, justify="right" if 3 <= number < len(_HEAD) - 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row, style={"FAIL": "red", "not served": "dim"}.get(row[-1]))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
