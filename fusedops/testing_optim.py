"""Is an optimizer's step right? One step of ours against torch's own optimizer in float64, element by element.

The truth starts from the optimizer's own parameters, gradients and state, so errors do not pile up and none hides
behind an earlier one. An element passes if |out - truth| ≤ 1 ulp + 4·u·√log2(N)·cond: one rounding to its dtype, and
what fp32 arithmetic may lose on the way (``OptimSpec.condition``). N is 2, or the number of all elements when their
norm is used.

For fp64 parameters u is 2^-53, and twice that is allowed, since the truth was rounded as often as what it judges (plain
PyTorch, which unscales gradients first, came to 1.03 times the single bound). Such a case shows how far our step is
from torch's, not how far either is from the formula. That ours keeps the single bound against the formula in 50 digits,
1 − β^t taken from torch, is shown by ``tests/test_optim_digits.py``.

Parameters that step alike (group, dtypes, number of steps) are judged as one flat tensor, and all that is found is
read back together: on a GPU each read is a wait.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .optim.base import FusedOptimizer
from .registry import OPTIMS
from .testing import first_infinite, ulp

_RUN_KEYS = ("foreach", "fused", "capturable", "differentiable")
_OURS = ("param", "weight", "master", "compensation")  # of a snapshot, beside torch's state
_MOVED = 4.0  # ulp by which a parameter without master has to move, else a step that does nothing would pass
_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Judgement:
    """One tensor of the parameters that step alike, after one step.

    Attributes:
        name: of the parameter whose element is worst, as ``"parameter 3 (5, 7) torch.float32: exp_avg"``.
        worst_ulp: largest error in units of the last place of the tensor's dtype.
        worst_bound: largest error over the error allowed; above 1 fails.
        problem: what is wrong, or None.
    """

    name: str
    worst_ulp: float
    worst_bound: float
    problem: str | None


@dataclass(frozen=True)
class _Alike:
    """Parameters that step alike, with the numbers they have among all."""

    group: dict[str, Any]
    members: list[tuple[int, Tensor]]
    steps: float | None  # before; None: without state

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0][1].dtype

    @property
    def has_grad(self) -> bool:
        return self.members[0][1].grad is not None

    def name(self, element: int) -> tuple[str, int]:
        """Return which parameter has an element of the flat tensor, and its place there."""
        for number, p in self.members:
            if element < p.numel():
                return _describe(number, p), element
            element -= p.numel()
        return _describe(*self.members[0]), 0  # all are empty


def _describe(number: int, p: Tensor) -> str:
    return f"parameter {number} {tuple(p.shape)} {p.dtype}"


@dataclass(frozen=True)
class _Check:
    """A judgement whose numbers are still on the device: worst_bound, worst_ulp, element, got and want."""

    alike: _Alike
    key: str
    numbers: Tensor  # [5]
    says: str | None  # what is wrong if it is; None: got and want


def judge_step(
    optimizer: FusedOptimizer, step: Callable[[], Any] | None = None, *, grad_scale: float | None = None
) -> list[Judgement]:
    """Let the optimizer step once and judge every tensor it wrote.

    Args:
        optimizer: one of ours; its parameters hold the gradients.
        step: what steps it; None: ``optimizer.step``.
        grad_scale: how many times too large the gradients are, when ``step`` undoes that.

    Returns:
        A judgement for each kind of tensor of the parameters that step alike. Parameters without a gradient have to
        stay as they are.

    Raises:
        ValueError: most elements of the parameters without master or compensation would move less than 4 ulp: a step
            that does nothing would pass there. Choose a larger learning rate.
    """
    batches = list(_batches(optimizer))
    before = [_snapshot(optimizer, alike) for alike in batches]
    grads = [
        _flat([p.grad for _, p in alike.members]).double() / (grad_scale or 1.0) if alike.has_grad else None
        for alike in batches
    ]
    terms = 2
    if optimizer.max_grad_norm is not None:
        sums = [grad.square().sum() for grad in grads if grad is not None]
        norm = sum((s.to(sums[0].device) for s in sums), torch.zeros(())).sqrt()
        coef = (optimizer.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = [None if grad is None else grad * coef.to(grad.device) for grad in grads]
        terms = max(2, sum(grad.numel() for grad in grads if grad is not None))
    truths = [
        {} if grad is None else _truth(optimizer, alike, old, grad)
        for alike, old, grad in zip(batches, before, grads, strict=True)
    ]
    _check_movement(batches, before, truths)
    (step or optimizer.step)()
    checks: list[_Check | Judgement] = [*_judge_steps(optimizer, batches)]
    computed = optimizer.max_grad_norm is not None or grad_scale is not None
    for alike, old, grad, truth in zip(batches, before, grads, truths, strict=True):
        new = _snapshot(optimizer, alike)
        if grad is None:
            checks += _judge_untouched(alike, old, new)
        else:
            checks += _judge_alike(optimizer, alike, {**old, "grad": grad}, new, truth, terms, computed)
    return list(_read_back(checks))


def assert_step(
    optimizer: FusedOptimizer, step: Callable[[], Any] | None = None, *, grad_scale: float | None = None
) -> list[Judgement]:
    """As ``judge_step``, raising AssertionError that names every tensor that failed."""
    judged = judge_step(optimizer, step, grad_scale=grad_scale)
    problems = [f"{item.name}: {item.problem}" for item in judged if item.problem]
    if problems:
        raise AssertionError("\n".join(problems))
    return judged


def _batches(optimizer: FusedOptimizer) -> Iterator[_Alike]:
    """Put parameters together that step alike."""
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p) or {} for p, _ in params]
    counted = [state["step"] for state in states if "step" in state]
    counts = iter(_read(counted))
    found: dict[Any, _Alike] = {}
    for number, ((p, group), state) in enumerate(zip(params, states, strict=True)):
        steps = next(counts) if "step" in state else None
        kept = tuple((key, value.dtype) for key, value in state.items() if isinstance(value, Tensor))
        alike = (id(group), p.dtype, p.device, p.grad is None, steps, kept)
        found.setdefault(alike, _Alike(group, [], steps)).members.append((number, p))
    yield from found.values()


def _read(values: Sequence[Tensor]) -> list[Any]:
    """Read tensors of one shape back, those of one device together."""
    found: list[Any] = [None] * len(values)
    for device in {value.device for value in values}:
        places = [i for i, value in enumerate(values) if value.device == device]
        for i, read in zip(places, torch.stack([values[i].double() for i in places]).tolist(), strict=True):
            found[i] = read
    return found


def _flat(tensors: Sequence[Any]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _snapshot(optimizer: FusedOptimizer, alike: _Alike) -> dict[str, Tensor]:
    """Return flat copies: ``param``, its state but for the step, and the weight that steps (``weight``, fp64)."""
    states = [optimizer.state.get(p) or {} for _, p in alike.members]
    copied = {"param": _flat([p for _, p in alike.members])}
    for key in states[0].keys() - {"step"}:
        values = [state.get(key) for state in states]
        if all(isinstance(value, Tensor) for value in values):
            copied[key] = _flat(values)
    copied["weight"] = copied.get("master", copied["param"]).double()
    if "compensation" in copied:
        copied["weight"] = copied["weight"] + copied["compensation"].double()
    return copied


def _truth(optimizer: FusedOptimizer, alike: _Alike, old: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Return ``weight`` and state after a step of torch's optimizer in float64."""
    reference, group = OPTIMS[optimizer.op].reference, alike.group
    known = [key for key in inspect.signature(reference).parameters if key not in ("params", *_RUN_KEYS)]
    weight = torch.nn.Parameter(old["weight"].clone())
    weight.grad = grad
    options = {key: group[key] for key in known if key in group}
    options.update(lr=float(group["lr"]), betas=tuple(map(float, group["betas"])))
    torchs = reference([weight], **options, foreach=False)  # type: ignore[call-arg]
    if alike.steps is not None:
        kept = {key: value.double() for key, value in old.items() if key not in _OURS}
        torchs.state[weight] = {"step": torch.tensor(alike.steps, device="cpu"), **kept}
    torchs.step()
    return {"weight": weight.detach(), **torchs.state[weight]}


