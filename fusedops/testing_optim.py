"""Is an optimizer's step right? One step of ours against torch's own optimizer in float64, element by element.

The truth starts from the optimizer's own parameters, gradients and state, so errors do not pile up and none hides
behind an earlier one. An element passes if |out - truth| ≤ 1 ulp + 4·u·√log2(N)·cond: one rounding to its dtype, and
what fp32 arithmetic may lose on the way (``OptimSpec.condition``). N is 2, or the number of all elements when their
norm is used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .optim.base import FusedOptimizer
from .registry import OPTIMS
from .testing import ulp

_RUN_KEYS = ("foreach", "fused", "capturable", "differentiable")
_OURS = ("param", "weight", "master", "compensation")  # of a snapshot, beside torch's state
_MOVED = 4.0  # ulp by which a parameter without master has to move, else a step that does nothing would pass


@dataclass(frozen=True)
class Judgement:
    """One tensor after one step.

    Attributes:
        name: ``"parameter 3: exp_avg"``.
        worst_ulp: largest error in units of the last place of the tensor's dtype.
        worst_bound: largest error over the error allowed; above 1 fails.
        problem: what is wrong, or None.
    """

    name: str
    worst_ulp: float
    worst_bound: float
    problem: str | None


def judge_step(
    optimizer: FusedOptimizer, step: Callable[[], Any] | None = None, *, grad_scale: float | None = None
) -> list[Judgement]:
    """Let the optimizer step once and judge every tensor it wrote.

    Args:
        optimizer: one of ours; its parameters hold the gradients.
        step: what steps it; None: ``optimizer.step``.
        grad_scale: how many times too large the gradients are, when ``step`` undoes that.

    Returns:
        A judgement per parameter and state tensor. Parameters without a gradient have to stay as they are.

    Raises:
        ValueError: most elements of the parameters without master or compensation would move less than 4 ulp: a step
            that does nothing would pass there. Choose a larger learning rate.
    """
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    before = [_snapshot(optimizer, p) for p, _ in params]
    grads = [None if p.grad is None else p.grad.detach().double() / (grad_scale or 1.0) for p, _ in params]
    terms = 2
    if optimizer.max_grad_norm is not None:
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads if g is not None))
        coef = min(1.0, optimizer.max_grad_norm / (norm + 1e-6))
        grads = [None if g is None else g * coef for g in grads]
        terms = max(2, sum(g.numel() for g in grads if g is not None))
    truths = _truths(optimizer, params, before, grads)
    _check_movement(params, before, truths)
    (step or optimizer.step)()
    judged = []
    for number, ((p, group), old, grad, truth) in enumerate(zip(params, before, grads, truths, strict=True)):
        where = f"parameter {number} {tuple(p.shape)} {p.dtype}"
        if grad is None:
            judged += _judge_untouched(where, optimizer, p, old)
        else:
            judged += _judge_parameter(where, optimizer, p, group, {**old, "grad": grad}, truth, terms)
    return judged


def assert_step(
    optimizer: FusedOptimizer, step: Callable[[], Any] | None = None, *, grad_scale: float | None = None
) -> list[Judgement]:
    """As ``judge_step``, raising AssertionError that names every tensor that failed."""
    judged = judge_step(optimizer, step, grad_scale=grad_scale)
    problems = [f"{item.name}: {item.problem}" for item in judged if item.problem]
    if problems:
        raise AssertionError("\n".join(problems))
    return judged


def _snapshot(optimizer: FusedOptimizer, p: Tensor) -> dict[str, Tensor]:
    """Return copies of a parameter (``param``), its state, and the weight that steps (``weight``, fp64)."""
    state = optimizer.state.get(p) or {}
    copied = {key: value.detach().clone() for key, value in state.items() if isinstance(value, Tensor)}
    copied["param"] = p.detach().clone()
    copied["weight"] = copied.get("master", copied["param"]).double()
    if "compensation" in copied:
        copied["weight"] = copied["weight"] + copied["compensation"].double()
    return copied


def _truths(
    optimizer: FusedOptimizer,
    params: Sequence[tuple[Tensor, dict[str, Any]]],
    before: Sequence[dict[str, Tensor]],
    grads: Sequence[Tensor | None],
) -> list[dict[str, Tensor]]:
    """Return ``weight`` and state after a step of torch's optimizer in float64."""
    reference = OPTIMS[optimizer.op].reference
    known = [key for key in inspect.signature(reference).parameters if key not in ("params", *_RUN_KEYS)]
    truths: list[dict[str, Tensor]] = []
    for (_, group), old, grad in zip(params, before, grads, strict=True):
        if grad is None:
            truths.append({})
            continue
        weight = torch.nn.Parameter(old["weight"].clone())
        weight.grad = grad.clone()
        options = {key: group[key] for key in known if key in group}
        options.update(lr=float(group["lr"]), betas=tuple(map(float, group["betas"])))
        torchs = reference([weight], **options, foreach=False)  # type: ignore[call-arg]
        if "step" in old:
            kept = {key: value for key, value in old.items() if key not in _OURS}
            torchs.state[weight] = {k: v.cpu() if k == "step" else v.double() for k, v in kept.items()}
        torchs.step()
        truths.append({"weight": weight.detach(), **torchs.state[weight]})
    return truths


