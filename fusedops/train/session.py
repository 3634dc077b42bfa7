"""A run's folder: its plan, its runs one by one, and how both are taken up again after an interruption.

`config.json` is the plan, from which `--resume` reads everything; `metrics.jsonl` has a line for each step of each run;
`<variant>/step-<n>/` is the checkpoint of an unfinished run, `<variant>/result.json` has the figures of a finished one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fusedops import __version__

from . import checkpoint
from .checkpoint import CheckpointError
from .config import TrainConfig
from .data import Corpus
from .loop import Record, evaluate, prepare, summarise, train
from .meter import EnergyMeter, peak_memory, reset_peak_memory


@dataclass(frozen=True)
class Plan:
    """What to run, on which text (by SHA-256), and where the results go."""

    out: Path
    config: TrainConfig
    variants: tuple[str, ...]
    data_sha256: str

    def write(self) -> None:
        """Make the folder and put the plan in it.

        Raises:
            ValueError: the folder holds another run.
        """
        file = self.out / "config.json"
        if file.exists():
            raise ValueError(f"out: {self.out} holds another run; choose another folder or --resume {self.out}")
        self.out.mkdir(parents=True, exist_ok=True)
        saved = {"config": self.config.to_json(), "variants": self.variants, "data_sha256": self.data_sha256}
        _write(file, json.dumps(saved, indent=1) + "\n")

    @classmethod
    def read(cls, out: Path) -> Plan:
        """The plan of an earlier run.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        file = out / "config.json"
        try:
            saved = json.loads(file.read_text())
            return cls(out, TrainConfig(**saved["config"]), tuple(saved["variants"]), str(saved["data_sha256"]))
        except OSError as error:
            raise CheckpointError(f"resume: no run in {out}: {file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"resume: {file} is not a plan of `fusedops train` ({error!r})") from error


def run_variant(
    plan: Plan,
    variant: str,
    corpus: Corpus,
    *,
    stop: Callable[[], bool] = lambda: False,
    save_every: int = 0,
    on_record: Callable[[Record], None] = lambda record: None,
) -> tuple[list[Record], dict[str, Any] | None]:
    """Do one run, or what is left of it.

    Args:
        plan: where and what; `plan.write()` has been called at some time.
        variant: "plain" or "fused".
        corpus: the plan's text.
        stop: asked after each step; true leaves a checkpoint and ends the run.
        save_every: steps between two checkpoints; 0: only when stopped.
        on_record: called with the record of each step, those of an earlier part included.

    Returns:
        The records of all steps done, and the figures of the run; None for these when it was stopped.

    Raises:
        CheckpointError: the checkpoint in the folder is damaged or of another run.
    """
    folder, metrics = plan.out / variant, plan.out / "metrics.jsonl"
    earlier = _read_records(metrics)
    records = [record for record in earlier if record["variant"] == variant]
    finished = folder / "result.json"
    if finished.exists():
        return records, _read_result(finished)

    device = torch.device(plan.config.device)
    if plan.config.compile:
        torch.compiler.reset()  # compiled code of the run before this one, and its guards
    reset_peak_memory(device)
    job = prepare(plan.config, variant)
    parts = (job.model, job.optimizer, job.scaler)
    identity = {"variant": variant, "data_sha256": plan.data_sha256, **plan.config.to_json()}
    saved = checkpoint.latest(folder)
    start = checkpoint.load(saved, *parts, identity) if saved else 0
    records = [record for record in records if record["step"] < start]
    if len(records) != start:
        raise CheckpointError(f"{metrics}: holds {len(records)} steps of {variant}, the checkpoint has done {start}")
    for record in records:
        on_record(record)

    others = [record for record in earlier if record["variant"] != variant]
    _write(metrics, "".join(json.dumps(record) + "\n" for record in others + records))
    energy = EnergyMeter(device)
    with metrics.open("a", buffering=1) as lines:

        def keep(record: Record) -> None:
            records.append(record)
            lines.write(json.dumps(record) + "\n")
            on_record(record)

        def save(step: int) -> None:
            checkpoint.save(folder, step, *parts, identity)

        done = train(
            job, plan.config, corpus, energy, keep, start=start, save=save, save_every=save_every, stop=stop
        )  # fmt: skip
    if done < plan.config.steps:
        return records, None
    memory = peak_memory(device)
    result = summarise(plan.config, records, evaluate(job, plan.config, corpus), memory, energy.joules_per_step())
    folder.mkdir(exist_ok=True)
    _write(finished, json.dumps(result, indent=1) + "\n")
    for old in folder.glob("step-*"):
        shutil.rmtree(old)
    return records, result


class Interrupt:
    """Within it, the first Ctrl-C is only noted, so that the step can end; the second one acts as usual."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Interrupt:
        self._usable = threading.current_thread() is threading.main_thread()
        if self._usable:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._usable:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, self._previous)


def environment(device: torch.device) -> dict[str, Any]:
    """Where a run took place, as JSON values."""
    on_gpu, threads = device.type == "cuda", torch.get_num_threads()
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {threads} thread{'s'[: threads > 1]}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "fusedops": __version__,
    }


def _read_records(metrics: Path) -> list[Record]:
    """The lines of an earlier part; a last line cut off by a crash is left out."""
    if not metrics.exists():
        return []
    records = []
    try:
        for line in metrics.read_text().rpartition("\n")[0].splitlines():
            record = json.loads(line)
            if not (isinstance(record["variant"], str) and isinstance(record["step"], int)):
                raise ValueError(line)
            records.append(record)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{metrics}: line {len(records) + 1}: expected a step's record of `fusedops train`, the file is damaged"
        ) from error
    return records


def _read_result(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}); the file is damaged") from error
    if not (isinstance(result, dict) and result.keys() >= {"ms", "tokens_per_s", "validation_loss"}):
        raise CheckpointError(f"{file}: not a result of `fusedops train`, the file is damaged")
    return result


def _write(file: Path, text: str) -> None:
    """Write so that a reader sees the old content or the new, never a part."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(file)