def _check_movement(
    batches: Sequence[_Alike], before: Sequence[dict[str, Tensor]], truths: Sequence[dict[str, Tensor]]
) -> None:
    still, count = [], 0
    for alike, old, truth in zip(batches, before, truths, strict=True):
        kept = alike.group["master_weights"] or alike.group["kahan_sum"]
        if truth and not (kept and alike.dtype in _NARROW):
            moved = (truth["weight"] - old["weight"]).abs()
            still.append((moved < _MOVED * ulp(truth["weight"], alike.dtype)).sum())
            count += moved.numel()
    if count and 2 * sum(_read(still)) > count:
        raise ValueError(f"judge_step: most parameters move less than {_MOVED:g} ulp: nothing could be judged")


def _judge_steps(optimizer: FusedOptimizer, batches: Sequence[_Alike]) -> Iterator[Judgement]:
    members = [(alike, number, p) for alike in batches for number, p in alike.members]
    counters = [(optimizer.state.get(p) or {}).get("step") for _, _, p in members]
    counts = iter(_read([counter for counter in counters if counter is not None]))
    for (alike, number, p), counter in zip(members, counters, strict=True):
        steps = None if counter is None else next(counts)
        expected = (alike.steps or 0.0) + 1.0 if alike.has_grad else alike.steps
        problem = None if steps == expected else f"is {steps}, expected {expected}"
        yield Judgement(f"{_describe(number, p)}: step", 0.0, 0.0, problem)


