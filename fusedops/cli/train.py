"""`fusedops train`: the same GPT on the same text, with plain PyTorch and with fusedops, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fusedops._files import write_text
from fusedops.train import plots
from fusedops.train.config import AMP_DTYPES, TrainConfig, check_batch, default_config, resolve_device
from fusedops.train.data import Corpus, load_corpus
from fusedops.train.loop import PHASES, VARIANTS, Record
from fusedops.train.model import MODELS
from fusedops.train.session import Interrupt, Plan, environment, run_variant

# The options that decide the numbers; None means not given, and `--resume` then takes the run's own.
CONFIG_OPTIONS = [field.name for field in dataclasses.fields(TrainConfig)]
MEASURED = Path(plots.__file__).with_name("measured.json")  # a summary.json of a GPU run, with its commit added
LABELS = plots.LABELS
# Validation losses further apart are no work of rounding, in nats. Plain runs of 60 to 300 steps of 32 to 2048 tokens,
# from weights that differed by a rounding to bf16, ended up to 0.5 apart.
NEVER_BY_ROUNDING = 2.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's options."""
    parser = subparsers.add_parser(
        "train",
        help="train a GPT on real text, plain PyTorch against fusedops",
        description="Train a GPT twice, from equal weights on equal batches: with plain PyTorch, then with fusedops.",
    )
    parser.add_argument("--model", choices=MODELS, help="default: nano on a CPU, 124M on a GPU")
    parser.add_argument("--steps", type=int, help="steps of each run (default: 300)")
    parser.add_argument("--batch", type=int, help="sequences a step (default: by model and GPU memory)")
    parser.add_argument("--seq", type=int, help="tokens a sequence (default: by model)")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: by model)")
    parser.add_argument("--seed", type=int, help="seed of the weights and batches (default: 0)")
    parser.add_argument("--amp", choices=AMP_DTYPES, help="autocast dtype (default: bf16, fp16 on GPUs without bf16)")
    parser.add_argument("--compile", action="store_true", default=None, help="run both models under torch.compile")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--data", metavar="PATH", help="text file or folder (default: this Python's standard library)")
    parser.add_argument("--only", choices=VARIANTS, help="do one of the two runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go (default: runs/<date>)")
    parser.add_argument("--save-every", type=int, default=0, metavar="N", help="leave a checkpoint every N steps")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the interrupted run in DIR")


def run(args: argparse.Namespace) -> int:
    """Do both runs, write and print the results; 130 when interrupted, 2 when it cannot run."""
    console = Console(highlight=False, markup=False)
    try:
        if args.save_every < 0:
            raise ValueError(f"save-every: expected at least 0, got {args.save_every}")
        plan, corpus = _resumed(args) if args.resume else _new(args)
        return _run(console, plan, corpus, args.save_every)
    except ValueError as error:
        print(f"fusedops train: {error}", file=sys.stderr)
    except OSError as error:
        print(f"fusedops train: cannot write the run: {error}", file=sys.stderr)
    except torch.OutOfMemoryError as error:
        print(f"fusedops train: out of GPU memory, try a smaller --batch ({error})", file=sys.stderr)
    return 2


def _new(args: argparse.Namespace) -> tuple[Plan, Corpus]:
    device = resolve_device(args.device)
    config = dataclasses.replace(default_config(device, args.model), **_given(args))
    corpus = load_corpus(config.data, config.seq)
    check_batch(config, len(corpus.train))
    out = args.out or Path("runs") / time.strftime("%Y-%m-%d_%H%M%S")
    plan = Plan(out, config, (args.only,) if args.only else VARIANTS, corpus.sha256)
    plan.write()
    return plan, corpus


def _resumed(args: argparse.Namespace) -> tuple[Plan, Corpus]:
    plan = Plan.read(args.resume)
    for name, value in _given(args).items():
        stored = getattr(plan.config, name)
        if value != stored:
            raise ValueError(f"{name}: the run in {plan.out} has {stored!r}, got {value!r}; leave it out to resume")
    if args.only and (args.only,) != plan.variants:
        raise ValueError(f"only: the run in {plan.out} does {' and '.join(plan.variants)}, got {args.only!r}")
    if args.out and args.out != plan.out:
        raise ValueError(f"out: a resumed run stays in {plan.out}, got {args.out}")
    corpus = load_corpus(plan.config.data, plan.config.seq)
    if corpus.sha256 != plan.data_sha256:
        raise ValueError(f"data: {corpus.name} has changed since the run in {plan.out} began")
    check_batch(plan.config, len(corpus.train))
    return plan, corpus


def _given(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in CONFIG_OPTIONS if getattr(args, name) is not None}
    if "data" in given:
        given["data"] = str(Path(given["data"]).absolute())
    if "device" in given:
        given["device"] = str(resolve_device(given["device"]))
    return given


def _run(console: Console, plan: Plan, corpus: Corpus, save_every: int) -> int:
    config, where = plan.config, environment(torch.device(plan.config.device))
    title = f"{config.model}, {config.batch}×{config.seq} tokens a step, amp {config.amp}, {where['device']}"
    if config.compile:
        title += ", compiled"
    console.print(f"{title}\n{config.steps} steps on {corpus.name}: {len(corpus.train):,} bytes", soft_wrap=True)

    records: dict[str, list[Record]] = {}
    results: dict[str, dict[str, Any]] = {}
    with Interrupt() as interrupt, _Bars(console, config.steps) as bars:
        for variant in plan.variants:
            own, result = run_variant(
                plan, variant, corpus, stop=lambda: interrupt.seen, save_every=save_every, on_record=bars.show(variant)
            )  # fmt: skip
            if result is None:
                break
            records[variant], results[variant] = own, result
    if result is None:
        console.print(f"Stopped after step {len(own)} of {LABELS[variant]}, with a checkpoint. To continue:")
        console.print(f"  fusedops train --resume {plan.out}", soft_wrap=True)
        return 130

    data = {"name": corpus.name, "train_bytes": len(corpus.train), "sha256": corpus.sha256}
    summary = {"config": config.to_json(), "environment": where, "data": data, "results": results}
    write_text(plan.out / "summary.json", json.dumps(summary, indent=1) + "\n")
    plots.plot_loss(records, results, title, plan.out / "loss.png")
    plots.plot_steps(results, title, plan.out / "steps.png")
    console.print(_table(results))
    if config.device == "cpu":
        console.print(_cpu_note(results))
    console.print(f"Results: {plan.out}", soft_wrap=True)
    return 0


class _Bars:
    """A progress bar a run; nothing at all where the output is no terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<13}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._steps = steps

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, variant: str) -> Callable[[Record], None]:
        """A new bar, and what moves it."""
        task = self._progress.add_task(LABELS[variant], total=self._steps, note="")

        def update(record: Record) -> None:
            ms = sum(record[f"{phase}_ms"] for phase in PHASES)
            loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
            self._progress.update(task, completed=record["step"] + 1, note=f"loss {loss}  {ms:.0f} ms/step")

        return update


# Row title → figure of a result (None: not measured), its format, and how two of them are compared.
_ROWS: list[tuple[str, Callable[[dict[str, Any]], float | None], str, str]] = [
    ("tokens/s", lambda r: r["tokens_per_s"], "{:,.0f}", "ratio"),
    ("ms/step", lambda r: r["ms"]["step"], "{:.2f}", "ratio"),
    *((f"  {phase}", lambda r, phase=phase: r["ms"][phase], "{:.2f}", "ratio") for phase in PHASES),
    ("peak memory, GiB", lambda r: r["peak_memory_bytes"] and r["peak_memory_bytes"] / 2**30, "{:.2f}", "ratio"),
    ("energy a step, J", lambda r: r["joules_per_step"], "{:.2f}", "ratio"),
    ("validation loss", lambda r: r["validation_loss"], "{:.4f}", "difference"),
]


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title_justify="left")
    table.add_column("median of the timed steps")
    for variant in results:
        table.add_column(LABELS[variant], justify="right")
    both = len(results) == 2
    if both:
        table.add_column("fusedops / plain", justify="right")
    for title, figure, form, compare in _ROWS:
        values = [figure(result) for result in results.values()]
        cells = ["not measured" if value is None else form.format(value) for value in values]
        if both:
            plain, fused = values
            if plain is None or fused is None:
                cells.append("")
            else:
                cells.append(f"{fused / plain:.3f} ×" if compare == "ratio" else f"{fused - plain:+.4f}")
        table.add_row(title, *cells)
    return table


def _cpu_note(results: dict[str, dict[str, Any]]) -> str:
    """What a run without a GPU shows, and what was measured on one."""
    if len(results) < 2:
        return "A run on a CPU says nothing about speed on a GPU."
    losses = [results[variant]["validation_loss"] for variant in VARIANTS]
    if math.isfinite(losses[0]) and not abs(losses[1] - losses[0]) <= NEVER_BY_ROUNDING:  # inf and NaN among them
        return (
            f"The validation loss is {losses[0]:.4f} with plain PyTorch, {losses[1]:.4f} with fusedops: please report "
            "this."
        )
    note = (
        "Times on a CPU say nothing about a GPU's. The validation losses are "
        f"{abs(losses[1] - losses[0]):.4f} apart. Two runs that differ by rounding alone drift apart as well; "
        "benchmarks/loss_agreement.py, in the source, tells one from the other over several seeds."
    )
    if not MEASURED.exists():
        return note
    measured = json.loads(MEASURED.read_text())
    config, runs = measured["config"], measured["results"]
    plain, fused = runs["plain"], runs["fused"]
    return (
        f"{note} Measured on an {measured['environment']['device']} (commit {measured['commit']}, {config['model']}, "
        f"{config['batch']}×{config['seq']} tokens a step, amp {config['amp']}): "
        f"{plain['ms']['step']:.1f} ms a step with plain PyTorch, {fused['ms']['step']:.1f} with fusedops; "
        f"validation losses of one seed {plain['validation_loss']:.4f} and {fused['validation_loss']:.4f}."
    )
