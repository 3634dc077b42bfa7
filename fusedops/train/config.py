"""What decides the numbers of a run, and the values used when the user gives none."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .model import MODELS

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}


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
        for name in ("steps", "batch", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        context = MODELS[self.model].context
        if self.seq > context:
            raise ValueError(f"seq: {self.model} reads at most {context} tokens, got {self.seq}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr: expected a positive number, got {self.lr}")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")

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
