"""`fusedops bench`: time ops and optimizers beside torch and other packages, after checking that they are right."""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..bench import compare, ops, optimizers, peers, report
from ..bench.records import Record, facts, ran_out
from ..config import BACKENDS
from ..registry import OPS
from . import listed, parse_device

_DEFAULT_PEERS = ("torch", "liger", "quack", "flash", "foreach", "apex-adam")
_MOST_REPEATS = 1_000_000  # on a GPU two events each
_COMPARISON = (
    "A cell of ours is slower when both its median and its % of the copy are worse by more than noise, which is the "
    f"larger of {compare.NOISE_GPU:.0%} (on a CPU {compare.NOISE_CPU:.0%}) and the interquartile range of either run "
    "relative to its median. Exit status: 1 when a cell is slower or has no time any more, 2 when the runs are of "
    "different machines or have no cell in common."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand, with one of its own for all families, for every family, and for files of earlier runs."""
    parser = subparsers.add_parser("bench", help="time ops and optimizers beside other packages", description=__doc__)
    families = parser.add_subparsers(metavar="FAMILY", required=True)
    everything = families.add_parser("all", help="time every family, optimizers with clipping too")
    _add_common(everything, {**peers.OPS, **peers.OPTIMIZERS})
    everything.set_defaults(bench=_bench_all, op=None, shape=None, model=None, dtype=None, direction=None)
    for family, names in ops.families().items():
        _add_ops(families.add_parser(family, help=f"time {', '.join(names)}"), names)
    for family, names in optimizers.families().items():
        _add_optimizers(families.add_parser(family, help=f"time {', '.join(names)}"), names)
    two = families.add_parser("compare", help="compare the results files of two runs", description=_COMPARISON)
    two.add_argument("new", type=_earlier_run, metavar="NEW", help="JSON lines written by a run")
    two.add_argument("base", type=_earlier_run, metavar="BASE", help="JSON lines written by an earlier one")
    two.set_defaults(bench=_compare)
    plot = families.add_parser("plot", help="draw the charts of a results file")
    plot.add_argument("file", type=Path, help="JSON lines written by an earlier run")
    plot.add_argument("--out", type=Path, help="folder for the PNG files (default: that of FILE)")
    plot.add_argument("--machine", metavar="NAME", help="whose records, where FILE holds those of several machines")
    plot.set_defaults(bench=_plot)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; 1 for results that are wrong, slower or lack memory, 2 if it can't be, 130 if interrupted."""
    bench: Callable[[argparse.Namespace], int] = args.bench
    try:
        return bench(args)
    except OSError as error:
        print(f"fusedops bench: cannot write the results: {error}", file=sys.stderr)
        return 2


def _add_common(parser: argparse.ArgumentParser, known_peers: Mapping[str, object]) -> None:
    add = parser.add_argument
    add("--backend", type=listed(*BACKENDS), help="our backends (default: all that can run here)")
    peer_names = (*known_peers, *peers.ALIASES)
    peer_help = f"any of {', '.join(peer_names)} (default: the installed ones that need no compiling)"
    add("--vs", type=listed(*peer_names), metavar="PEERS", help=peer_help)
    add("--device", type=parse_device, help="default: the GPU if there is one")
    add("--repeat", type=_repeats, metavar="N", help="repetitions of each cell (default 100; optimizers 30)")
    add("--quick", action="store_true", help="few sizes, few repetitions")
    add("--energy", action="store_true", help="also measure energy, over windows of 2 s")
    add("--out", type=Path, help="folder for the results (default runs/<date>)")
    add("--append", type=_results_file, metavar="FILE", help="also append the records to a results file")
    add("--commit", help="commit of the source, where git can't tell (or FUSEDOPS_COMMIT)")
    comparison = parser.add_argument_group("comparison", _COMPARISON)
    comparison.add_argument("--compare", type=_earlier_run, metavar="BASE", help="results file of an earlier run")


def _add_ops(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    _add_common(parser, peers.OPS)
    parser.add_argument("--op", type=listed(*names), help="which of " + ", ".join(names))
    parser.add_argument("--shape", type=_shape, action="append", metavar="ROWSxHIDDEN", help="may be repeated")
    parser.add_argument("--dtype", type=listed(*ops.DTYPES), help="any of " + ", ".join(ops.DTYPES))
    parser.add_argument("--direction", type=listed(*ops.DIRECTIONS), help="any of " + ", ".join(ops.DIRECTIONS))
    parser.set_defaults(bench=_bench_ops, names=names)


def _add_optimizers(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    _add_common(parser, peers.OPTIMIZERS)
    parser.add_argument("--op", type=listed(*names), help="which of " + ", ".join(names))
    parser.add_argument("--model", type=_model, action="append", metavar="MODEL",
                        help=f"{', '.join(optimizers.MODELS)} or COUNTxELEMENTS; may be repeated")  # fmt: skip
    parser.add_argument("--dtype", type=listed(*optimizers.CONFIGS), help="any of " + ", ".join(optimizers.CONFIGS))
    parser.add_argument("--clip", action="store_true", help="with the norm of all gradients and clipping")
    parser.set_defaults(bench=_bench_optimizers, names=names)


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) < 2 or not all(part.isdecimal() and len(part) < 16 and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected ROWSxHIDDEN, as in 8192x4096, got {text!r}")
    if math.prod(map(int, parts)) > optimizers.MOST_ELEMENTS:
        raise argparse.ArgumentTypeError(f"expected at most 2^56 elements, got {text!r}")
    return tuple(map(int, parts))


def _repeats(text: str) -> int:
    if not (text.isdecimal() and len(text) < 9 and 1 <= int(text) <= _MOST_REPEATS):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {_MOST_REPEATS:,}, got {text!r}")
    return int(text)


def _results_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def _earlier_run(text: str) -> list[Record]:
    try:
        return report.read_jsonl(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _model(text: str) -> str:
    try:
        optimizers.model_shapes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _device(args: argparse.Namespace) -> torch.device:
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


def _peers(args: argparse.Namespace, known: Mapping[str, object]) -> list[str]:
    """Return the peers asked for, an alias standing for those of its names that the table has."""
    if args.vs is None:
        return [name for name in _DEFAULT_PEERS if name in known]
    names = [name for given in args.vs for name in peers.ALIASES.get(given, (given,))]
    return [name for name in dict.fromkeys(names) if name in known]


def _bench_ops(args: argparse.Namespace) -> int:
    return _finish(args, _time_ops(args, args.names))


def _bench_optimizers(args: argparse.Namespace) -> int:
    return _finish(args, _time_optimizers(args, args.names, args.clip))


def _bench_all(args: argparse.Namespace) -> int:
    steps = [(names, clip) for names in optimizers.families().values() for clip in (False, True)]
    return _finish(
        args,
        *(_time_ops(args, names) for names in ops.families().values()),
        *(_time_optimizers(args, names, clip) for names, clip in steps),
    )


def _time_ops(args: argparse.Namespace, names: Sequence[str]) -> Iterator[Record]:
    device = _device(args)
    options = ops.Options(
        device,
        args.shape or ops.default_shapes(device, args.quick, OPS[names[0]].sizes),
        args.dtype or (["bf16", "amp"] if args.quick else ["bf16", "amp", "fp32"]),
        args.direction or ops.DIRECTIONS,
        args.backend or ops.usable_backends(device),
        _peers(args, peers.OPS),
        args.repeat or (30 if args.quick else 100),
        args.energy,
    )
    return ops.run(args.op or names, options)


def _time_optimizers(args: argparse.Namespace, names: Sequence[str], clip: bool) -> Iterator[Record]:
    device = _device(args)
    models = ["1000x1024"] if args.quick or device.type == "cpu" else list(optimizers.MODELS)
    # Adam differs from AdamW by where one product is added: its time is the same.
    chosen = args.op or [name for name in names if name == "adamw"] or names
    options = optimizers.Options(
        device,
        args.model or models,
        args.dtype or list(optimizers.CONFIGS),
        clip,
        args.backend or ops.usable_backends(device),
        _peers(args, peers.OPTIMIZERS),
        args.repeat or (10 if args.quick else 30),
        args.energy,
    )
    return optimizers.run(chosen, options)


def _finish(args: argparse.Namespace, *runs: Iterator[Record]) -> int:
    """Collect, write and show the records of each run in turn; then draw them, and compare them if asked to."""
    out = args.out or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    shared = facts(_device(args), args.commit)
    if args.compare is not None:
        try:
            compare.check_machine(report.machine(shared), args.compare)
        except ValueError as error:
            return _refuse(error)
    records: list[Record] = []
    files = [out / "bench.jsonl", *([args.append] if args.append else [])]
    try:
        for run in runs:
            first = len(records)
            for record in run:
                if record["status"] == "n/a" and not record["ours"] and args.vs is None:
                    continue  # a package that nobody asked for and that is not there
                _show_progress(" ".join(record[key] for key in ("op", "direction", "dtype", "backend")))
                records.append({**record, **shared})
                for path in files:
                    report.write_jsonl(records[-1:], path)
            _show_progress("")
            report.print_tables(records[first:])
    except KeyboardInterrupt:
        if not records:
            raise
        _show_progress("")
        print(f"interrupted, {len(records)} records are in {files[0]}", file=sys.stderr)
        return 130
    if shared["gpu"] is None:
        print(f"Wall time on a CPU, threads: {torch.get_num_threads()}, warm caches.")
    _draw(records, out)
    slower = 0 if args.compare is None else _show_changes(records, args.compare, args.backend or BACKENDS)
    print(out)
    return slower or int(any(record["status"] == "FAIL" or ran_out(record) for record in records))


def _show_progress(text: str) -> None:
    """Write over the last line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _show_changes(new: Sequence[Record], base: Sequence[Record], backends: Sequence[str] = BACKENDS) -> int:
    """Print what became slower or faster; 1 when anything became slower, 2 when the runs can't be compared."""
    try:
        changes = compare.compare(new, base, backends)
    except ValueError as error:
        return _refuse(error)
    return int(compare.print_changes(changes))


def _compare(args: argparse.Namespace) -> int:
    return _show_changes(args.new, args.base)


def _refuse(error: Exception | str) -> int:
    print(f"fusedops bench: {error}", file=sys.stderr)
    return 2


def _draw(records: Sequence[Record], folder: Path) -> None:
    try:
        report.draw(records, folder)
    except ImportError as error:
        print(f"no charts: {error}; pip install matplotlib", file=sys.stderr)


def _plot(args: argparse.Namespace) -> int:
    try:
        records = report.read_jsonl(args.file)
    except (OSError, ValueError) as error:
        return _refuse(error)
    wanted = [record for record in records if args.machine in (None, report.machine(record))]
    if len(set(map(report.machine, wanted))) != 1:
        names = " and ".join(sorted(set(map(report.machine, records)))) or "none"
        return _refuse(f"{args.file}: expected records of one machine, which --machine may name, got {names}")
    for path in report.draw(wanted, args.out or args.file.parent):
        print(path)
    return 0
