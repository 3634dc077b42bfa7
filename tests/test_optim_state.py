"""State dicts: torch's keys, bit for bit to and from torch.optim, and ours to ours with masters and fp32 state."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from optim_helpers import DEVICES, PLACES, build, make_params, new_grads, ones, twins

from fusedops import optim

KINDS = [(optim.Adam, torch.optim.Adam), (optim.AdamW, torch.optim.AdamW)]
quiet = pytest.mark.filterwarnings("ignore:.*round.* away")


def through_a_file(state: dict, **options: object) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def run(optimizer: torch.optim.Optimizer, grads: list[list[torch.Tensor]]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in grads:
        for p, grad in zip(params, step, strict=True):
            p.grad = grad.to(p.device, p.dtype)
        optimizer.step()


def recorded(params: list[torch.nn.Parameter], steps: int) -> list[list[torch.Tensor]]:
    return [[torch.randn(p.shape) for p in params] for _ in range(steps)]


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(mine["params"], other["params"], strict=True):
            assert set(ours.state[p]) == set(theirs.state[q])
            for key, value in ours.state[p].items():
                other_value = theirs.state[q][key]
                assert value.dtype == other_value.dtype, key
                assert value.shape == other_value.shape, key
                assert torch.equal(value.cpu(), other_value.cpu()), key
                assert value.data_ptr() != other_value.data_ptr() or not value.numel(), f"{key} is shared"


@quiet
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("cls", "torchs"), KINDS)
def test_to_torch_and_back(cls, torchs, amsgrad, dtype, device):
    torch.manual_seed(0)
    params = make_params(device, dtype, (6, 5), (), (0,), (31,))
    ours = cls(params, lr=0.05, amsgrad=amsgrad)
    run(ours, recorded(params, 3))
    copies = twins(params)
    plain = torchs(copies, lr=1.0, amsgrad=amsgrad)
    plain.load_state_dict(through_a_file(ours.state_dict()))
    assert_same_state(ours, plain)
    assert plain.param_groups[0]["lr"] == 0.05
    again = cls(twins(params), lr=1.0, amsgrad=amsgrad)
    again.load_state_dict(through_a_file(plain.state_dict()))
    assert_same_state(again, plain)
    grads = recorded(params, 2)
    run(plain, grads)  # torch accepts what it loaded
    run(again, grads)


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize(
    "options",
    [
        {"master_weights": True},
        {"state_dtype": torch.float32},
        {"master_weights": True, "state_dtype": torch.float32, "amsgrad": True},
        {"state_dtype": torch.float16},
    ],
)
def test_ours_to_ours_resumes_bit_for_bit(options, backend, device, need_backend):
    need_backend(backend)
    torch.manual_seed(1)
    params = make_params(device, torch.bfloat16, (6, 5), (300,))
    optimizer = build(optim.AdamW, params, backend, lr=0.01, **options)
    run(optimizer, recorded(params, 3))
    saved = through_a_file(optimizer.state_dict())
    resumed = build(optim.AdamW, twins(params), backend, lr=0.01, **options)
    resumed.load_state_dict(saved)
    assert_same_state(optimizer, resumed)
    default = build(optim.AdamW, twins(params), "reference")  # what was saved decides how state is stored
    default.load_state_dict(saved)
    assert_same_state(optimizer, default)
    grads = recorded(params, 3)
    run(optimizer, grads)
    run(resumed, grads)
    assert_same_state(optimizer, resumed)
    mine, others = optimizer.param_groups[0]["params"], resumed.param_groups[0]["params"]
    assert all(torch.equal(p, q) for p, q in zip(mine, others, strict=True))


def test_loading_copies_and_leaves_the_dict_alone():
    params = make_params("cpu", torch.float32, (8,))
    optimizer = optim.AdamW(params, lr=torch.tensor(0.1))
    optimizer.step()
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = optim.AdamW(twins(params), lr=torch.tensor(1.0))
    other.load_state_dict(saved)
    other.param_groups[0]["lr"].fill_(0.7)
    run(other, recorded(params, 2))
    assert float(saved["param_groups"][0]["lr"]) == pytest.approx(0.1)
    torch.testing.assert_close(saved["state"], kept["state"], rtol=0, atol=0)


def test_capturable_is_not_saved_and_not_loaded():
    params = make_params("cpu", torch.float32, (8,))
    optimizer = optim.AdamW(params, capturable=True, fused=False)
    assert optimizer.state_dict()["param_groups"][0]["capturable"] is False
    assert optimizer.param_groups[0]["capturable"] is True
    other = optim.AdamW(twins(params), foreach=True)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["fused"] is None
    assert other.param_groups[0]["foreach"] is True
    assert other._step_supports_amp_scaling
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["capturable"] is True


def test_our_own_options_survive_a_torch_dict():
    params = make_params("cpu", torch.bfloat16, (8,))
    optimizer = optim.AdamW(params, lr=0.1, master_weights=True, state_dtype=torch.float32, max_grad_norm=2.0)
    plain = torch.optim.AdamW(twins(params), lr=0.2)
    plain.param_groups[0]["params"][0].grad = torch.ones(8, dtype=torch.bfloat16)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["master_weights"], group["state_dtype"]) == (0.2, True, torch.float32)
    assert optimizer.max_grad_norm == 2.0
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32
    optimizer.step()
    assert torch.equal(params[0], optimizer.state[params[0]]["master"].bfloat16())


def test_old_and_foreign_files():
    params = make_params("cpu", torch.float32, (4,))
    optimizer = optim.AdamW(params, lr=0.1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = float(state["step"])  # as torch 1.11 wrote it
        state["exp_avg"] = state["exp_avg"].double()  # a dtype that fp32 parameters do not keep
    for group in saved["param_groups"]:
        del group["decoupled_weight_decay"]  # as torch 2.5 wrote it
    other = optim.AdamW(twins(params), lr=0.1)
    other.load_state_dict(saved)
    assert_same_state(optimizer, other)
    new_grads(other.param_groups[0]["params"])
    other.step()
    momentum = torch.optim.SGD(twins(params), lr=0.1, momentum=0.9)
    momentum.step()
    with pytest.raises(ValueError, match="exp_avg"):
        other.load_state_dict(momentum.state_dict())


TORCHS_OPTIONS = [
    *[("amsgrad", value) for value in (1, 0, None, np.True_, torch.tensor(True))],
    *[("maximize", value) for value in (1, 1.0, None, np.False_)],
    ("decoupled_weight_decay", 1),
    *[("weight_decay", value) for value in (False, 1, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(1))],
    *[("eps", value) for value in (True, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), torch.tensor(1))],
    *[("lr", value) for value in (True, np.float32(0.5), torch.tensor(1), torch.tensor([1]), torch.tensor(True))],
    *[("betas", value) for value in ([0.5, 0.75], torch.tensor([0.5, 0.75]), np.array([0.5, 0.75]), (False, 0.5))],
    ("betas", (torch.tensor(0), 0.5)),
]


@pytest.mark.parametrize(("name", "value"), TORCHS_OPTIONS, ids=str)
def test_what_torch_steps_with_is_taken_over(name, value):
    """Options that torch's constructor may have been given, or that its run was resumed with."""
    torchs = torch.optim.AdamW([ones(5)], lr=0.1, amsgrad=name == "amsgrad" and bool(value))
    torchs.step()
    saved = torchs.state_dict()
    saved["param_groups"][0][name] = value
    torchs.load_state_dict(saved)
    ours = optim.AdamW(twins(torchs.param_groups[0]["params"]))
    ours.load_state_dict(saved)
    converted = optim.AdamW(twins(torchs.param_groups[0]["params"]))
    converted.load_state_dict(optim.convert_state_dict(saved, to="fusedops"))
    params = [optimizer.param_groups[0]["params"][0] for optimizer in (torchs, ours, converted)]
    for grad in torch.randn(3, 5):
        for p, optimizer in zip(params, (torchs, ours, converted), strict=True):
            p.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(params[1], params[2])


