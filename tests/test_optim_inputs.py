"""Parameters, gradients and state that an optimizer can't take are refused before anything is written."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optim_helpers import PLACES, assert_unchanged, build, ones, snapshot, twins

from fusedops import optim


def test_sparse_parameters_are_refused():
    sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(
        ValueError, match=r"^AdamW: params: parameter 1: expected a dense tensor, got layout torch\.sparse"
    ):
        optim.AdamW([ones(2), sparse])


NONSENSE = {
    "lr": ({"lr": math.nan}, {}, "lr"),
    "negative lr": ({"lr": torch.tensor(-1.0)}, {}, "lr"),
    "betas": ({"betas": (0.9, 1.0)}, {}, r"betas\[1\]"),
    "one beta": ({"betas": (0.9,)}, {}, "betas"),
    "no betas": ({"betas": None}, {}, "betas"),
    "eps": ({"eps": -1.0}, {}, "eps"),
    "weight_decay": ({"weight_decay": "much"}, {}, "weight_decay"),
    "amsgrad": ({"amsgrad": "yes"}, {}, "amsgrad"),
    "maximize": ({"maximize": "never"}, {}, "maximize"),
    "imaginary decay": ({"weight_decay": torch.tensor(1j)}, {}, "weight_decay"),
    "negative decay in a tensor": ({"weight_decay": torch.tensor(-1.0)}, {}, "weight_decay"),
    "two decays": ({"weight_decay": torch.ones(2)}, {}, "weight_decay"),
    "state_dtype": ({"state_dtype": torch.int8}, {}, "state_dtype"),
    "two keepers": ({"master_weights": True, "kahan_sum": True}, {}, "kahan_sum"),
    "seed": ({"seed": -5}, {}, "seed"),
    "step": ({}, {"step": torch.ones(3)}, "step"),
    "negative step": ({}, {"step": -1.0}, "step"),
    "huge step": ({}, {"step": 10**400}, "step: expected a number of steps, got a number that no float can hold"),
    "huge lr": ({"lr": 10**400}, {}, "lr"),
    "step that is none": ({}, {"step": math.nan}, "step"),
    "step in words": ({}, {"step": "many"}, "step"),
    "integer moments": ({}, {"exp_avg": torch.ones(3, dtype=torch.int64)}, "exp_avg.*int64"),
    "complex moments": ({}, {"exp_avg_sq": torch.ones(3, dtype=torch.complex64)}, "exp_avg_sq.*complex"),
    "sparse moments": ({}, {"exp_avg": torch.ones(3).to_sparse()}, "exp_avg"),
    "shape": ({}, {"exp_avg": torch.ones(4)}, r"exp_avg: expected shape \(3,\)"),
    "master": ({}, {"master": torch.ones(4)}, r"master: expected shape \(3,\)"),
    "kind of decay": ({"decoupled_weight_decay": "x"}, {}, "decoupled_weight_decay: expected True or False, got 'x'"),
    "amsgrad without maxima": ({"amsgrad": True}, {}, "max_exp_avg_sq"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_state_dict_of_nonsense_is_refused_whole(case):
    options, state, words = NONSENSE[case]
    optimizer = optim.AdamW([ones(3)], lr=0.1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(options)
    saved["state"][0].update(state)
    other = optim.AdamW(twins(optimizer.param_groups[0]["params"]), lr=0.3)
    other.step()
    before, groups = snapshot(other), copy.deepcopy(other.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=f"load_state_dict.*{words}"):
        other.load_state_dict(saved)
    assert_unchanged(other, before)
    assert other.state_dict()["param_groups"] == groups


@pytest.mark.parametrize("saved", [{}, {"state": {}}, {"param_groups": []}])
def test_a_dict_that_is_no_state_dict(saved):
    with pytest.raises(ValueError, match="load_state_dict"):
        optim.AdamW([ones(3)]).load_state_dict(saved)


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize(
    "options", [{}, {"master_weights": True}, {"kahan_sum": True}, {"bf16_stochastic_round": True}]
)
def test_fp32_gradients_of_bf16_parameters(options, backend, device, need_backend):
    """With torch's ``grad_dtype``: the step of the rounded gradient, but for what the rounding took from it."""
    need_backend(backend)
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")
    start, grads = torch.randn(700), [torch.randn(700) for _ in range(3)]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(start.to(device, torch.bfloat16))
        p.grad_dtype = dtype
        optimizer = build(optim.AdamW, [p], backend, lr=0.05, state_dtype=torch.float32, **options)
        for grad in grads:
            p.grad = grad.bfloat16().to(device, dtype)  # the same value in both
            optimizer.step()
        results.append((p.detach(), optimizer.state[p]["exp_avg"]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    p.grad = None
    p.grad_dtype = torch.float32
    p.grad = grads[0].to(device) * (1 + 2**-12)
    before = optimizer.state[p]["exp_avg"].clone()
    optimizer.step()
    expected = torch.lerp(before, p.grad, 0.1)  # nothing has been rounded to bf16
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected, rtol=1e-5, atol=1e-6)


def test_a_frozen_parameter_may_have_any_dtype():
    quantised = torch.nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    optim.AdamW([ones(4), quantised]).step()
    assert quantised.tolist() == [1] * 4


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_a_backward_through_overwritten_weights_is_refused(backend, device, need_backend):
    need_backend(backend)
    p = ones(4, device=device)
    optimizer = build(optim.AdamW, [p], backend)
    loss = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


WRONG_STATE = {
    "exp_avg": [
        (torch.ones(()), r"shape \(4, 3\), got \(\) on"),
        (torch.ones(3), r"shape \(4, 3\), got \(3,\) on"),
        (torch.ones(3, 4), r"shape \(4, 3\), got \(3, 4\) on"),
        (torch.ones(4, 3, device="meta"), r"shape \(4, 3\), got \(4, 3\) on meta"),
        (torch.ones(4, 3, dtype=torch.int64), "dense floating point, got torch.int64"),
        (0.0, "a tensor, got float"),
    ],
    "exp_avg_sq": [(torch.ones(4, 3).to_sparse(), "dense floating point, got .*sparse")],
    "master": [(torch.ones(1), r"shape \(4, 3\), got \(1,\) on")],
    "step": [(torch.ones(2), r"one number, got .*\(2,\)"), (-1.0, "a number of steps"), (None, "a number of steps")],
}


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("key", WRONG_STATE)
def test_state_that_can_not_be_right_is_refused_before_a_step(key, backend, device, need_backend):
    """Nothing is spread over a parameter's elements, and nothing is written."""
    need_backend(backend)
    p = ones(4, 3, device=device, dtype=torch.bfloat16)
    optimizer = build(optim.AdamW, [ones(2, device=device), p], backend, master_weights=True)
    optimizer.step()
    good = optimizer.state[p][key]
    for bad, words in WRONG_STATE[key]:
        optimizer.state[p][key] = bad.to(device) if isinstance(bad, torch.Tensor) and not bad.is_meta else bad
        weights = [q.detach().clone() for q in optimizer.param_groups[0]["params"]]
        with pytest.raises(ValueError, match=rf"^AdamW: state of parameter 1: {key}: expected {words}"):
            optimizer.step()
        assert all(map(torch.equal, weights, optimizer.param_groups[0]["params"]))
    optimizer.state[p][key] = good
    optimizer.step()
    assert [float(state["step"]) for state in optimizer.state.values()] == [2.0, 2.0]