def _judge_untouched(alike: _Alike, old: dict[str, Tensor], new: dict[str, Tensor]) -> Iterator[_Check | Judgement]:
    for key in new.keys() - {"weight"}:  # the parameter or its master, once more
        yield _same(alike, key, new[key], old.get(key), "changed, though the parameter has no gradient")


def _judge_alike(
    optimizer: FusedOptimizer,
    alike: _Alike,
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    truth: dict[str, Tensor],
    terms: int,
    computed: bool,
) -> Iterator[_Check | Judgement]:
    zero = torch.zeros_like(truth["weight"])
    began = {key: old[key].double() if key in old else zero for key in truth if key != "step"}
    condition = OPTIMS[optimizer.op].condition(alike.group, {**began, "grad": old["grad"]}, truth, computed)
    unit = 2 * 2.0**-53 if alike.dtype is torch.float64 else 2.0**-24
    slack = 4 * unit * math.sqrt(math.log2(terms))
    for key in truth.keys() - {"step"}:
        name = ("master" if "master" in new else "param") if key == "weight" else key
        if name in new:
            yield _near(alike, name, new[name], truth[key], slack * condition[key])
        else:
            yield Judgement(f"{alike.name(0)[0]}: {name}", math.inf, math.inf, "is missing")
    if "compensation" in new:
        held = new["param"].double()
        fits = held.isfinite()  # nothing is kept of what overflowed
        rest, lost = (torch.where(fits, t, 0.0) for t in (truth["weight"] - held, slack * condition["weight"]))
        yield _near(alike, "compensation", new["compensation"], rest, lost)
    if "master" in new:
        yield _same(alike, "param", new["param"], new["master"].to(alike.dtype), "is not its master, rounded")


def _same(alike: _Alike, key: str, got: Tensor, want: Tensor | None, says: str) -> _Check | Judgement:
    """Hold a tensor to another, bit by bit but for the sign of zero and what is in a NaN."""
    if want is None:
        return Judgement(f"{alike.name(0)[0]}: {key}", math.inf, math.inf, says)
    same = (got == want) | (got.isnan() & want.isnan())
    return _worst(alike, key, torch.where(same, 0.0, math.inf), torch.zeros_like(got), got, want, says)


def _near(alike: _Alike, key: str, out: Tensor, right: Tensor, slack: Tensor) -> _Check:
    """Hold a tensor to the truth; inf is right where that lies beyond what the dtype holds."""
    wide, finite = out.double(), right.isfinite()
    beyond = finite & (right.abs() + slack >= first_infinite(out.dtype))
    finite = finite & ~(beyond & (wide == torch.copysign(torch.full_like(right, math.inf), right)))
    spacing, error = ulp(right, out.dtype), torch.where(finite, (wide - right).abs(), 0.0)
    share = torch.where(finite, error / (spacing + slack), 0.0)  # of a NaN slack is NaN
    share = torch.where(finite == out.isfinite(), share, math.inf)
    return _worst(alike, key, share.nan_to_num(math.inf, math.inf), error / spacing, out, right)


def _worst(
    alike: _Alike, key: str, share: Tensor, ulps: Tensor, got: Tensor, want: Tensor, says: str | None = None
) -> _Check:
    """Take the element that uses most of what is allowed; nothing is read back yet."""
    if not share.numel():
        return _Check(alike, key, share.new_zeros(5, dtype=torch.float64), says)
    at = share.argmax()
    numbers = [t.double() for t in (share[at], ulps.max(), at, got[at], want[at])]
    return _Check(alike, key, torch.stack(numbers), says)


def _read_back(checks: Sequence[_Check | Judgement]) -> Iterator[Judgement]:
    """Read the numbers of all checks at once."""
    numbers = iter(_read([check.numbers for check in checks if isinstance(check, _Check)]))
    for check in checks:
        if isinstance(check, Judgement):
            yield check
            continue
        bound, ulps, element, got, want = next(numbers)
        where, at = check.alike.name(int(element))
        problem = None
        if bound > 1:
            found = f"element {at} is {got:.9g}, expected {want:.9g}"
            problem = check.says or f"{found}: {bound:.3g} times the error allowed"
        yield Judgement(f"{where}: {check.key}", ulps, bound, problem)
