"""`fusedops parity --fuzz`: cases drawn at random, beside the listed ones; `--case` makes one of them again."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..bench.records import facts
from ..fuzz import sweep as sweeps
from ..fuzz.sweep import Sweep, Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of fuzzing to those of parity."""
    add = parser.add_argument_group("fuzzing").add_argument
    add(
        "--fuzz",
        type=_count,
        metavar="N",
        help="draw N cases in all, or as --per-cell asks, of optimizers too; see also --seed",
    )
    add("--per-cell", type=int, default=300, metavar="N", help="at least so many of each cell and direction (300)")
    add("--large-every", type=int, metavar="N", help="one of N has 16 MiB or more; 0: none (GPU: 10, CPU: 100)")
    add("--minutes", type=float, default=float("inf"), metavar="M", help="stop by then")
    add("--shard", type=_shard, default=(0, 1), metavar="I/N", help="this process runs part I (from 0) of N")
    add("--out", type=Path, metavar="FILE", help="write what was tried, a JSON record a line")
    add("--case", metavar="NAME", help="run one drawn case again, as layer_norm/native/bf16-fp32/0/17 or …/0/19/large")


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a number of cases from 1 on, got {text!r}")
    return int(text)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with 0 <= I < N, got {text!r}")
    return int(part), int(parts)


def run_case(name: str, device: torch.device) -> int:
    """Run one case again; 1 where it is wrong, 2 where there is none of that name."""
    try:
        target = sweeps.find(name, str(device))
    except ValueError as error:
        print(error)
        return 2
    found = target.attempt(name)
    if found is None:
        print(f"{name}: nothing could be judged")
        return 2
    print(f"{name}: " + (found.problem or f"passes, at {100 * found.ratio:.0f} % of the bound"))
    return int(found.problem is not None)


def run(args: argparse.Namespace, device: torch.device) -> int:
    """Sweep and print; 1 when a case is wrong or the sweep could not be finished."""
    cells = sweeps.targets(str(device), args.op, args.backend, large_every=args.large_every)
    if not cells:
        print("nothing can run here of what was asked for")
        return 1
    per_cell = max(-(-args.fuzz // len(cells)), -(-args.per_cell * 10 // 9) if args.per_cell else 0)
    part, parts = args.shard
    shown = f", part {part} of {parts}" if parts > 1 else ""
    print(f"Fuzzing {len(cells)} cells with {per_cell} cases each, seed {args.seed}, on {device}{shown}", flush=True)
    known = {**facts(device), "seed": args.seed, "shard": [part, parts], "per_cell": per_cell} if args.out else {}

    def save(result: Sweep) -> None:
        if args.out:
            result.write(args.out, known)

    result = sweeps.sweep(cells, args.seed, per_cell, shard=args.shard, seconds=60 * args.minutes, save=save)
    return report(result, cells)


def report(result: Sweep, cells: list[Target]) -> int:
    """Print what was tried and every failure; return the exit status."""
    for text in result.messages:
        print(f"\nFAIL {text}")
    tallies = [result.tallies[target.cell.name] for target in cells]
    irregular, large = sum(t.irregular for t in tallies), sum(t.large for t in tallies)
    worst = max(tallies, key=lambda t: t.worst)
    print(
        f"{result.cases} cases in {result.seconds:.0f} s: {irregular} not contiguous or misaligned, {large} of 16 MiB "
        f"or more; worst {100 * worst.worst:.0f} % of the bound ({worst.cell}); {len(result.failures)} failed"
    )
    if result.short:
        print(f"{len(result.short)} cells have fewer cases than they should: {', '.join(result.short)}")
    if not result.complete:
        print("The sweep stopped before its end.")
    return int(bool(result.failures or result.short) or not result.complete or not result.cases)
