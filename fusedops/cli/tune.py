"""`fusedops tune`: measure the backends on this machine, and let dispatch use the best from now on."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

from .. import machine
from ..bench import ops, optimizers
from ..config import CONFIG
from ..registry import OPS, OPTIMS
from ..tuning import cells
from ..tuning.measure import tune_cells
from ..tuning.store import Store
from ..tuning.table import as_text
from . import listed, parse_device

_BUDGET = 600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("tune", help="measure the backends here and use the best", description=__doc__)
    add = parser.add_argument
    names, dtypes = [*OPS, *OPTIMS], [*dict.fromkeys([*ops.DTYPES, *optimizers.CONFIGS])]
    add("--op", type=listed(*names), default=names, help=f"any of {', '.join(names)} (default: all)")
    add("--dtype", type=listed(*dtypes), help=f"any of {', '.join(dtypes)} (default: bf16, amp, fp32; optimizers: "
        f"{', '.join(optimizers.CONFIGS)})")  # fmt: skip
    add("--shapes", type=_shapes, metavar="ROWSxHIDDEN,…", help="sizes of the ops (default: widths from 256 to 12288)")
    add("--budget", type=_seconds, default=_BUDGET, metavar="SECONDS", help=f"stop in time (default {_BUDGET:.0f})")
    add("--out", type=Path, metavar="FILE", help="write the table here (default: the user's cache folder, where it is "
        "found by itself)")  # fmt: skip
    add("--device", type=parse_device, help="default: the GPU if there is one")


def _shapes(text: str) -> list[tuple[int, int]]:
    sizes = [part.split("x") for part in text.split(",")]
    if not all(len(size) == 2 and all(n.isdecimal() and len(n) < 12 and int(n) for n in size) for size in sizes):
        raise argparse.ArgumentTypeError(f"expected ROWSxHIDDEN,…, as in 8192x4096,512x1024, got {text!r}")
    return [(int(rows), int(hidden)) for rows, hidden in sizes]


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds > 0, got {text!r}")
    return found


def run(args: argparse.Namespace) -> int:
    """Measure, print and say where the table is; 1: a backend is wrong, 2: nothing can be measured or written."""
    if CONFIG.disabled:
        print("fusedops tune: FUSEDOPS_DISABLE=1 is set: everything is plain PyTorch", file=sys.stderr)
        return 2
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type not in ("cpu", "cuda"):
        print(f"fusedops tune: expected the CPU or a CUDA device, got {device}", file=sys.stderr)
        return 2
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    planned = _cells(args, device)
    if not planned:
        asked = f"--op {','.join(args.op)!r}" + (f" --dtype {','.join(args.dtype)!r}" if args.dtype is not None else "")
        print(f"fusedops tune: nothing to measure: no op or optimizer has one of the dtypes asked for: {asked}",
              file=sys.stderr)  # fmt: skip
        return 2
    here = machine.facts(device)
    path = args.out or machine.tuned_file(here)
    if path is None:
        print("fusedops tune: there is no home folder: name a file with --out", file=sys.stderr)
        return 2
    try:
        return _tune(args, planned, device, Store(path, here))
    except (OSError, ValueError) as error:
        print(f"fusedops tune: cannot keep the results: {error}", file=sys.stderr)
        return 2


def _tune(args: argparse.Namespace, planned: list[cells.Cell], device: torch.device, store: Store) -> int:
    status = 0
    try:
        found = tune_cells(planned, device, store, args.budget)
    except KeyboardInterrupt:  # what is there is of use, and a second run goes on
        found = tune_cells(planned, device, store, 0.0)
        status = 130
    if found.measured:
        print(as_text(found.measured))
    if found.not_reached:
        why = "Interrupted" if status else f"The budget of {args.budget:g} s is spent"
        print(f"{why}: {len(found.not_reached)} of {len(planned)} cells were not reached, the first "
              f"{found.not_reached[0]}. The same command goes on there.")  # fmt: skip
    if found.measured:
        after = f", after the rows of FUSEDOPS_TABLE={CONFIG.table}" if CONFIG.table else ""
        used = f"to use it: FUSEDOPS_TABLE={store.table}" if args.out else f"used from now on{after}: {store.table}"
        print(f"{used}\n(times: {store.cells}; without that file all is measured anew)")
    problems = {(name, text) for one in found.measured for name, text in one.problems.items()}
    failed = any(text.startswith("FAIL") for name, text in problems if name != "apex")  # which is not ours
    return status or (1 if failed else 0)


def _cells(args: argparse.Namespace, device: torch.device) -> list[cells.Cell]:
    default = args.dtype is None
    mixes = [name for name in (("bf16", "amp", "fp32") if default else args.dtype) if name in ops.DTYPES]
    configs = [name for name in (optimizers.CONFIGS if default else args.dtype) if name in optimizers.CONFIGS]
    shapes = args.shapes or cells.default_shapes(device)
    return [
        *cells.op_cells([name for name in args.op if name in OPS], mixes, shapes, device),
        *cells.optimizer_cells([name for name in args.op if name in OPTIMS], configs, device),
    ]
