"""Is a kernel right? Every op and backend is held to the same plain-PyTorch truth in float64.

    outcome = check(OPS["layer_norm"], case, backend="native", device="cuda")
    assert outcome.passed, str(outcome)

An element passes if ``|got - t| <= 1 ulp(t) + 4·u·sqrt(log2 N)·cond``: one rounding of the result, and the error of
fp32 arithmetic (u = 2^-24) on a sum of N terms whose sizes add up to ``cond``, which the op's record derives from the
truth. In fp64 (u = 2^-53) the truth has as large an error as what it judges, so twice that arithmetic is allowed there.
The bound is elementwise: a bound on the largest error passes a gradient that is all zero.
Errors in ULPs, ours and PyTorch's own in the same dtype, are reported and never judged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import backends
from .dispatch import Call, refusals
from .registry import Case, Memory, OpSpec, Sample

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
    rows = (dtype for name, dtype in dtypes.items() if _like_input(spec, name))
    given = {*rows, options.get("residual_dtype"), out_dtype}
    for entry in UNTESTABLE:
        if (
            (entry.backend, entry.device, entry.values) == (backend, device_type, values)
            and (not entry.ops or spec.name in entry.ops)
            and given.intersection(entry.dtypes)
        ):
            return entry.why
    return None


# ---------------------------------------------------------------- samples


def _large_mean(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    spread = max(1.0, 8 * float(ulp(torch.tensor(1e4), dtype)))
    return 1e4 + spread * noise


def _tiny_spread(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    spread = max(1e-3, 2 * float(ulp(torch.tensor(8.0), dtype)))
    return 8 + spread * noise


def _constant_rows(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    rows = _as_rows(noise, normalized)
    return rows[:, :1].expand_as(rows).reshape(noise.shape)


def _huge(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    """Near the maximum of fp16; else 1e12 (rstd³ still fits fp32) by turns with 1e30 (its square does not)."""
    if torch.finfo(dtype).max < 1e6:
        return 2e4 * noise.clamp(-3, 3)
    rows = _as_rows(noise, normalized).clone()
    rows[0::2] *= 1e12
    rows[1::2] *= 1e30
    return rows.reshape(noise.shape)


def _subnormal(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    return noise * (torch.finfo(dtype).smallest_normal / 4)


def _inf_nan_rows(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    rows = _as_rows(noise, normalized).clone()
    for row, bad in zip(rows[:-1], (math.inf, math.nan, -math.inf), strict=False):
        row[len(row) // 3] = bad
    return rows.reshape(noise.shape)


def _as_rows(values: Tensor, normalized: int) -> Tensor:
    return values.reshape(-1, math.prod(values.shape[values.dim() - normalized :]))


# registry.VALUES: from standard normal noise in float64, the number of normalised dimensions and the dtype.
_VALUES: dict[str, Callable[[Tensor, int, torch.dtype], Tensor]] = {
    "normal": lambda noise, normalized, dtype: noise,
    "large_mean": _large_mean,
    "tiny_spread": _tiny_spread,
    "constant_rows": _constant_rows,
    "huge": _huge,
    "subnormal": _subnormal,
    "inf_nan_rows": _inf_nan_rows,
}


def _in_wider(values: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Store as a slice of a tensor that is wider along ``dim``; what surrounds it is NaN."""
    shape = list(values.shape)
    shape[dim] += before + after
    view = values.new_full(shape, math.nan).narrow(dim, before, values.shape[dim])
    return view.copy_(values)


def _misaligned(values: Tensor) -> Tensor:
    """Store contiguously, one element off the start of an allocation."""
    return values.new_full((values.numel() + 1,), math.nan)[1:].view(values.shape).copy_(values)


def _transposed(values: Tensor) -> Tensor:
    return values.mT.contiguous().mT if values.dim() > 1 else values


def lay_out(values: Tensor, memory: Memory) -> Tensor:
    """Store values as ``memory`` says, NaN before, between and behind them."""
    shape, strides = values.shape, [0] * values.dim()
    inner = [*range(values.dim())][::-1]  # innermost first
    inner = [*inner[memory.roll % max(values.dim(), 1) :], *inner[: memory.roll % max(values.dim(), 1)]]
    reach = memory.step
    for number, dim in enumerate(inner):
        strides[dim] = reach
        reach = reach * max(shape[dim], 1) + (memory.gaps[number] if number < len(memory.gaps) else 0)
    if memory.expand and shape and shape[0] > 0:
        values, strides[0] = values[:1], 0
    storage = values.new_full((memory.offset + reach + 1,), math.nan)
    storage.as_strided(values.shape, strides, memory.offset).copy_(values)
    return storage.as_strided(shape, strides, memory.offset)


# From a shape and a generator standard normal noise in float64.
Noise = Callable[[tuple[int, ...], torch.Generator], Tensor]


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return standard normal noise in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def shape_of(spec: OpSpec, case: Case, name: str) -> tuple[int, ...]:
    """Return the shape of an argument."""
    return case.shape if _like_input(spec, name) else spec.parameter_shape(case)


