"""Speed of every op of a family, from its record alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .. import testing
from ..config import BACKENDS
from ..registry import OPS, Case, OpSpec, Sample, short
from . import peers, timing
from .records import Record, speed, unmeasured

DIRECTIONS = ("fwd", "bwd")
# Dtype of the input and of every parameter; under amp both differ.
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "amp": (torch.bfloat16, torch.float32),
}
WIDTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288)
QUICK_WIDTHS = (1024, 4096)
# Input and output of a default shape together: on a GPU well beyond its cache.
_LEAST_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
_PARITY_ELEMENTS = 1 << 19  # judged element by element in float64 on the CPU; larger samples repeat these rows
_HOST_ROWS = 4
# Of the norm of each tensor. Other packages round as they please (some sum gradients in 16 bits); they must compute the
# same function.
_PEER_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_ROUNDING = 64 * 2.0**-24  # of the norm of what was added up, for tensors that cancel: some roundings in fp32


@dataclass(frozen=True)
class Options:
    """What to run; see ``fusedops bench --help``."""

    device: torch.device
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[str]
    directions: Sequence[str]
    backends: Sequence[str]
    peers: Sequence[str]
    repeats: int
    energy: bool


def families() -> dict[str, list[str]]:
    """Return the names of the ops of each family."""
    found: dict[str, list[str]] = {}
    for spec in OPS.values():
        found.setdefault(spec.family, []).append(spec.name)
    return found


def default_shapes(device: torch.device, quick: bool, sizes: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Return (rows, hidden) of each width, rows a power of two that makes the bf16 input and output large enough.

    An op with ``sizes`` of its own has those, on a CPU with as few rows as make them large enough.
    """
    least = _LEAST_BYTES.get(device.type, _LEAST_BYTES["cpu"])
    if sizes:
        chosen = sizes[:1] if quick else [*sizes]
        if device.type == "cuda":
            return list(chosen)
        return [(min(rows, max(1, least // hidden)), hidden) for rows, hidden in chosen]
    widths = QUICK_WIDTHS if quick else WIDTHS
    return [(1 << (math.ceil(least / 4 / hidden) - 1).bit_length(), hidden) for hidden in widths]


def run(names: Sequence[str], options: Options) -> Iterator[Record]:
    """Yield a record for each op, dtype, shape, contender and direction.

    A contender that computes something else has ``status`` ``"FAIL"``, one that can't run, also for want of
    memory, ``"n/a"``; both have the reason and no time.
    """
    for name in names:
        for dtypes in options.dtypes:
            for shape in options.shapes:
                yield from run_case(OPS[name], make_case(OPS[name], dtypes, shape), dtypes, options)


@dataclass(frozen=True)
class _Bench:
    """One op, dtype and shape: what all contenders share."""

    spec: OpSpec
    case: Case
    sample: Sample
    grad: Any  # as the output: one tensor, or a tuple
    tiny: Sample
    tiny_grad: Any


def make_case(spec: OpSpec, dtypes: str, shape: tuple[int, ...]) -> Case:
    """Return what an op is called with: ``shape`` is (rows, …, hidden), ``dtypes`` a key of ``DTYPES``."""
    input, others = DTYPES[dtypes]
    normalized = min(1, next(iter(spec.cases("quick"))).normalized)  # 0: an op that takes no normalized_shape
    return Case(shape, normalized, {name: input if name == "input" else others for name in spec.grads})


def run_case(spec: OpSpec, case: Case, dtypes: str, options: Options) -> Iterator[Record]:
    """Yield a record for each contender and direction of one case, which ``dtypes`` names; see ``run``."""
    with timing.side_stream(options.device):
        yield from _run_case(spec, case, dtypes, options)


def _run_case(spec: OpSpec, case: Case, dtypes: str, options: Options) -> Iterator[Record]:
    @cache  # not what it raises: for want of memory
    def shared() -> tuple[_Bench, dict[str, Tensor]]:
        bench = _make(spec, case, options.device)
        return bench, _truth(bench)

    contenders: dict[str, Callable[[], peers.Function]] = {
        name: partial(_ours, spec, name) for name in options.backends
    }
    contenders |= {
        name: partial(peers.load, name, spec.name, dtypes == "amp", options.device) for name in options.peers
    }
    head = {
        "family": spec.family,
        "op": spec.name,
        "shape": list(case.shape),
        "dtype": dtypes,
        "dtypes": {name: short(dtype) for name, dtype in case.dtypes.items()},
    }
    for name, load in contenders.items():
        found: dict[str, Record]
        try:
            bench, truth = shared()
            found = _contend(bench, load(), truth, name, options)
        except Exception as error:  # whatever a package raises is a result of this run, not its end
            found = dict.fromkeys(options.directions, unmeasured(error))
        for direction, record in found.items():
            yield {**head, "backend": name, "ours": name in options.backends, "direction": direction, **record}


def _ours(spec: OpSpec, backend: str) -> peers.Function:
    return partial(spec.function, backend=backend)


def _make(spec: OpSpec, case: Case, device: torch.device) -> _Bench:
    rows, *rest = case.shape
    judged = replace(case, shape=(min(rows, max(_HOST_ROWS, _PARITY_ELEMENTS // math.prod(rest))), *rest))
    sample = testing.make_sample(spec, judged, str(device))
    grad = _grad(spec, judged, sample)
    tiny_case = replace(case, shape=(_HOST_ROWS, rest[-1]))
    tiny = testing.make_sample(spec, tiny_case, str(device))
    return _Bench(spec, judged, *_enlarge(spec, sample, grad, rows), tiny, _grad(spec, tiny_case, tiny))


def _grad(spec: OpSpec, case: Case, sample: Sample) -> Any:
    with torch.no_grad():
        return testing.make_grad(case, spec.reference(**sample.kwargs))


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def _enlarge(spec: OpSpec, sample: Sample, grad: Any, rows: int) -> tuple[Sample, Any]:
    """Draw ``rows`` rows at random from those of the sample; making as many new ones takes longer than timing them."""
    before, device = sample.kwargs["input"].shape[0], sample.kwargs["input"].device
    if rows == before:
        return sample, grad
    index = torch.randint(before, (rows,), device=device)
    index[:before] = torch.arange(before, device=device)
    parameters = set(sample.grads) - {"input", *spec.like_input}
    kwargs = {
        name: value.detach()[index].requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and name not in parameters
        else value
        for name, value in sample.kwargs.items()
    }
    order = index[torch.randperm(rows, device=device)]
    return replace(sample, kwargs=kwargs), _each(lambda one: one[order] if one.dim() else one, grad)


def _truth(bench: _Bench) -> dict[str, Tensor]:
    """Compute everything in float64 on the device, at the full size."""
    given = {**bench.sample.kwargs, **bench.spec.defaults(bench.sample.kwargs)}
    kwargs: dict[str, Any] = {name: value for name, value in given.items() if not isinstance(value, torch.dtype)}
    for name in bench.sample.grads:
        kwargs[name] = kwargs[name].detach().double().requires_grad_()
    wide = replace(bench.sample, kwargs=kwargs)
    return testing.run(bench.spec.reference, wide, lambda _: _each(Tensor.double, bench.grad))


def _contend(
    bench: _Bench, function: peers.Function, truth: dict[str, Tensor], name: str, options: Options
) -> dict[str, Record]:
    """Judge a contender, then time the directions that passed."""
    problems = _problems(bench, function, truth, name if name in options.backends else None)
    found: dict[str, Record] = {}
    for direction in options.directions:
        # A backward pass that starts from a wrong forward pass proves nothing.
        wrong = [text for part, text in problems.items() if direction == "bwd" or part in bench.spec.outputs]
        found[direction] = {"status": "FAIL", "reason": "; ".join(wrong)} if wrong else {
            "status": "ok", **_time(bench, function, direction, options)
        }  # fmt: skip
    return found


def _problems(bench: _Bench, function: peers.Function, truth: dict[str, Tensor], backend: str | None) -> dict[str, str]:
    """Return what is wrong, by tensor: at full size by norm, and for our own backends element by element."""
    problems = {}
    case = bench.case
    dtypes = (*case.dtypes.values(), case.out_dtype, *case.options.values())
    most = max(_PEER_ERROR[dtype] for dtype in dtypes if isinstance(dtype, torch.dtype))  # the coarsest dtype's
    results = testing.run(function, bench.sample, lambda _: bench.grad)
    for part, got in results.items():
        want = truth[part]
        if got.shape != want.shape:
            problems[part] = f"{part} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
            continue
        error, size = float((got.double() - want).norm()), float(want.norm())
        if not error <= most * size and not error <= _ROUNDING * _summed(bench, results, part):
            problems[part] = f"{part} is off by {error / (size or 1.0):.1e} of its norm"
    if backend is not None and not problems:
        sample = testing.make_sample(bench.spec, case, str(bench.sample.kwargs["input"].device))
        grad = _grad(bench.spec, case, sample)
        results = testing.run(function, sample, lambda _: grad)
        outcome = testing.judge(bench.spec, case, sample, grad, results, backend=backend)
        problems = {c.name: str(c) for c in outcome.comparisons if not c.passed}
    return problems


def _summed(bench: _Bench, results: dict[str, Tensor], part: str) -> float:
    """Return the norm of what was added up to make a tensor: in rows of one column it cancels to next to nothing."""
    device = str(bench.sample.kwargs["input"].device)
    exact = testing.truth(bench.spec, bench.sample, bench.grad, results, "", device)
    return float(exact.conditions[part].norm())


def _time(bench: _Bench, function: peers.Function, direction: str, options: Options) -> Record:
    device, sample = options.device, bench.sample
    call = _call(function, sample, bench.grad, direction)
    prepared = timing.prepare(call, device)
    took = timing.measure(prepared, options.repeats)
    total = bench.spec.bytes_moved(sample, direction)
    record = {
        "median_us": round(took.median, 2),
        "q1_us": round(took.q1, 2),
        "q3_us": round(took.q3, 2),
        "repeats": took.repeats,
        "timer": prepared.timer,
        **speed(took.median, total, timing.copy_time(total, device, options.repeats)),
        "host_us": round(timing.host_time(_call(function, bench.tiny, bench.tiny_grad, direction), device), 2),
        "peak_memory_bytes": timing.peak_memory(call, device),
    }
    if options.energy:
        millijoules = timing.energy(prepared)
        record["energy_mj"] = "n/a" if millijoules is None else round(millijoules, 3)
    return record


def _call(function: peers.Function, sample: Sample, grad: Any, direction: str) -> timing.Call:
    """Return one pass as a call of no arguments; backward alone, over one graph kept from a forward pass."""
    if direction == "fwd":
        return lambda: function(**sample.kwargs)
    output = function(**sample.kwargs)
    inputs = [sample.kwargs[name] for name in sample.grads]
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def usable_backends(device: torch.device) -> list[str]:
    """Return the backends that can run on a device."""
    from ..backends import backends

    found = backends(device.type)
    return [name for name in BACKENDS if found[name] is None]
