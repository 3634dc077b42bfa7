"""Does fusedops train to the same loss? Several seeds, each trained four times; a table and JSON.

Every seed gives one set of initial weights and batches, on which four runs are done:

- plain: plain PyTorch;
- fused: the same with fusedops;
- control: plain again, its initial weights changed by one part in a million. Two runs that differ by rounding alone
  drift apart; this one says how far;
- planted: plain with a learning rate 1.2 times as high. A test that cannot see this one is worth nothing.

What is judged is each run's validation loss less that of the plain run *of the same seed*, so that luck in weights and
batches cancels. The seeds are the sample: windows of the validation text are not, for two models that drifted apart
differ on all of them alike. With n seeds and differences f (fused) and c (control),

    standard error = s / √n,   s² = (Σ (f - mean f)² + Σ c²) / (2 n - 1)

where the control's mean is known to be 0, and nothing of the planted run enters. A run agrees with plain if its mean
difference is at most two standard errors; fused must agree, planted must not. The learning rate is half of the usual
one: near the best rate the loss is flat in it, and no test could see a factor of 1.2.

    python benchmarks/loss_agreement.py --out runs/agreement        # 124M on an H200: 6 minutes; run again to continue
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fusedops._files import read_json, write_text
from fusedops.train.config import AMP_DTYPES, TrainConfig, default_config, resolve_device
from fusedops.train.data import Corpus, load_corpus
from fusedops.train.loop import evaluate, prepare, train
from fusedops.train.meter import EnergyMeter, reset_peak_memory
from fusedops.train.model import MODELS
from fusedops.train.session import environment

LIMIT = 2.0  # standard errors


@dataclass(frozen=True)
class Arm:
    variant: str
    lr_factor: float = 1.0
    nudge: float = 0.0  # relative change of the initial weights


ARMS = {
    "plain": Arm("plain"),
    "fused": Arm("fused"),
    "control": Arm("plain", nudge=1e-6),
    "planted": Arm("plain", lr_factor=1.2),
}


def judge(losses: dict[str, list[float]]) -> dict[str, Any]:
    """Compare the arms, given each one's validation losses in the same order of seeds."""
    difference = {
        arm: [loss - plain for loss, plain in zip(losses[arm], losses["plain"], strict=True)]
        for arm in ARMS
        if arm != "plain"
    }
    seeds, fused_mean = len(losses["plain"]), fmean(difference["fused"])
    squares = sum((d - fused_mean) ** 2 for d in difference["fused"]) + sum(d**2 for d in difference["control"])
    error = math.sqrt(squares / (2 * seeds - 1) / seeds)
    arms = {
        arm: {
            "differences": values,
            "mean": fmean(values),
            "own_standard_error": stdev(values) / math.sqrt(seeds),
            "agrees": abs(fmean(values)) <= LIMIT * error,
        }
        for arm, values in difference.items()
    }
    passed = arms["fused"]["agrees"] and not arms["planted"]["agrees"]
    return {"standard_error": error, "limit": LIMIT * error, "arms": arms, "passed": passed}


def train_arm(config: TrainConfig, arm: Arm, corpus: Corpus) -> dict[str, Any]:
    """Train one arm and return its losses."""
    config = dataclasses.replace(config, lr=config.lr * arm.lr_factor)
    reset_peak_memory(torch.device(config.device))  # gives the memory of the arm before back
    began = time.perf_counter()
    job = prepare(config, arm.variant)
    if arm.nudge:
        with torch.no_grad():
            for param in job.model.parameters():
                param.add_(param * torch.randn_like(param), alpha=arm.nudge)
    records: list[dict[str, Any]] = []
    train(job, config, corpus, EnergyMeter(job.device), records.append)
    validation = evaluate(job, config, corpus)
    return {
        "config": config.to_json(),
        "data_sha256": corpus.sha256,
        "validation_loss": fmean(validation),
        "validation_losses": validation,
        "training_losses": [record["loss"] for record in records],
        "seconds": time.perf_counter() - began,
    }


def run_or_read(file: Path, config: TrainConfig, arm: Arm, corpus: Corpus) -> dict[str, Any]:
    """The arm's result, from an earlier call where there was one."""
    if file.exists():
        result = read_json(file)
        expected = dataclasses.replace(config, lr=config.lr * arm.lr_factor).to_json()
        if result["config"] != expected or result["data_sha256"] != corpus.sha256:
            raise SystemExit(f"{file} is of another configuration or text; choose another --out")
        return result
    result = train_arm(config, arm, corpus)
    write_text(file, json.dumps(result))
    return result


def report(seeds: list[int], losses: dict[str, list[float]], verdict: dict[str, Any]) -> Table:
    table = Table(title=f"validation loss, less plain's; standard error {verdict['standard_error']:.5f}")
    table.add_column("seed")
    table.add_column("plain", justify="right")
    arms = verdict["arms"]
    for arm in arms:
        table.add_column(arm, justify="right")
    for i, seed in enumerate(seeds):
        table.add_row(str(seed), f"{losses['plain'][i]:.4f}", *(f"{arms[arm]['differences'][i]:+.5f}" for arm in arms))
    table.add_section()
    table.add_row("mean", f"{fmean(losses['plain']):.4f}", *(f"{arms[arm]['mean']:+.5f}" for arm in arms))
    table.add_row("verdict", "", *("agrees" if arms[arm]["agrees"] else "differs" for arm in arms))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--lr", type=float, help="default: half of the model's usual rate")
    parser.add_argument("--amp", choices=AMP_DTYPES)
    parser.add_argument("--device", help="cpu, cuda or cuda:N")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("runs") / time.strftime("agreement-%Y-%m-%d_%H%M%S"))
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: expected at least 2; one difference has no spread")

    args.device = str(resolve_device(args.device))
    config = default_config(torch.device(args.device), args.model)
    config = dataclasses.replace(config, lr=config.lr / 2)
    fields = [field.name for field in dataclasses.fields(TrainConfig) if hasattr(args, field.name)]
    config = dataclasses.replace(config, **{f: getattr(args, f) for f in fields if getattr(args, f) is not None})
    corpus = load_corpus(config.data, config.seq)
    args.out.mkdir(parents=True, exist_ok=True)

    seeds, console = list(range(args.seeds)), Console()
    losses: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        for name, arm in ARMS.items():
            file = args.out / f"seed-{seed}-{name}.json"
            result = run_or_read(file, dataclasses.replace(config, seed=seed), arm, corpus)
            losses[name].append(result["validation_loss"])
            console.print(f"seed {seed} {name}: {result['validation_loss']:.4f} ({result['seconds']:.0f} s)")

    verdict = judge(losses)
    saved = {"config": config.to_json(), "environment": environment(torch.device(config.device)), "losses": losses}
    write_text(args.out / "agreement.json", json.dumps({**saved, **verdict}, indent=1) + "\n")
    console.print(report(seeds, losses, verdict))
    console.print("PASS" if verdict["passed"] else "FAIL: fused must agree with plain, planted must not")
    console.print(f"Results: {args.out}", soft_wrap=True)
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
