"""The fp64 step against its formula in 50 digits: the truth of all other tests of optimizers is torch's fp64 step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from optim_helpers import PLACES, build, make_params, new_grads

from fusedops.registry import OPTIMS
from fusedops.testing_optim import judge_step

Numbers = dict[str, list[Decimal]]
VARIANTS = [
    pytest.param(name, options, id=f"{name}-{i}")
    for name, spec in OPTIMS.items()
    for i, options in enumerate((*spec.options, {"max_grad_norm": 0.5}))
]


def exact_step(group: Mapping[str, Any], grads: list[Decimal], old: Numbers, steps: int, decoupled: bool) -> Numbers:
    """Take one step of Adam from the numbers as they are stored; nothing is rounded to less than 50 digits.

    But for 1 − β^t: PyTorch computes both in a double, which loses digits of what is near 0, and so does a step as it.
    """
    (beta1, beta2), eps = map(Decimal, group["betas"]), Decimal(group["eps"])
    first, second = (Decimal(1 - beta**steps) for beta in group["betas"])
    lr, decay = Decimal(float(group["lr"])), Decimal(group["weight_decay"])
    new: Numbers = {key: [] for key in old}
    for i, (w, g) in enumerate(zip(old["weight"], grads, strict=True)):
        g = -g if group["maximize"] else g
        if decoupled:
            w -= lr * decay * w
        else:
            g += decay * w
        m = beta1 * old["exp_avg"][i] + (1 - beta1) * g
        v = root = beta2 * old["exp_avg_sq"][i] + (1 - beta2) * g * g
        if "max_exp_avg_sq" in old:
            root = max(old["max_exp_avg_sq"][i], v)
            new["max_exp_avg_sq"].append(root)
        denominator = (root / second).sqrt() + eps
        new["weight"].append(w - lr / first * m / denominator)
        new["exp_avg"].append(m)
        new["exp_avg_sq"].append(v)
    return new


def clipped(grads: list[Decimal], max_norm: float | None) -> list[Decimal]:
    if max_norm is None:
        return grads
    norm = sum(g * g for g in grads).sqrt()
    return [g * min(Decimal(1), Decimal(max_norm) / (norm + Decimal("1e-6"))) for g in grads]


def decimals(tensor: torch.Tensor) -> list[Decimal]:
    return [Decimal(x) for x in tensor.detach().flatten().tolist()]


@pytest.mark.parametrize(("backend", "device"), [p for p in PLACES if p.values[0] in ("native", "reference")])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_fp64_step(name, options, backend, device, need_backend):
    need_backend(backend)
    torch.manual_seed(0)
    (p,) = params = make_params(device, torch.float64, (257,))
    optimizer = build(OPTIMS[name].optimizer, params, backend, lr=0.05, **options)
    (group,) = optimizer.param_groups
    with localcontext(prec=50):
        for steps in range(1, 4):
            new_grads(params)
            state = optimizer.state.get(p) or {}
            keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
            old = {key: decimals(state[key]) if key in state else [Decimal(0)] * p.numel() for key in keys}
            old["weight"] = decimals(p)
            grads = clipped(decimals(p.grad), optimizer.max_grad_norm)
            right = exact_step(group, grads, old, steps, group["decoupled_weight_decay"])
            judged = judge_step(optimizer)
            assert not any(item.problem for item in judged), "by torch's step"
            before = {key: torch.tensor([float(x) for x in values], dtype=torch.float64) for key, values in old.items()}
            before["grad"] = torch.tensor([float(g) for g in grads], dtype=torch.float64)
            assert_exact(optimizer, p, before, right, steps)


def assert_exact(optimizer: Any, p: torch.Tensor, before: dict[str, torch.Tensor], right: Numbers, steps: int) -> None:
    """Hold every element to the bound of all others, with u = 2^-53: an error in 50 digits, of which fp64 has 16."""
    wide = {key: value.double() for key, value in before.items()}
    after = {key: torch.tensor([float(x) for x in values], dtype=torch.float64) for key, values in right.items()}
    clips = optimizer.max_grad_norm is not None
    after["step"] = torch.tensor(float(steps))
    condition = OPTIMS[optimizer.op].condition(optimizer.param_groups[0], wide, after, clips)
    slack = 4 * 2.0**-53 * math.sqrt(math.log2(p.numel() if clips else 2))
    for key, values in right.items():
        got = decimals(p if key == "weight" else optimizer.state[p][key])
        for i, (x, t) in enumerate(zip(got, values, strict=True)):
            bound = math.ulp(float(t)) + slack * float(condition[key][i])
            assert abs(x - t) <= Decimal(bound), f"{key}[{i}] is {x}, expected {t:.25g}"