def _check_movement(
    params: Sequence[tuple[Tensor, dict[str, Any]]],
    before: Sequence[dict[str, Tensor]],
    truths: Sequence[dict[str, Tensor]],
) -> None:
    moved = [
        ((truth["weight"] - old["weight"]).abs() / ulp(truth["weight"], p.dtype)).flatten()
        for (p, group), old, truth in zip(params, before, truths, strict=True)
        if truth
        and not ((group["master_weights"] or group["kahan_sum"]) and p.dtype in (torch.float16, torch.bfloat16))
    ]
    if sum(m.numel() for m in moved) and torch.cat([m.cpu() for m in moved]).median() < _MOVED:
        raise ValueError(f"judge_step: most parameters move less than {_MOVED:g} ulp: nothing could be judged")


def _judge_untouched(where: str, optimizer: FusedOptimizer, p: Tensor, old: dict[str, Tensor]) -> list[Judgement]:
    judged = []
    new = _snapshot(optimizer, p)
    del new["weight"]  # the parameter or its master, once more
    for key, value in new.items():
        same = key in old and torch.equal(value, old[key])
        problem = None if same else "changed, though the parameter has no gradient"
        judged.append(Judgement(f"{where}: {key}", 0.0, 0.0, problem))
    return judged


def _judge_parameter(
    where: str,
    optimizer: FusedOptimizer,
    p: Tensor,
    group: dict[str, Any],
    old: dict[str, Tensor],
    truth: dict[str, Tensor],
    terms: int,
) -> list[Judgement]:
    zero = torch.zeros_like(truth["weight"])
    began = {key: old[key].double() if key in old else zero for key in truth if key != "step"}
    condition = OPTIMS[optimizer.op].condition(group, {**began, "grad": old["grad"]}, truth)
    new = _snapshot(optimizer, p)
    wide = p.dtype is torch.float64
    slack = 4 * (2.0**-53 if wide else 2.0**-24) * math.sqrt(math.log2(terms))
    judged = []
    for key, right in truth.items():
        if key == "step":
            same = "step" in new and float(new["step"]) == float(right)
            judged.append(Judgement(f"{where}: step", 0.0, 0.0, None if same else f"expected {float(right)}"))
            continue
        name = ("master" if "master" in new else "param") if key == "weight" else key
        if name not in new:
            judged.append(Judgement(f"{where}: {name}", math.inf, math.inf, "is missing"))
            continue
        judged.append(_judge_tensor(f"{where}: {name}", new[name], right, slack * condition[key]))
    if "compensation" in new:
        held = new["param"].double()
        rest = torch.where(held.isfinite(), truth["weight"] - held, 0.0)  # nothing is kept of what overflowed
        judged.append(_judge_tensor(f"{where}: compensation", new["compensation"], rest, slack * condition["weight"]))
    if "master" in new:
        rounded = torch.equal(new["param"], new["master"].to(p.dtype))
        judged.append(Judgement(f"{where}: param", 0.0, 0.0, None if rounded else "is not its master, rounded"))
    return judged


def _judge_tensor(name: str, out: Tensor, right: Tensor, slack: Tensor) -> Judgement:
    if not out.numel():
        return Judgement(name, 0.0, 0.0, None)
    finite = right.isfinite()
    # Inf is right where the truth lies beyond what the dtype holds.
    largest = torch.finfo(out.dtype).max
    beyond = finite & (right.abs() + slack >= largest + ulp(right.new_tensor(largest), out.dtype) / 2)
    finite = finite & ~(beyond & (out.double() == torch.copysign(torch.full_like(right, math.inf), right)))
    if not torch.equal(finite, out.isfinite()):
        return Judgement(name, math.inf, math.inf, "inf and NaN are elsewhere than in the truth")
    spacing = ulp(right, out.dtype)
    error = torch.where(finite, (out.double() - right).abs(), 0.0)
    worst = float(torch.where(finite, error / (spacing + slack), 0.0).max())
    problem = None
    if worst > 1:
        at = int((error / (spacing + slack)).nan_to_num().argmax())
        got, want = float(out.flatten()[at]), float(right.flatten()[at])
        problem = f"element {at} is {got:.9g}, expected {want:.9g}: {worst:.3g} times the error allowed"
    return Judgement(name, float(torch.where(finite, error / spacing, 0.0).max()), worst, problem)
