"""What a backend computes for a case, the truth in float64, and the one held to the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..dispatch import Call, refusals
from ..registry import Case, OpSpec, Sample
from .bound import Comparison, measure, read_back
from .samples import is_like_input, make_grad, make_sample, outputs_of

# (backend, device type, dtype) → ULPs more than the bound of every op, and why.
EXTRA_ULPS: dict[tuple[str, str, torch.dtype], tuple[float, str]] = {
    ("triton", "cpu", torch.bfloat16): (1.0, "Triton's interpreter truncates fp32 to bf16 instead of rounding"),
}


@dataclass(frozen=True)
class Untestable:
    """Numbers that say nothing of a backend.

    Attributes:
        ops: names; empty: every op.
        backend: its name.
        device: device type.
        dtypes: of the input or a tensor like it.
        values: one of ``registry.VALUES``.
        why: the reason.
    """

    ops: tuple[str, ...]
    backend: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    values: str
    why: str


_CENTRED = ("layer_norm", "add_layer_norm")
_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
UNTESTABLE = (
    Untestable(
        (), "triton", "cpu", (_BF16,), "subnormal",
        "Triton's interpreter loads and stores subnormal bf16 as other numbers",
    ),
    Untestable(
        (), "apex", "cuda", (_F32, _F16, _BF16), "subnormal",
        "Apex is built with fast math, which flushes subnormals to zero",
    ),
    Untestable(
        (), "apex", "cuda", (_F32, _BF16), "huge", "Apex makes NaN of a row whose squares are more than fp32 holds"
    ),
    Untestable(
        _CENTRED, "reference", "cpu", (_F32, _BF16), "huge",
        "PyTorch's LayerNorm makes NaN on a CPU of a row whose squares, not yet centred, are more than fp32 holds",
    ),
)  # fmt: skip


def untestable(
    spec: OpSpec, dtypes: Mapping[str, torch.dtype], out_dtype: torch.dtype | None, options: Mapping[str, Any],
    values: str, backend: str, device_type: str,
) -> str | None:  # fmt: skip
    """Return why such numbers say nothing of an op on a backend, or None if they do."""
    rows = (dtype for name, dtype in dtypes.items() if is_like_input(spec, name))
    given = {*rows, options.get("residual_dtype"), out_dtype}
    for entry in UNTESTABLE:
        if (
            (entry.backend, entry.device, entry.values) == (backend, device_type, values)
            and (not entry.ops or spec.name in entry.ops)
            and given.intersection(entry.dtypes)
        ):
            return entry.why
    return None


# ---------------------------------------------------------------- running


def run(
    function: Callable[..., Any],
    sample: Sample,
    grad: Callable[[Any], Any],
    wanted: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """Call forward and backward, random numbers starting from the same state each time.

    Args:
        function: called with the sample's arguments.
        sample: the arguments.
        grad: makes the gradient of the output.
        wanted: names to differentiate by, the others not requiring a gradient; None: all of ``sample.grads``.

    Returns:
        Each output by its name and each gradient by its argument's.
    """
    wanted = sample.grads if wanted is None else tuple(wanted)
    frozen = {name: sample.kwargs[name].detach() for name in sample.grads if name not in wanted}
    kwargs = {**sample.kwargs, **frozen}
    with same_random_numbers(sample):
        output = function(**kwargs)
    results = dict(zip(sample.outputs, (one.detach() for one in outputs_of(output)), strict=True))
    if not wanted:
        return results
    pairs = [pair for pair in zip(outputs_of(output), outputs_of(grad(output)), strict=True) if pair[0].requires_grad]
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, [kwargs[name] for name in wanted], grads)
    return {**results, **dict(zip(wanted, found, strict=True))}


@contextmanager
def same_random_numbers(sample: Sample) -> Iterator[None]:
    """Start the generator of the sample's device from one state, and leave it as it was."""
    device = sample.kwargs["input"].device
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    before = generator.get_state()
    generator.manual_seed(0)
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN, that of C++ as well, so that an element nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    fill = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switches.fill_uninitialized_memory = fill


@dataclass(frozen=True)
class Truth:
    """The float64 results of a sample, by name, and the condition number of each element."""

    values: dict[str, Tensor]
    conditions: dict[str, Tensor]


