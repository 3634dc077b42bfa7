"""`fusedops bench`: time ops and optimizers beside torch and other packages, after checking that they are right."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..bench import ops, optimizers, peers, report
from ..bench.records import Record, facts
from ..config import BACKENDS
from . import parse_device

_DEFAULT_PEERS = ("torch", "liger", "quack", "flash", "foreach", "apex-adam")
_MOST_REPEATS = 1_000_000  # on a GPU two events each


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand, with one of its own for every family of ops and of optimizers, and ``plot``."""
    parser = subparsers.add_parser("bench", help="time ops and optimizers beside other packages", description=__doc__)
    families = parser.add_subparsers(metavar="FAMILY", required=True)
    for family, names in ops.families().items():
        _add_ops(_add_common(families.add_parser(family, help=f"time {', '.join(names)}"), names, peers.OPS), names)
    for family, names in optimizers.families().items():
        _add_optimizers(
            _add_common(families.add_parser(family, help=f"time {', '.join(names)}"), names, peers.OPTIMIZERS), names
        )
    plot = families.add_parser("plot", help="draw the charts of a results file")
    plot.add_argument("file", type=Path, help="JSON lines written by an earlier run")
    plot.add_argument("--out", type=Path, help="folder for the PNG files (default: that of FILE)")
    plot.set_defaults(bench=_plot)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; 1 when a contender computes something else than it should, 2 when nothing can be written."""
    bench: Callable[[argparse.Namespace], int] = args.bench
    try:
        return bench(args)
    except OSError as error:
        print(f"fusedops bench: cannot write the results: {error}", file=sys.stderr)
        return 2


def _add_common(
    parser: argparse.ArgumentParser, names: Sequence[str], known_peers: Mapping[str, object]
) -> argparse.ArgumentParser:
    add = parser.add_argument
    add("--op", type=_listed(*names), help="which of " + ", ".join(names))
    add("--backend", type=_listed(*BACKENDS), help="our backends (default: all that can run here)")
    peer_names = (*known_peers, *peers.ALIASES)
    peer_help = f"any of {', '.join(peer_names)} (default: the installed ones that need no compiling)"
    add("--vs", type=_listed(*peer_names), metavar="PEERS", help=peer_help)
    add("--device", type=parse_device, help="default: the GPU if there is one")
    add("--repeat", type=_repeats, metavar="N", help="repetitions of each cell (default 100; optimizers 30)")
    add("--quick", action="store_true", help="few sizes, few repetitions")
    add("--energy", action="store_true", help="also measure energy, over windows of 2 s")
    add("--out", type=Path, help="folder for the results (default runs/<date>)")
    add("--append", type=_results_file, metavar="FILE", help="also append the records to a results file")
    add("--commit", help="commit of the source, where git can't tell (or FUSEDOPS_COMMIT)")
    return parser


def _add_ops(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    parser.add_argument("--shape", type=_shape, action="append", metavar="ROWSxHIDDEN", help="may be repeated")
    parser.add_argument("--dtype", type=_listed(*ops.DTYPES), help="any of " + ", ".join(ops.DTYPES))
    parser.add_argument("--direction", type=_listed(*ops.DIRECTIONS), default=list(ops.DIRECTIONS))
    parser.set_defaults(bench=_bench_ops, names=names)


def _add_optimizers(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    parser.add_argument("--model", type=_model, action="append", metavar="MODEL",
                        help=f"{', '.join(optimizers.MODELS)} or COUNTxELEMENTS; may be repeated")  # fmt: skip
    parser.add_argument("--dtype", type=_listed(*optimizers.CONFIGS), default=list(optimizers.CONFIGS))
    parser.add_argument("--clip", action="store_true", help="with the norm of all gradients and clipping")
    parser.set_defaults(bench=_bench_optimizers, names=names)


def _listed(*choices: str) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated choices."""

    def parse(text: str) -> list[str]:
        given = [part for part in text.split(",") if part]
        if unknown := set(given) - set(choices):
            raise argparse.ArgumentTypeError(f"expected any of {', '.join(choices)}, got {', '.join(unknown)}")
        return given

    return parse


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) < 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected ROWSxHIDDEN, as in 8192x4096, got {text!r}")
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
    device = _device(args)
    options = ops.Options(
        device,
        args.shape or ops.default_shapes(device, args.quick),
        args.dtype or (["bf16", "amp"] if args.quick else ["bf16", "amp", "fp32"]),
        args.direction,
        args.backend or ops.usable_backends(device),
        _peers(args, peers.OPS),
        args.repeat or (30 if args.quick else 100),
        args.energy,
    )
    return _finish(args, device, ops.run(args.op or args.names, options))


def _bench_optimizers(args: argparse.Namespace) -> int:
    device = _device(args)
    models = ["1000x1024"] if args.quick or device.type == "cpu" else list(optimizers.MODELS)
    # Adam differs from AdamW by where one product is added: its time is the same.
    names = args.op or [name for name in args.names if name == "adamw"] or args.names
    options = optimizers.Options(
        device,
        args.model or models,
        args.dtype,
        args.clip,
        args.backend or ops.usable_backends(device),
        _peers(args, peers.OPTIMIZERS),
        args.repeat or (10 if args.quick else 30),
        args.energy,
    )
    return _finish(args, device, optimizers.run(names, options))


def _finish(args: argparse.Namespace, device: torch.device, found: Iterator[Record]) -> int:
    """Collect, write and show the records of a run."""
    out = args.out or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    shared, records = facts(device, args.commit), []
    for record in found:
        if record["status"] == "n/a" and not record["ours"] and args.vs is None:
            continue  # a package that nobody asked for and that is not there
        if sys.stderr.isatty():
            done = " ".join(record[key] for key in ("op", "direction", "dtype", "backend"))
            print(f"\033[K{done}", end="\r", file=sys.stderr)
        records.append({**record, **shared})
        report.write_jsonl(records[-1:], out / "bench.jsonl")
        if args.append:
            report.write_jsonl(records[-1:], args.append)
    report.print_tables(records)
    if device.type == "cpu":
        print(f"Wall time on a CPU, threads: {torch.get_num_threads()}, warm caches.")
    charts = _draw(records, out)
    print(charts[-1] if charts else out / "bench.jsonl")
    return 1 if any(record["status"] == "FAIL" for record in records) else 0


def _draw(records: Sequence[Record], folder: Path) -> list[Path]:
    try:
        return report.draw(records, folder)
    except ImportError as error:
        print(f"no charts: {error}; pip install matplotlib", file=sys.stderr)
        return []


def _plot(args: argparse.Namespace) -> int:
    try:
        records = report.read_jsonl(args.file)
    except (OSError, ValueError) as error:
        print(f"fusedops bench plot: {error}", file=sys.stderr)
        return 2
    for path in report.draw(records, args.out or args.file.parent):
        print(path)
    return 0
