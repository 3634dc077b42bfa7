"""Speed of every optimizer, from its record alone, over the parameter lists of real models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import testing
from ..registry import OPTIMS, OptimSpec, short
from . import peers, timing
from .peers import Stepper
from .records import Record, speed, unmeasured

Shapes = list[tuple[int, ...]]
# dtype of the parameters and gradients, dtype of the moments, fp32 masters?
CONFIGS = {
    "fp32": (torch.float32, torch.float32, False),
    "bf16-master": (torch.bfloat16, torch.float32, True),
    "bf16": (torch.bfloat16, torch.bfloat16, False),
}
_HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
_MAX_NORM = 1.0
# Judged in float64: so many parameters, the largest and the smallest among them, and of each so many elements spread
# over it, and its tail.
_SAMPLED, _ELEMENTS, _TAIL = 6, 1 << 16, 1024
# Relative error of another package's update as a whole; in bf16 the update itself is a few roundings wide.
_PEER_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class Options:
    """What to run; see ``fusedops bench --help``."""

    device: torch.device
    models: Sequence[str]
    configs: Sequence[str]
    clip: bool
    backends: Sequence[str]
    peers: Sequence[str]
    repeats: int
    energy: bool


def _gpt2(width: int, layers: int) -> Shapes:
    block: Shapes = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def _llama(width: int, layers: int, keys: int, ffn: int) -> Shapes:
    block: Shapes = [
        (width,), (width, width), (keys, width), (keys, width), (width, width),
        (width,), (ffn, width), (ffn, width), (width, ffn),
    ]  # fmt: skip
    return [(32000, width), *block * layers, (width,), (32000, width)]


MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt2-124M": lambda: _gpt2(768, 12),
    "gpt2-355M": lambda: _gpt2(1024, 24),
    "llama-1.1B": lambda: _llama(2048, 22, 256, 5632),
    "1000x1024": lambda: [(1024,)] * 1000,
}


MOST_ELEMENTS = 1 << 56  # more than any machine holds; the count of their bytes is still one of 64 bits
_MOST_TENSORS = 1_000_000


def model_shapes(name: str) -> Shapes:
    """Return the parameter shapes of a model, or of ``<count>x<elements>``.

    Raises:
        ValueError: neither.
    """
    if name in MODELS:
        return MODELS[name]()
    count, cross, size = name.partition("x")
    if not (cross and all(text.isdecimal() and len(text) < 16 and int(text) for text in (count, size))):
        raise ValueError(f"model: expected one of {', '.join(MODELS)} or COUNTxELEMENTS, got {name!r}")
    if int(count) > _MOST_TENSORS or int(count) * int(size) > MOST_ELEMENTS:
        raise ValueError(f"model: expected at most {_MOST_TENSORS:,} tensors and 2^56 elements, got {name!r}")
    return [(int(size),)] * int(count)


def families() -> dict[str, list[str]]:
    """Return the names of the optimizers by the file they live in."""
    found: dict[str, list[str]] = {}
    for spec in OPTIMS.values():
        found.setdefault(spec.optimizer.__module__.rpartition(".")[2], []).append(spec.name)
    return found


def run(names: Sequence[str], options: Options) -> Iterator[Record]:
    """Yield a record for each optimizer, model, dtypes and contender; see ``ops.run`` for their status."""
    for name in names:
        for model in options.models:
            shapes = model_shapes(model)
            for config in options.configs:
                with timing.side_stream(options.device):
                    yield from _run_config(OPTIMS[name], model, shapes, config, options)


def _run_config(spec: OptimSpec, model: str, shapes: Shapes, config: str, options: Options) -> Iterator[Record]:
    dtype, state_dtype, master = CONFIGS[config]
    elements = sum(map(math.prod, shapes))
    head = {
        "family": spec.optimizer.__module__.rpartition(".")[2],
        "op": spec.name,
        "model": model,
        "tensors": len(shapes),
        "parameters": elements,
        "dtype": config,
        "dtypes": {"param": short(dtype), "state": short(state_dtype), "master": "fp32" if master else None},
        "direction": "clip+step" if options.clip else "step",
    }
    total = elements * (spec.bytes_per_parameter(dtype, state_dtype, master) + (dtype.itemsize if options.clip else 0))
    for name in (*options.backends, *options.peers):
        ours = name in options.backends
        try:
            record = _contend(spec, name, ours, shapes, CONFIGS[config], total, options)
        except Exception as error:  # whatever a package raises is a result of this run, not its end
            record = unmeasured(error)
        yield {**head, "backend": name, "ours": ours, **record}


def _contend(
    spec: OptimSpec,
    name: str,
    ours: bool,
    shapes: Shapes,
    config: tuple[torch.dtype, torch.dtype, bool],
    total: int,
    options: Options,
) -> Record:
    """Judge a contender, then time it if it passed; its memory is free again afterwards."""
    dtype, state_dtype, master = config
    params = _parameters(shapes, dtype, options.device)
    stepper = _stepper(spec, name, ours, params, state_dtype, master, options)
    if wrong := _problems(spec, stepper, params, ours, options):
        return {"status": "FAIL", "reason": "; ".join(wrong)}
    return {"status": "ok", **_time(stepper, total, options)}


def _parameters(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Make the same parameters and gradients for every contender."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: tuple[int, ...], size: float) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, size, generator=generator)

    params = [normal(shape, 0.02).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = normal(tuple(p.shape), 1e-3)
    return params


def _stepper(spec: OptimSpec, name: str, ours: bool, params: list[Tensor], state_dtype: torch.dtype, master: bool,
             options: Options) -> Stepper:  # fmt: skip
    clip = _MAX_NORM if options.clip else None
    if not ours:
        return peers.OPTIMIZERS[name](params, spec.reference, state_dtype, master, clip, _HYPER)
    make: Callable[..., torch.optim.Optimizer] = spec.optimizer
    optimizer = make(params, **_HYPER, state_dtype=state_dtype, master_weights=master, max_grad_norm=clip, backend=name)
    return Stepper(optimizer.step, lambda p: optimizer.state[p])


# ---------------------------------------------------------------- parity


def _problems(spec: OptimSpec, stepper: Stepper, params: list[Tensor], ours: bool, options: Options) -> list[str]:
    """Return what the second step got wrong, in some parameters and their state, against float64."""
    by_size = sorted(range(len(params)), key=lambda i: params[i].numel())
    chosen = [params[i] for i in dict.fromkeys([*by_size[: _SAMPLED - 1], by_size[-1]])]
    stepper.step()  # the first step starts from zero moments, where half of the formula does not matter
    before = [_snapshot(p, stepper) for p in chosen]
    stepper.step()
    coefficient = 1.0
    if options.clip:
        norms = torch.stack([torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in params])
        coefficient = min(1.0, _MAX_NORM / (float(norms.norm()) + 1e-6))
    # Length of the sum behind an element: a handful of operations, and with clipping the norm of all gradients.
    terms = sum(p.numel() for p in params) if options.clip else 16
    wrong = []
    for number, (p, old) in enumerate(zip(chosen, before, strict=True)):
        got = _snapshot(p, stepper)
        want, sizes = _exact_step(spec, old, coefficient)
        weight = "master" if "master" in got else "param"
        if weight == "master" and not torch.equal(got["param"], got["master"].to(p.dtype)):
            wrong.append(f"parameter {number} is not its rounded master")
        for part in (weight, "exp_avg", "exp_avg_sq"):
            key = "param" if part == weight else part
            if ours:
                found = testing.compare(got[part], want[key], sizes[key], terms, name=part)
                wrong += [] if found.passed else [f"parameter {number}: {found}"]
            else:
                change, expected = got[part].double() - old[part].double(), want[key] - old[part].double()
                error = float((change - expected).norm() / expected.norm())
                if not error <= _PEER_ERROR[got[part].dtype]:
                    wrong.append(f"parameter {number}: {part} is off by {error:.1e} of its step")
    return wrong[:3]


def _snapshot(p: Tensor, stepper: Stepper) -> dict[str, Tensor]:
    """Copy the judged elements of a parameter, its gradient and its state."""
    spread = torch.arange(0, p.numel(), max(1, p.numel() // _ELEMENTS), device=p.device)
    index = torch.cat([spread, torch.arange(max(0, p.numel() - _TAIL), p.numel(), device=p.device)])
    held: dict[str, Tensor | None] = {"param": p, "grad": p.grad, **stepper.state(p)}
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "master")
    found = [(name, held.get(name)) for name in names]
    return {name: tensor.detach().flatten()[index] for name, tensor in found if tensor is not None}


def _exact_step(
    spec: OptimSpec, old: dict[str, Tensor], coefficient: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Let torch's optimizer do the second step in float64; also the sizes of what was added up."""
    p = old.get("master", old["param"]).double().requires_grad_()
    g = p.grad = old["grad"].double() * coefficient
    optimizer = spec.reference([p], **_HYPER)
    m, v = old["exp_avg"].double(), old["exp_avg_sq"].double()
    start = p.detach().clone()
    optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.step()
    state = optimizer.state[p]
    after = {"weight": p.detach(), **{name: state[name] for name in ("exp_avg", "exp_avg_sq")}}
    before = {"weight": start, "grad": g, "exp_avg": m, "exp_avg_sq": v}
    group = spec.optimizer([torch.zeros(1)], **_HYPER).param_groups[0]
    sizes = spec.condition(group, before, {**after, "step": torch.tensor(2.0)}, coefficient != 1.0)
    return {"param": after.pop("weight"), **after}, {"param": sizes.pop("weight"), **sizes}


# ---------------------------------------------------------------- time


def _time(stepper: Stepper, total: int, options: Options) -> Record:
    device = options.device
    # Not captured: a step is timed as it runs in eager, where its launches follow each other closely enough.
    prepared = timing.prepare(stepper.step, device, capture=False)
    took = timing.measure(prepared, options.repeats, burst=1)
    calls = max(1, options.repeats // 3)
    record = {
        "median_us": round(took.median, 2),
        "q1_us": round(took.q1, 2),
        "q3_us": round(took.q3, 2),
        "repeats": took.repeats,
        "timer": prepared.timer,
        **speed(took.median, total, timing.copy_time(total, device, options.repeats)),
        "host_us": round(timing.host_time(stepper.step, device, calls=1, loops=calls), 2),
        "wall_us": round(timing.wall_time(stepper.step, device, calls=calls, loops=3), 2),
        "peak_memory_bytes": timing.peak_memory(stepper.step, device),
    }
    if options.energy:
        millijoules = timing.energy(prepared)
        record["energy_mj"] = "n/a" if millijoules is None else round(millijoules, 3)
    return record
