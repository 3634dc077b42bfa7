"""An optimizer's options: what counts as a number or a flag, and what is refused, whenever it was assigned."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from optim_helpers import PLACES, assert_unchanged, build, ones, snapshot

from fusedops import UnsupportedError, explain, optim
from fusedops.optim.checks import are_plain


@pytest.mark.parametrize(("name", "value"), [("max_grad_norm", 1.0), ("max_grad_norm", None), ("backend", "reference")])
def test_what_an_optimizer_has_as_a_whole_is_refused_in_a_group(name, value):
    group = {"params": [ones(3)], name: value}
    with pytest.raises(ValueError, match=f"AdamW: {name}: expected as AdamW's own argument, not in a group"):
        optim.AdamW([group])
    optimizer = optim.AdamW([ones(2)])
    with pytest.raises(ValueError, match=f"AdamW: {name}: "):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    optimizer.load_state_dict(saved)  # a note of its maker's, as any other


ASSIGNED = {
    "lr": [
        -1e-3,
        math.nan,
        math.inf,
        "0.1",
        None,
        10**400,
        10**5000,
        True,
        np.float32(math.inf),
        torch.tensor(math.nan),
        torch.ones(2),
        torch.tensor(1),
    ],
    "betas": [
        (10**400, 0.9),
        (0.9, -(10**400)),
        (False, 0.9),
        (1.0, 0.9),
        (0.9, -0.1),
        (math.nan, 0.9),
        (0.9,),
        0.9,
        (0.9, torch.tensor(1.0)),
    ],
    "eps": [-1e-8, math.nan, math.inf, 10**400, True, torch.tensor(1e-8)],
    "weight_decay": [-0.1, math.nan, math.inf, None, 10**400, False, np.bool_(True)],
    "amsgrad": ["yes", 0],
    "maximize": [1, None],
    "decoupled_weight_decay": ["x", None],
    "seed": [-1, 0.5, True, 2**64],
    "master_weights": [None, 0],
    "state_dtype": [torch.int8],
    "differentiable": [True],
}


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("first", [True, False], ids=["new plans", "kept plans"])
@pytest.mark.parametrize("name", ASSIGNED)
def test_options_assigned_later_are_refused_in_every_step(name, first, backend, device, need_backend):
    """Whether or not a plan is made anew, of the group that is looked at last, and before anything is written."""
    need_backend(backend)
    params = [ones(4, device=device), ones(4, device=device)]
    optimizer = build(optim.AdamW, [{"params": [p]} for p in params], backend, lr=0.1)
    optimizer.step()
    before, group = snapshot(optimizer), optimizer.param_groups[1]
    good = group[name]
    for bad in ASSIGNED[name]:
        if first:
            optimizer._buckets = None
        group[name] = bad
        with pytest.raises((ValueError, UnsupportedError), match=rf"AdamW: group 1: {name}.*(expected|=True)"):
            optimizer.step()
        assert_unchanged(optimizer, before)
    group[name] = good
    optimizer.step()
    assert [float(s["step"]) for s in optimizer.state.values()] == [2.0, 2.0]


BOUNDS = [0.0, -1.0, math.nan, "1", 10**400, 10**5000, True, 1j, torch.tensor(1.0), np.ones(2)]


def test_options_are_refused_by_the_constructor_and_by_explain():
    cases = {**ASSIGNED, "max_grad_norm": BOUNDS}
    for name in cases.keys() - {"decoupled_weight_decay"}:  # which the class says
        for bad in cases[name]:
            words = rf"^AdamW: {name}.*(expected|=True)"
            with pytest.raises((ValueError, UnsupportedError), match=words):
                optim.AdamW([ones(4)], **{name: bad})
            with pytest.raises((ValueError, UnsupportedError), match=words):
                explain("adamw", [ones(4)], **{name: bad})
            if name != "max_grad_norm":
                with pytest.raises((ValueError, UnsupportedError), match=words):
                    explain("adamw", [{"params": [ones(4)], name: bad}])


def test_explain_takes_what_the_constructor_takes():
    params = [ones(4)]
    assert explain("adamw", iter(params), 1e-3, (0.9, 0.99), max_grad_norm=1.0).call.op == "adamw"
    groups = [{"params": iter(params), "lr": 0.1}, {"params": ones(3, dtype=torch.bfloat16)}]
    assert {dtype for _, dtype in explain("adam", groups).call.dtypes} == {torch.float32, torch.bfloat16}
    assert explain("adamw", [("weight", params[0])]).call == explain("adamw", params).call
    for call, words in (
        (lambda: explain("adamw", params, learning_rate=1.0), "adamw: got an unexpected keyword argument"),
        (lambda: explain("adamw"), "adamw: missing a required argument: 'params'"),
        (lambda: explain("adamw", [*params, 3]), "adamw: params: expected tensors, got int"),
        (lambda: explain("adamw", params[0]), "adamw: params: expected tensors or dicts in a list"),
    ):
        with pytest.raises(TypeError, match=f"^{words}"):
            call()
    flat = torch.zeros(8)
    with pytest.raises(ValueError, match="AdamW: params: parameter 1: expected memory of its own"):
        explain("adamw", [{"params": flat[:5]}, {"params": flat[4:]}])
    with pytest.raises(ValueError, match="AdamW: params: parameter 0: expected a dtype of"):
        explain("adamw", [torch.ones(3, dtype=torch.complex64)])


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_numbers_of_any_kind_count_as_floats(backend, device, need_backend):
    need_backend(backend)
    kinds = {
        "lr": (np.float32(0.5), np.float64(0.5), Fraction(1, 2), np.int64(1), 1),
        "betas": ((np.float32(0.5), Fraction(3, 4)), (0, np.int64(0))),
        "eps": (np.float32(0.5), np.float16(0.5), Fraction(1, 2), 1, np.int64(0)),
        "weight_decay": (np.float32(0.5), np.float64(0.5), Fraction(1, 2), 1, np.int64(1)),
        "max_grad_norm": (np.float32(0.5), np.float64(0.5), Fraction(1, 2), 1, np.int64(1), math.inf),
    }
    for name, values in kinds.items():
        for value in values:
            results = []
            for given in (value, tuple(map(float, value)) if name == "betas" else float(value)):
                p = ones(5, device=device)
                optimizer = build(optim.AdamW, [p], backend, **{"weight_decay": 0.1, name: given})
                for _ in range(2):
                    optimizer.step()
                results.append(p.detach())
            assert torch.equal(*results), (name, value)
            assert not (results[0] == 1).any()


@pytest.mark.filterwarnings("ignore:.*round.* away")
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("late", [False, True], ids=["given", "assigned"])
def test_numpys_flags_and_seeds_count_as_pythons(late, backend, device, need_backend):
    need_backend(backend)
    cases = [("amsgrad", np.True_, True), ("amsgrad", np.False_, False), ("maximize", np.True_, True)]
    cases += [("master_weights", np.True_, True), ("kahan_sum", np.array(True), True), ("seed", np.int64(3), 3)]
    cases += [("seed", np.uint64(2**64 - 1), 2**64 - 1)]
    for name, value, meaning in cases:
        results = []
        for given in (value, meaning):
            p = ones(5, device=device, dtype=torch.bfloat16)
            options = {"lr": 1e-3, "bf16_stochastic_round": name == "seed", name: given}
            optimizer = build(optim.AdamW, [p], backend, **({"lr": 1e-3} if late else options))
            if late:
                optimizer.param_groups[0].update(options)
            else:
                assert type(optimizer.param_groups[0][name]) is type(meaning)  # what any file can hold
                optimizer.add_param_group({"params": [ones(2, device=device)], name: given})
                assert type(optimizer.param_groups[1][name]) is type(meaning)
            for _ in range(3):
                optimizer.step()
            results.append((p.detach(), sorted(optimizer.state[p])))
        assert torch.equal(results[0][0], results[1][0]), (name, value)
        assert results[0][1] == results[1][1]
    fused = optim.AdamW([ones(2)], fused=np.False_)
    assert not fused._step_supports_amp_scaling
    with pytest.raises(ValueError, match=r"seed: expected an int in \[0, 2\*\*64\), got True"):
        optim.AdamW([ones(2)], seed=np.True_)


def test_a_schedule_that_goes_below_zero_is_stopped_there():
    p = ones(4)
    optimizer = optim.AdamW([p], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 3)
    for _ in range(4):  # the last of them with lr = 0
        optimizer.step()
        schedule.step()
    with pytest.raises(ValueError, match=r"group 0: lr: expected a finite number ≥ 0, got -0\.03"):
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 4


@pytest.mark.parametrize(
    ("lr", "plain"),
    [
        (0.1, True),
        (torch.tensor(0.1, device="meta"), True),
        (torch.tensor(0.1, device="meta", dtype=torch.bfloat16), True),
        (torch.ones(1, device="meta"), False),
        (torch.ones(2, device="meta"), False),
        (torch.ones((), dtype=torch.int64, device="meta"), False),
        (torch.tensor(0.1), False),
    ],
)
def test_steps_take_the_short_look_at_numbers_and_at_scalars_on_a_device(lr, plain):
    """What it does not know goes through the whole check; the host reads tensors of its own there."""
    group = optim.AdamW([ones(3)]).param_groups[0]
    assert are_plain({**group, "lr": lr}) is plain


def test_a_bound_assigned_later_is_looked_at():
    optimizer = optim.AdamW([ones(4)])
    for bad in BOUNDS:
        optimizer.max_grad_norm = bad
        with pytest.raises(ValueError, match="AdamW: max_grad_norm: expected None or a number > 0"):
            optimizer.step()
    assert not optimizer.state