@pytest.mark.parametrize(("cls", "other"), [(optim.Adam, torch.optim.AdamW), (optim.AdamW, torch.optim.Adam)])
def test_adam_does_not_become_adamw(cls, other):
    params = make_params("cpu", torch.float32, (4,))
    saved = other(twins(params)).state_dict()
    optimizer = cls(params, weight_decay=0.1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="weight decay"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_dicts_that_do_not_fit_change_nothing():
    params = make_params("cpu", torch.float32, (4,), (5,))
    optimizer = optim.AdamW(params)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    fewer = optim.AdamW(twins(params)[:1]).state_dict()
    swapped = copy.deepcopy(before)
    swapped["state"][0], swapped["state"][1] = swapped["state"][1], swapped["state"][0]
    no_tensor = copy.deepcopy(before)
    no_tensor["state"][0]["exp_avg"] = [0.0] * 4
    for wrong, named in ((fewer, "groups"), (swapped, "shape"), (no_tensor, "exp_avg: expected a tensor, got list")):
        with pytest.raises(ValueError, match=named):
            optimizer.load_state_dict(wrong)
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_empty_groups_hooks_and_layout():
    p = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    p.grad = torch.randn_like(p)
    optimizer = optim.AdamW([{"params": [p]}, {"params": [], "lr": 0.2}])
    optimizer.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].contiguous()  # as safetensors brings it
    q = torch.nn.Parameter(p.detach().clone())
    q.grad = p.grad.clone()
    other, seen = optim.AdamW([{"params": [q]}, {"params": [], "lr": 0.3}]), []
    other.register_load_state_dict_pre_hook(lambda *_: seen.append("before"))
    other.register_load_state_dict_post_hook(lambda *_: seen.append("after"))
    other.load_state_dict(saved)
    assert seen == ["before", "after"]
    assert other.param_groups[1]["lr"] == 0.2
    assert other.state[q]["exp_avg"].stride() == q.stride()
    optimizer.step()
    other.step()
    assert torch.equal(p, q)


def test_a_hook_may_turn_what_is_no_state_dict_into_one():
    optimizer, other = (optim.AdamW(make_params("cpu", torch.float32, (4,))) for _ in "ab")
    optimizer.step()
    other.register_load_state_dict_pre_hook(lambda _, saved: saved["optimizer"])
    other.load_state_dict({"optimizer": optimizer.state_dict()})
    assert_same_state(optimizer, other)


@pytest.mark.parametrize("device", DEVICES)
def test_a_dict_mapped_to_the_cpu(device):
    params = make_params(device, torch.float32, (4,))
    optimizer = optim.AdamW(params)
    optimizer.step()
    other = optim.AdamW(twins(params))
    other.load_state_dict(through_a_file(optimizer.state_dict(), map_location="cpu"))
    assert_same_state(optimizer, other)
    other.step()
    assert all(value.device.type == device for value in other.state[other.param_groups[0]["params"][0]].values())


def test_options_no_adam_can_work_with_are_refused_before_anything_is_loaded():
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = optim.AdamW(params, lr=0.1)
    params[0].grad = torch.ones(3)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    broken["param_groups"][0]["lr"] = "x"
    with pytest.raises(ValueError, match="load_state_dict: group 0: lr"):
        optimizer.load_state_dict(broken)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
