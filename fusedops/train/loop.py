"""The training loop, the same for both runs: what differs between them is built in `prepare` and `_update`, no more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from .config import AMP_DTYPES, TrainConfig
from .data import Corpus, training_batch, validation_batches
from .meter import Clock, EnergyMeter
from .model import GPT, MODELS

VARIANTS = ("plain", "fused")
PHASES = ("forward", "backward", "optimizer")

MAX_GRAD_NORM = 1.0
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
WARMUP_STEPS = 10  # left out of the statistics: allocator, autotuning and compilation settle in them
RUN_AHEAD = 32  # steps the host may be ahead of the device
VALIDATION_BATCHES = 20

Record = dict[str, Any]


@dataclass
class Job:
    """One of the two runs: model (eager), its forward (compiled on request), optimizer, scaler."""

    variant: str
    device: torch.device
    model: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def prepare(config: TrainConfig, variant: str) -> Job:
    """Build a run: `plain` is torch alone, `fused` has its norms patched and fusedops' optimizer and scaler."""
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(config.seed)
    with device:
        model: nn.Module = GPT(MODELS[config.model])
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    scaling = config.amp == "fp16"

    optimizer: torch.optim.Optimizer
    if variant == "plain":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=True)
        scaler = torch.amp.GradScaler(device.type, enabled=scaling)
    elif variant == "fused":
        import fusedops

        model = fusedops.patch(model, verbose=False)
        optimizer = fusedops.optim.AdamW(groups, lr=config.lr, betas=BETAS, max_grad_norm=MAX_GRAD_NORM)
        scaler = fusedops.amp.GradScaler(device.type, enabled=scaling)
    else:
        raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
    forward = torch.compile(model) if config.compile else model
    return Job(variant, device, model, forward, optimizer, scaler)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, config.steps // 10)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(
    job: Job,
    config: TrainConfig,
    corpus: Corpus,
    energy: EnergyMeter,
    on_record: Callable[[Record], None],
    *,
    start: int = 0,
    save: Callable[[int], None] | None = None,
    save_every: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train from step `start` until the configured steps are done or `stop()` says so.

    Args:
        job: what to train; changed in place.
        config: the numbers of the run.
        corpus: the text.
        energy: measures the steps after the warm-up.
        on_record: called once a step, in order, when the device has finished it (some steps later than it was issued).
        start: steps already done.
        save: called with the number of steps done, every `save_every` steps and when stopped.
        save_every: steps between two checkpoints; 0: only when stopped.
        stop: asked after each step.

    Returns:
        The number of steps done.
    """
    clock = Clock(job.device)
    pending: deque[tuple[Record, list[Any], Tensor]] = deque()
    timed_from = start + min(WARMUP_STEPS, (config.steps - start) // 2)
    window = done = start

    def drain(leave: int) -> None:
        while pending and (len(pending) > leave or clock.passed(pending[0][1][-1])):
            record, moments, values = pending.popleft()
            clock.wait(moments[-1])
            record["loss"], record["grad_norm"] = (v if math.isfinite(v) else None for v in values.tolist())
            for phase, begin, end in zip(PHASES, moments[:-1], moments[1:], strict=True):
                record[f"{phase}_ms"] = clock.milliseconds(begin, end)
            on_record(record)

    job.model.train()
    moment = clock.now()
    for step in range(start, config.steps):
        if step == timed_from:
            energy.start()
            window, moment = step, clock.now()
        lr = learning_rate(config, step)
        moments, values = _one_step(job, config, corpus, step, lr, clock, moment)
        moment = moments[-1]
        done, timed = step + 1, step >= timed_from
        pending.append(({"variant": job.variant, "step": step, "lr": lr, "timed": timed}, moments, values))
        drain(leave=RUN_AHEAD)

        stopping = stop()
        if save and (stopping or (save_every and done % save_every == 0 and done < config.steps)):
            energy.stop(done - window)
            drain(leave=0)
            save(done)
            if timed:
                energy.start()
            window, moment = done, clock.now()
        if stopping:
            break
    energy.stop(done - window)
    drain(leave=0)
    return done


def _one_step(
    job: Job, config: TrainConfig, corpus: Corpus, step: int, lr: float, clock: Clock, begin: Any
) -> tuple[list[Any], Tensor]:
    """Issue one step; returns the moments around its phases, and (loss, gradient norm) on their way to the CPU."""
    windows = training_batch(corpus, config.seed, step, config.batch, config.seq)
    loss = _loss(job, config, job.forward, windows)
    after_forward = clock.now()
    job.scaler.scale(loss).backward()
    after_backward = clock.now()
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    norm = _update(job)
    values = torch.stack([loss.detach().float(), norm.detach().float().reshape(())]).to("cpu", non_blocking=True)
    return [begin, after_forward, after_backward, clock.now()], values


def _update(job: Job) -> Tensor:
    """Unscale, clip, step, clear the gradients; returns their norm before clipping."""
    if job.variant == "plain":
        job.scaler.unscale_(job.optimizer)
        norm = nn.utils.clip_grad_norm_(job.model.parameters(), MAX_GRAD_NORM)
        job.scaler.step(job.optimizer)
    else:
        job.scaler.step(job.optimizer)
        norm = job.optimizer.grad_norm  # type: ignore[attr-defined]
    job.scaler.update()
    job.optimizer.zero_grad()
    return norm


def _loss(job: Job, config: TrainConfig, forward: Callable[[Tensor, Tensor], Tensor], windows: Tensor) -> Tensor:
    if job.device.type == "cuda":
        windows = windows.pin_memory().to(job.device, non_blocking=True)
    tokens = windows.long()
    dtype = AMP_DTYPES[config.amp]
    with torch.autocast(job.device.type, dtype, enabled=dtype is not None):
        return forward(tokens[:, :-1], tokens[:, 1:])


@torch.no_grad()
def evaluate(job: Job, config: TrainConfig, corpus: Corpus) -> list[float]:
    """Validation loss of each batch, by the eager model: compiling once more would cost more than it saves."""
    job.model.eval()
    batches = validation_batches(corpus, VALIDATION_BATCHES, config.batch, config.seq)
    return torch.stack([_loss(job, config, job.model, windows).float() for windows in batches]).tolist()


def summarise(
    config: TrainConfig, records: list[Record], validation: list[float], memory: int | None, joules: float | None
) -> dict[str, Any]:
    """Figures of one finished run, as JSON values: medians over the timed steps, None for what was not measured."""
    timed = [r for r in records if r["timed"]]
    ms = {phase: median(r[f"{phase}_ms"] for r in timed) for phase in PHASES}
    ms["step"] = median(sum(r[f"{phase}_ms"] for phase in PHASES) for r in timed)
    last = [r["loss"] for r in records[-max(1, len(records) // 20) :] if r["loss"] is not None]
    return {
        "steps": len(records),
        "timed_steps": len(timed),
        "tokens_per_s": config.batch * config.seq / ms["step"] * 1e3,
        "ms": ms,
        "peak_memory_bytes": memory,
        "joules_per_step": joules,
        "train_loss": fmean(last) if last else None,
        "validation_loss": fmean(validation),
        "validation_losses": validation,
    }
