"""A run's folder: its plan, its runs one by one, and how both are taken up again after an interruption.

`config.json` is the plan, from which `--resume` reads everything; `metrics.jsonl` has a line for each step of each run;
`<variant>/step-<n>/` is the checkpoint of an unfinished run, `<variant>/result.json` has the figures of a finished one.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fusedops import __version__

from .._files import locked, read_json, read_records, write_text
from . import checkpoint
from .checkpoint import CheckpointError
from .config import TrainConfig, resolve_device
from .data import Corpus
from .loop import PHASES, VARIANTS, Record, evaluate, prepare, summarise, train
from .meter import EnergyMeter, peak_memory, reset_peak_memory

LOCK = ".lock"  # held by the process that works in the run's folder


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
        saved = {"config": self.config.to_json(), "variants": self.variants, "data_sha256": self.data_sha256}
        self.out.mkdir(parents=True, exist_ok=True)
        with locked(self.out / LOCK, wait=True):
            if file.exists():
                raise ValueError(f"out: {self.out} holds another run; choose another folder or --resume {self.out}")
            write_text(file, json.dumps(saved, indent=1) + "\n")

    @classmethod
    def read(cls, out: Path) -> Plan:
        """The plan of an earlier run.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        file = out / "config.json"
        try:
            saved = read_json(file)
            config = TrainConfig(**saved["config"])
            if str(resolve_device(config.device)) != config.device:
                raise ValueError(f"device: {config.device!r}")
            if not saved["variants"] or not set(saved["variants"]) <= set(VARIANTS):
                raise ValueError(f"variants: expected any of {', '.join(VARIANTS)}, got {saved['variants']!r}")
            return cls(out, config, tuple(saved["variants"]), str(saved["data_sha256"]))
        except OSError as error:
            raise CheckpointError(f"resume: no run in {out}: {file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"resume: {file} is not a plan of `fusedops train` ({error})") from error


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
        ValueError: another process works in the folder.
    """
    with locked(plan.out / LOCK, wait=False) as alone:
        if not alone:
            raise ValueError(f"out: another process trains in {plan.out}; wait for its end or choose another folder")
        return _run_variant(plan, variant, corpus, stop, save_every, on_record)


def _run_variant(
    plan: Plan,
    variant: str,
    corpus: Corpus,
    stop: Callable[[], bool],
    save_every: int,
    on_record: Callable[[Record], None],
) -> tuple[list[Record], dict[str, Any] | None]:
    folder, metrics = plan.out / variant, plan.out / "metrics.jsonl"
    earlier = _read_records(metrics)
    records = [record for record in earlier if record["variant"] == variant]
    finished = folder / "result.json"
    if finished.exists():
        with _told_how_to_begin_again(variant, folder):
            _check_steps(metrics, variant, records, plan.config.steps)
        return records, _read_result(finished)

    device = torch.device(plan.config.device)
    if plan.config.compile:
        torch.compiler.reset()  # compiled code of the run before this one, and its guards
    reset_peak_memory(device)
    job = prepare(plan.config, variant)
    parts = (job.model, job.optimizer, job.scaler)
    identity = {"variant": variant, "data_sha256": plan.data_sha256, **plan.config.to_json()}
    saved = checkpoint.latest(folder)
    with _told_how_to_begin_again(variant, folder):
        start = checkpoint.load(saved, *parts, identity) if saved else 0
        records = [record for record in records if record["step"] < start]
        _check_steps(metrics, variant, records, start)
    for record in records:
        on_record(record)

    others = [record for record in earlier if record["variant"] != variant]
    write_text(metrics, "".join(json.dumps(record) + "\n" for record in others + records))
    energy = EnergyMeter(device)
    with metrics.open("a", buffering=1) as lines:

        def keep(record: Record) -> None:
            records.append(record)
            lines.write(json.dumps(record) + "\n")
            on_record(record)

        def save(step: int) -> None:
            os.fsync(lines.fileno())  # a checkpoint without the records of its steps could not be resumed
            checkpoint.save(folder, step, *parts, identity)

        done = train(
            job, plan.config, corpus, energy, keep, start=start, save=save, save_every=save_every, stop=stop
        )  # fmt: skip
        os.fsync(lines.fileno())  # nor could a finished run's, without theirs
    if done < plan.config.steps:
        return records, None
    memory = peak_memory(device)
    result = summarise(plan.config, records, evaluate(job, plan.config, corpus), memory, energy.joules_per_step())
    folder.mkdir(exist_ok=True)
    write_text(finished, json.dumps(result, indent=1) + "\n")
    checkpoint.remove_all(folder)
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
    try:
        records = dict(read_records(metrics))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{error}; the file is damaged") from error
    for number, record in records.items():
        if not _is_step(record):
            raise CheckpointError(
                f"{metrics}:{number}: expected a step's record of `fusedops train`, the file is damaged"
            )
    return list(records.values())


def _check_steps(metrics: Path, variant: str, records: list[Record], steps: int) -> None:
    """Raise CheckpointError unless there is a record of each of so many first steps, in order."""
    placed = sum(record["step"] == step for step, record in enumerate(records))
    if not placed == len(records) == steps:
        raise CheckpointError(
            f"{metrics}: expected the {steps} steps of {variant} that are done, in order, got {len(records)} records, "
            f"{placed} of them in their place"
        )


@contextmanager
def _told_how_to_begin_again(variant: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; to begin the {variant} run again, delete {folder}") from error


def _is_step(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and isinstance(record.get("variant"), str)
        and type(record.get("step")) is int
        and isinstance(record.get("timed"), bool)
        and all(_is_number(record.get(f"{phase}_ms")) for phase in PHASES)
        and all(record.get(key, "") is None or _is_number(record.get(key)) for key in ("loss", "grad_norm"))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_result(file: Path) -> dict[str, Any]:
    try:
        result = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{error}; the file is damaged: delete it to do that run again") from error
    sound = (
        isinstance(result, dict)
        and isinstance(result.get("ms"), dict)
        and all(_is_number(result["ms"].get(phase)) for phase in (*PHASES, "step"))
        and all(_is_number(result.get(key)) for key in ("tokens_per_s", "validation_loss"))
        and all(isinstance(result.get(key), int | float | None) for key in ("peak_memory_bytes", "joules_per_step"))
    )
    if not sound:
        raise CheckpointError(f"{file}: not a result of `fusedops train`, the file is damaged")
    return result
