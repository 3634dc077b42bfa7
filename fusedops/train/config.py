"""What decides the numbers of a run, and the values used when the user gives none."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .model import MODELS

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}
# Smallest and largest value. Every step has a line in a file that is read back whole; torch's seeds have 64 bits, its
# sizes 63. How long a sequence may be the model knows, how large a batch `check_batch`.
RANGES = {"steps": (1, 1_000_000), "batch": (1, 2**63 - 1), "seq": (1, 2**63 - 1), "seed": (0, 2**64 - 1)}


@dataclass(frozen=True)
class Recipe:
    """Usual size of a run: `memory_gib` is the GPU memory that this batch is comfortable in."""

    steps: int
    batch: int
    seq: int
    lr: float
    memory_gib: float


RECIPES = {
    "nano": Recipe(steps=300, batch=16, seq=128, lr=3e-3, memory_gib=1),
    "124M": Recipe(steps=300, batch=16, seq=1024, lr=6e-4, memory_gib=40),
    "355M": Recipe(steps=300, batch=8, seq=1024, lr=3e-4, memory_gib=40),
}


@dataclass(frozen=True)
class TrainConfig:
    """All that decides the numbers of a run: equal configurations see the same initial weights and batches."""

    model: str
    steps: int
    batch: int
    seq: int
    lr: float
    seed: int
    amp: str
    compile: bool
    device: str
    data: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (("model", MODELS), ("amp", AMP_DTYPES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name}: expected an integer from {least:,} to {most:,}, got {value!r}")
        context = MODELS[self.model].context
        if self.seq > context:
            raise ValueError(f"seq: {self.model} reads at most {context} tokens, got {self.seq}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr: expected a positive number, got {self.lr}")

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON values."""
        return asdict(self)


def resolve_device(name: str | None) -> torch.device:
    """The device meant by `cpu`, `cuda` or `cuda:N`, a GPU always with its number; None: a GPU where there is one.

    Raises:
        ValueError: there is no such device, or it is of a kind that is not supported here.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise ValueError(f"device: this torch sees {count} CUDA devices, got {name!r}")
    return torch.device("cuda", index)


def check_batch(config: TrainConfig, text_bytes: int) -> None:
    """Refuse a batch that no step can be made of, before anything is made.

    Args:
        config: the run.
        text_bytes: bytes of text to train on.

    Raises:
        ValueError: the batch has more windows than the text holds side by side, or than can fit the device's memory.
    """
    most, which = min(
        (text_bytes // config.seq, f"windows of {config.seq} bytes that the text holds"),
        (_memory(torch.device(config.device)) // least_bytes(config), "sequences that memory holds"),
    )
    if config.batch > most:
        raise ValueError(f"batch: expected at most {most:,}, the {which}, got {config.batch:,}")


def least_bytes(config: TrainConfig) -> int:
    """Return what a sequence of a batch needs at the very least: inputs of matmuls and of attention, and fp32 logits.

    Enough to refuse what can't be; what is smaller may still not fit.
    """
    model, element = MODELS[config.model], 4 if config.amp == "off" else 2
    return config.seq * (10 * model.width * model.layers * element + 4 * model.vocab)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows does not tell
        return 2**63
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_config(device: torch.device, model: str | None = None) -> TrainConfig:
    """The run for this machine: `nano` on a CPU, `124M` on a GPU, with a batch that fits the GPU's memory."""
    on_gpu = device.type == "cuda"
    model = model or ("124M" if on_gpu else "nano")
    recipe = RECIPES[model]
    batch, amp = recipe.batch, "bf16"
    if on_gpu:
        share = torch.cuda.get_device_properties(device).total_memory / 2**30 / recipe.memory_gib
        batch = min(batch, max(1, int(batch * share)))
        amp = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    return TrainConfig(
        model=model, steps=recipe.steps, batch=batch, seq=recipe.seq, lr=recipe.lr, seed=0, amp=amp,
        compile=False, device=str(device),
    )  # fmt: skip