def _like_input(spec: OpSpec, name: str) -> bool:
    return name == "input" or name in spec.like_input


def make_sample(spec: OpSpec, case: Case, device: str = "cpu", seed: int = 0, noise: Noise = normal) -> Sample:
    """Make the tensors of a case.

    Args:
        spec: the op.
        case: what to call it with.
        device: where the tensors go.
        seed: the same seed gives the same numbers on every device and backend.
        noise: where the numbers come from.

    Returns:
        A sample whose differentiable tensors are leaves that require a gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    kwargs: dict[str, Any] = {}
    for name, dtype in case.dtypes.items():
        main = _like_input(spec, name)
        numbers = noise(shape_of(spec, case, name), generator)
        values = (_VALUES[case.values](numbers, case.normalized, dtype) if main else numbers).to(device, dtype)
        if name in case.memory:
            values = lay_out(values, case.memory[name])
        elif case.layout == "misaligned":
            values = _misaligned(values)
        elif case.layout == "rows_strided" and main:
            values = _in_wider(values, -max(case.normalized, 1), 0, 8)
        elif case.layout == "strided_parameters" and not main:
            values = lay_out(values, Memory(step=2))
        elif case.layout == "transposed" and main:
            values = _transposed(values)
        kwargs[name] = values.requires_grad_()
    grads = tuple(kwargs)
    if case.normalized:
        kwargs["normalized_shape"] = case.shape[len(case.shape) - case.normalized :]
    if case.out_dtype is not None:
        kwargs["out_dtype"] = case.out_dtype
    return Sample({**kwargs, **case.options}, grads, spec.outputs)


def outputs_of(output: Any) -> tuple[Tensor, ...]:
    """Return the results of an op as a tuple."""
    return output if isinstance(output, tuple) else (output,)


def make_grad(case: Case, output: Any, seed: int = 0, noise: Noise = normal) -> Any:
    """Make the gradient of an output (its shape, dtype and device), laid out as the case says; of several, a tuple."""
    if isinstance(output, tuple):
        return tuple(make_grad(case, one, seed + number, noise) for number, one in enumerate(output))
    if case.layout == "expanded_grad":
        return output.new_ones(()).expand(output.shape)
    generator = torch.Generator().manual_seed(seed + 1)
    values = noise(tuple(output.shape), generator).to(output.device, output.dtype)
    if "grad" in case.memory:
        return lay_out(values, case.memory["grad"])
    if case.layout == "strided_grad":
        return _in_wider(values, -1, 3, 2)
    return _misaligned(values) if case.layout == "misaligned" else values


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


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of ``dtype`` at each value, in float64.

    It is 2^e·eps for 2^e <= |value| < 2^(e+1), the smallest subnormal at and around zero, and that of the largest
    finite number beyond it.
    """
    info = torch.finfo(dtype)
    size = value.detach().double().abs().nan_to_num(info.max, info.max).clamp(info.smallest_normal, info.max)
    exponent = torch.frexp(size)[1].to(torch.int64) - 1
    power: Tensor = (exponent + 1023 << 52).view(torch.float64)
    return power * info.eps