def truth(
    spec: OpSpec, sample: Sample, grad: Any, results: Mapping[str, Tensor], backend: str, device: str = "cpu"
) -> Truth:
    """Compute the truth in float64, from the numbers as the sample rounded them; gradients by autograd."""
    with same_random_numbers(sample):
        kwargs = {**sample.kwargs, **spec.defaults(sample.kwargs)}
    kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, torch.dtype)}
    with same_random_numbers(sample):
        kwargs |= spec.pinned(functools.partial(spec.function, backend=backend or None), sample.kwargs, results)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            value = value.detach().to(device)
            kwargs[name] = value.double().contiguous() if value.is_floating_point() else value
    for name in sample.grads:
        kwargs[name].requires_grad_()
    several = tuple(one.detach().to(device).double().contiguous() for one in outputs_of(grad))
    wide = several if isinstance(grad, tuple) else several[0]
    exact = Sample(kwargs, sample.grads, sample.outputs, _arithmetic(sample))
    values = run(spec.reference, exact, lambda output: wide)
    with torch.no_grad():
        return Truth(values, spec.condition(exact, wide))


def _arithmetic(sample: Sample) -> torch.dtype:
    return torch.float64 if sample.kwargs["input"].dtype is torch.float64 else torch.float32


# ---------------------------------------------------------------- judging


@dataclass(frozen=True)
class Outcome:
    """All tensors of one case on one backend; falsy results read well in ``assert outcome.passed, str(outcome)``."""

    op: str
    backend: str
    device: str
    case: Case
    seed: int
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether every tensor passed."""
        return all(comparison.passed for comparison in self.comparisons)

    def __str__(self) -> str:
        shown = [c for c in self.comparisons if not c.passed] or self.comparisons
        head = f"{self.op} on {self.backend} ({self.device}), case {self.case.id}, seed {self.seed}"
        return "\n  ".join([head, *map(str, shown)])


def judge(
    spec: OpSpec, case: Case, sample: Sample, grad: Any, results: Mapping[str, Tensor],
    *, backend: str = "", seed: int = 0, on: str = "cpu", beside: bool = True,
) -> Outcome:  # fmt: skip
    """Hold results of a sample to the truth.

    Args:
        spec: the op.
        case: what the sample was made from.
        sample: the arguments.
        grad: the gradient of the output that the backward pass was given.
        results: outputs and gradients by name, as ``run`` returns them.
        backend: who made them; decides which declared allowances apply, and is asked what it rounded to on the way.
        seed: for the message.
        on: the device that computes the truth and compares.
        beside: run PyTorch's own backward as well and report its ULPs.

    Returns:
        One comparison for each of ``results``.
    """
    exact, terms = truth(spec, sample, grad, results, backend, on), spec.terms(case)
    own = run(spec.reference, sample, lambda output: grad, None if beside else ())
    device = sample.kwargs["input"].device.type
    measured = []
    for name, got in results.items():
        dtype = own[name].dtype if name in own else sample.kwargs[name].dtype
        extra, _ = EXTRA_ULPS.get((backend, device, dtype), (0.0, ""))
        factor, _ = spec.tolerance_overrides.get((backend, device, name), (lambda terms: 1.0, ""))
        measured.append(
            measure(
                got,
                exact.values[name],
                exact.conditions[name],
                terms[name],
                name,
                own[name] if beside else None,
                dtype,
                wide=case.dtypes["input"] is torch.float64,
                extra_ulps=extra,
                factor=factor(terms[name]),
            )
        )
    return Outcome(spec.name, backend, device, case, seed, tuple(read_back(measured)))


def refused(spec: OpSpec, case: Case, backend: str, device: str = "cpu") -> str | None:
    """Return why a backend can't be held to a case (its own words, or ``UNTESTABLE``'s), or None if it can."""
    device_type = torch.device(device).type
    reason: str | None = backends.get(backend).unavailable(device_type)
    if reason is not None:
        return reason
    if reason := untestable(spec, case.dtypes, case.out_dtype, case.options, case.values, backend, device_type):
        return reason
    return "; ".join(refusals(backend, describe(spec, case, device))) or None


def describe(spec: OpSpec, case: Case, device: str = "cpu") -> Call:
    """Return the call that a case puts to dispatch; no tensor is made."""
    place = torch.device(device)
    sample = make_sample(spec, replace(case, values="normal"), "meta", noise=_shapes_alone)
    index = torch.cuda.current_device() if place.type == "cuda" and place.index is None else place.index
    return replace(spec.describe(**sample.kwargs), device=place.type, index=-1 if index is None else index)


def _shapes_alone(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device="meta")


def check(spec: OpSpec, case: Case, backend: str, device: str = "cpu", seed: int = 0) -> Outcome:
    """Run a case on a backend, forward and every gradient, and judge it.

    Raises:
        UnsupportedError: the backend can't serve the case.
    """
    sample = make_sample(spec, case, device, seed)
    kept: list[Any] = []

    def grad(output: Any) -> Any:
        kept.append(make_grad(case, output, seed))
        return kept[0]

    results = run(lambda **kwargs: spec.function(**kwargs, backend=backend), sample, grad)
    return judge(spec, case, sample, kept[0], results, backend=backend, seed=seed)
