"""Draws of optimizer steps: lists of tensors, dtypes, options, gradients that come and go; judged step by step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from .. import testing
from ..dispatch import refusals
from ..optim.base import FusedOptimizer
from ..optim.calls import describe
from ..registry import Memory, OptimSpec, short
from ..testing_optim import judge_step
from .draw import draw_memory, factors, log_uniform
from .run import Found, pooled

_F32, _F16, _BF16, _F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# How a 16-bit parameter keeps small updates.
MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "master": {"master_weights": True},
    "kahan": {"kahan_sum": True},
    "stochastic": {"bf16_stochastic_round": True},
}
# Parameter dtype, state dtype, mode.
MIXES = (
    (_F32, _F32, "plain"), (_F32, _BF16, "plain"), (_F32, _F16, "plain"), (_F64, _F64, "plain"),
    *((_BF16, state, mode) for state in (_BF16, _F32) for mode in MODES),
    *((_F16, state, mode) for state in (_F16, _F32) for mode in MODES if mode != "stochastic"),
)  # fmt: skip


@dataclass(frozen=True)
class OptimCell:
    """Where steps are counted: an optimizer on a backend with the dtypes of parameters and state, and a mode."""

    spec: OptimSpec
    backend: str
    param: torch.dtype
    state: torch.dtype
    mode: str

    @property
    def name(self) -> str:
        """As ``adamw/native/bf16-fp32-master``."""
        mode = "" if self.mode == "plain" else f"-{self.mode}"
        return f"{self.spec.name}/{self.backend}/{short(self.param)}-{short(self.state)}{mode}"

    @property
    def options(self) -> dict[str, Any]:
        """What tells the optimizer of it."""
        return {**MODES[self.mode], "state_dtype": None if self.state is self.param else self.state}

    def refused(self, device: str) -> str | None:
        """Return why the backend can't be held to such a step, or None."""
        kind = torch.device(device).type
        if any((self.backend, kind, dtype) in testing.EXTRA_ULPS for dtype in (self.param, self.state)):
            return "it rounds in another way there"
        call = describe(self.spec.name, [torch.empty(8, dtype=self.param, device=device)], **self.options)
        return "; ".join(refusals(self.backend, call)) or None


@dataclass(frozen=True)
class Numbers:
    """One tensor's shape and place."""

    shape: tuple[int, ...]
    memory: Memory


def run(random: Random, cell: OptimCell, device: str, elements: int, irregular: bool, large: bool) -> Found | None:
    """Draw an optimizer and its gradients, let it step one to three times, judge every tensor.

    Args:
        random: where every choice comes from.
        cell: optimizer, backend, dtypes, mode.
        device: where it runs and is judged.
        elements: most elements of a tensor.
        irregular: whether parameters and gradients are strided, shifted or transposed.
        large: a tensor of at least 16 MiB among them.

    Returns:
        What was found, or None where too little moved for a judgement.
    """
    generator = torch.Generator().manual_seed(random.getrandbits(31))
    noise = pooled(device)
    spread = 10 ** random.uniform(-2, 1)

    def tensor(numbers: Numbers, scale: float, dtype: torch.dtype) -> Tensor:
        return testing.lay_out((noise(numbers.shape, generator) * scale).to(dtype), numbers.memory)

    places = [_draw_numbers(random, elements, irregular) for _ in range(random.choice((1, 1, 2, 3, 5, 12, 40)))]
    if large:
        places[0] = Numbers((2**24 // cell.param.itemsize + random.randrange(2**20),), places[0].memory)
    params = [torch.nn.Parameter(tensor(place, spread, cell.param)) for place in places]
    grad_dtype = _draw_grad_dtype(random, cell)
    if grad_dtype is not cell.param:
        for p in params:
            p.grad_dtype = grad_dtype  # of PyTorch 2.13
    options = _draw_options(random, cell, spread)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of updates that round away
        optimizer = cell.spec.optimizer(params, backend=cell.backend, **options)  # type: ignore[call-arg]
    assert isinstance(optimizer, FusedOptimizer)
    scale = random.choice((None, None, 64.0))
    if scale is not None:
        optimizer.grad_scale, optimizer.found_inf = (torch.full((), v, device=device) for v in (scale, 0.0))
    judged, tensors = [], [p.detach() for p in params]
    for _ in range(random.randint(1, 3)):
        size = (scale or 1.0) * 10 ** (
            random.uniform(-2, 0) if _F16 in (cell.param, cell.state, grad_dtype) else random.uniform(-4, 3)
        )
        for p, place in zip(params, places, strict=True):
            place = Numbers(place.shape, _draw_place(random, irregular, expand=True))
            p.grad = None if random.random() < 0.1 and len(params) > 1 else tensor(place, size, grad_dtype)
            tensors += [] if p.grad is None else [p.grad]
        if all(p.grad is None or not p.numel() for p in params):
            continue
        try:
            with testing.poisoned():
                judged += judge_step(optimizer, grad_scale=scale)
        except ValueError as error:
            if "4 ulp" not in str(error):
                raise
            break
    problems = [f"{item.name}: {item.problem}" for item in judged if item.problem]
    if not judged:
        return None
    return Found(
        backward=False,
        irregular=any(not t.is_contiguous() or t.data_ptr() % 16 for t in tensors),
        large=max(t.nbytes for t in tensors) >= 2**24,
        ratio=max(item.worst_bound for item in judged),
        problem="\n  ".join([f"{cell.name}, {options}, grad_scale {scale}", *problems]) if problems else None,
    )


def _draw_numbers(random: Random, elements: int, irregular: bool) -> Numbers:
    count = 0 if random.random() < 0.05 else log_uniform(random, 1, elements)
    shape = () if count == 1 and random.random() < 0.5 else factors(random, count, random.choice((1, 1, 2, 3, 4)))
    return Numbers(shape, _draw_place(random, irregular))


def _draw_place(random: Random, irregular: bool, expand: bool = False) -> Memory:
    if not irregular or random.random() < 0.3:
        return Memory()
    memory = draw_memory(random)
    return Memory(memory.offset, memory.step, memory.gaps, memory.roll, memory.expand and expand)


def _draw_grad_dtype(random: Random, cell: OptimCell) -> torch.dtype:
    """Draw the dtype of gradients: the parameter's but for one in five, where this PyTorch allows another."""
    other = random.choice((_F32, _F16, _BF16)) if random.random() < 0.2 else cell.param
    return other if cell.param is not _F64 and hasattr(Tensor, "grad_dtype") else cell.param


def _draw_options(random: Random, cell: OptimCell, spread: float) -> dict[str, Any]:
    """Draw options under which a parameter without a master moves by several ulp, so that the step shows."""
    low, high = (-6.0, 0.0) if cell.mode in ("master", "kahan") else (-1.2, 0.0)
    options: dict[str, Any] = {"lr": spread * 10 ** random.uniform(low, high)}
    if random.random() < 0.5:
        options |= {
            "betas": (random.choice((0.0, 0.5, 0.9, 0.95)), random.choice((0.9, 0.95, 0.999))),
            "eps": 10 ** random.uniform(-10, -6),
            "weight_decay": random.choice((0.0, 0.01, 0.3)),
        }
    if random.random() < 0.3:
        options["max_grad_norm"] = 10 ** random.uniform(-2, 2)
    if random.random() < 0.3:
        options["lr"] = torch.tensor(options["lr"])
    return {**options, **random.choice(cell.spec.options), **cell.options}