@dataclass(frozen=True)
class Comparison:
    """One tensor against the truth, at the element that uses most of its bound.

    Attributes:
        name: ``"output"`` or the argument whose gradient it is.
        ratio: worst error over bound; at most 1 passes.
        index, got, want, bound: that element.
        ulps: largest error in ULPs of the tensor's dtype, at the size of the element or of 1/16 of what was added up to
            make it, so that a sum that cancels to nearly nothing does not drown the others.
        torch_ulps: the same for PyTorch's own result; NaN if it was not given.
        problem: why the tensor could not be compared at all, or None.
    """

    name: str
    ratio: float
    index: tuple[int, ...] = ()
    got: float = math.nan
    want: float = math.nan
    bound: float = math.nan
    ulps: float = math.nan
    torch_ulps: float = math.nan
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every element is within its bound."""
        return self.problem is None and self.ratio <= 1.0

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        where = f"[{', '.join(map(str, self.index))}]"
        return (
            f"{self.name}{where}: got {self.got:.9g}, want {self.want:.9g} ± {self.bound:.3g}, "
            f"{self.ratio:.3g} of the bound; worst {self.ulps:.3g} ULP, PyTorch's own {self.torch_ulps:.3g}"
        )


def compare(
    got: Tensor,
    want: Tensor,
    condition: Tensor,
    terms: int,
    *,
    name: str = "output",
    baseline: Tensor | None = None,
    dtype: torch.dtype | None = None,
    wide: bool = False,
    extra_ulps: float = 0.0,
    factor: float = 1.0,
) -> Comparison:
    """Judge a tensor elementwise.

    Args:
        got: the tensor, in its own dtype.
        want: the float64 truth.
        condition: size of what was added up to make each element. NaN: only inf and NaN are judged there; inf: there
            is no bound, and nothing is judged.
        terms: length N of the sum, counted as 4 where it is less.
        name: what to call it in messages.
        baseline: PyTorch's own result, whose ULPs are reported.
        dtype: what ``got`` has to have; None: the baseline's, or any.
        wide: arithmetic was fp64, as the truth's was.
        extra_ulps: further ULPs allowed; see ``EXTRA_ULPS``.
        factor: on what arithmetic may lose; see ``OpSpec.tolerance_overrides``.

    Returns:
        The worst element.

    inf and NaN must stand where the truth has them. A result may be inf where the truth is finite if the truth is
    within the bound of the first number that rounds to inf.
    """
    measured = _measure(
        got, want, condition, terms, name, baseline, dtype, wide=wide, extra_ulps=extra_ulps, factor=factor
    )
    return _read_back([measured])[0]


@dataclass(frozen=True)
class _Measured:
    """A comparison whose numbers are still on the device."""

    name: str
    shape: torch.Size
    numbers: Tensor | None  # [7]; None: there is nothing to compare
    problem: str | None = None


def _measure(
    got: Tensor, want: Tensor, condition: Tensor, terms: int, name: str, baseline: Tensor | None,
    dtype: torch.dtype | None, *, wide: bool, extra_ulps: float, factor: float,
) -> _Measured:  # fmt: skip
    dtype = dtype or (got.dtype if baseline is None else baseline.dtype)
    if got.shape != want.shape or got.dtype != dtype:
        problem = f"expected {dtype} {tuple(want.shape)}, got {got.dtype} {tuple(got.shape)}"
        return _Measured(name, want.shape, None, problem)
    if want.numel() == 0:
        return _Measured(name, want.shape, None)
    got, want = got.detach().to(want.device).double(), want.detach()
    base = None if baseline is None else baseline.detach().to(want.device).double()
    spacing = ulp(want, dtype)
    units = 2 * 2.0**-53 if wide else 2.0**-24
    condition = condition.detach().expand(want.shape)
    boundless = condition.isinf()
    condition = condition.nan_to_num(math.inf, math.inf)
    # Of two terms as of four: RMSNorm's dx alone is rounded in x·rstd, dy·w, their product, the sum, the slope, its
    # product with x̂, the difference and that times rstd, which is itself off by some 3 units: 1.02 times 4 units once
    # in 10^8 elements.
    bound = (1.0 + extra_ulps) * spacing + factor * 4 * units * math.sqrt(math.log2(max(terms, 4))) * condition
    error = torch.where(boundless, 0.0, _error(got, want, dtype))
    share = torch.where(boundless, 0.0, error / bound).nan_to_num(math.inf, math.inf)
    worst = share.argmax()
    ulps = [want.new_tensor(math.nan)] * 2
    if base is not None:
        shown = ulp(torch.maximum(want.abs(), condition / 16), dtype)
        ulps = [(error / shown).max(), (torch.where(boundless, 0.0, _error(base, want, dtype)) / shown).max()]
    at = [t.flatten()[worst] for t in (share, got, want, bound)]
    return _Measured(name, want.shape, torch.stack([*at, *ulps, worst.double()]))


def _read_back(measured: Sequence[_Measured]) -> list[Comparison]:
    """Read the numbers of all at once: on a GPU each read is a wait."""
    numbers = [one.numbers for one in measured if one.numbers is not None]
    read = iter(torch.stack(numbers).tolist() if numbers else ())
    found = []
    for one in measured:
        if one.problem is not None:
            found.append(Comparison(one.name, math.inf, problem=one.problem))
        elif one.numbers is None:
            found.append(Comparison(one.name, 0.0, ulps=0.0, torch_ulps=0.0))
        else:
            *values, place = next(read)
            keys = ("ratio", "got", "want", "bound", "ulps", "torch_ulps")
            found.append(
                Comparison(one.name, index=_unravel(int(place), one.shape), **dict(zip(keys, values, strict=True)))
            )
    return found


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element from its place in a flat tensor."""
    index = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.append(at)
    return tuple(reversed(index))


@functools.cache
def first_infinite(dtype: torch.dtype) -> float:
    """Return the first number that rounds to inf, half a spacing beyond the largest finite one."""
    largest = torch.finfo(dtype).max
    return largest + float(ulp(torch.tensor(largest, dtype=torch.float64, device="cpu"), dtype)) / 2


def _error(got: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |got − want|; an inf that stands for an overflow counts as the first number that rounds to it."""
    first = first_infinite(dtype)
    limit = torch.where(got.sign() == want.sign(), want.abs().clamp(min=first), first)
    error = (torch.where(got.isinf() & want.isfinite(), limit.copysign(got), got) - want).abs()
    same = (got == want) | (got.isnan() & want.isnan())
    return torch.where(same, 0.0, error.nan_to_num(math.inf, math.inf))


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
            _measure(
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
    return Outcome(spec.name, backend, device, case, seed, tuple(_read_back(measured)))


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
