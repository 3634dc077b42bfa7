"""convert_state_dict: ours into torch's and back, and what it says of what is lost."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from optim_helpers import DEVICES, make_params, new_grads, ones, twins

from fusedops import optim
from fusedops.optim import convert_state_dict

BF16, F32 = torch.bfloat16, torch.float32
KINDS = [(optim.Adam, torch.optim.Adam), (optim.AdamW, torch.optim.AdamW)]
quiet = pytest.mark.filterwarnings("ignore:.*round.* away")


def follow(optimizer: torch.optim.Optimizer, grads: list) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for row in grads:
        for p, grad in zip(params, row, strict=True):
            p.grad = grad.to(p.device, p.dtype)
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize(("cls", "torchs"), KINDS)
def test_ten_steps_ours_ten_torchs_ten_ours(cls, torchs, options, device):
    torch.manual_seed(0)
    params = make_params(device, F32, (40, 3), (77,), ())
    grads = [[torch.randn(p.shape) for p in params] for _ in range(30)]
    alone = twins(params)
    follow(torchs(alone, lr=0.01, **options), grads)

    ours = cls(params, lr=0.01, **options)
    follow(ours, grads[:10])
    middle = torchs(params, lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is lost in fp32
        middle.load_state_dict(convert_state_dict(ours.state_dict(), to="torch"))
        assert set(middle.param_groups[0]) <= set(torchs(twins(params)).param_groups[0])
        follow(middle, grads[10:20])
        last = cls(params, lr=1.0)
        last.load_state_dict(convert_state_dict(middle.state_dict(), to="fusedops"))
    follow(last, grads[20:])
    assert float(last.state[params[0]]["step"]) == 30
    for p, q in zip(params, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@quiet
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"master_weights": True, "state_dtype": F32}, "fp32 master of 2.*fp32 moments of 2"),
        ({"kahan_sum": True}, "compensation of 2"),
        ({"bf16_stochastic_round": True, "seed": 4}, None),
    ],
)
def test_sixteen_bits_there_and_back(options, words, device):
    torch.manual_seed(0)
    params = make_params(device, BF16, (40, 3), (77,))
    grads = [[torch.randn(p.shape) for p in params] for _ in range(30)]
    reference = twins([torch.nn.Parameter(p.detach().float()) for p in params])
    follow(torch.optim.AdamW(reference, lr=0.01), grads)

    ours = optim.AdamW(params, lr=0.01, **options)
    follow(ours, grads[:10])
    saved = ours.state_dict()
    kept = copy.deepcopy(saved)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        converted = convert_state_dict(saved, to="torch")
    assert len(said) == (words is not None)
    if words:
        with pytest.warns(UserWarning, match=words):
            convert_state_dict(saved, to="torch")
    torch.testing.assert_close(saved["state"], kept["state"], rtol=0, atol=0)  # left as it was
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in converted["state"].values())
    middle = torch.optim.AdamW(params, lr=1.0)
    middle.load_state_dict(converted)
    follow(middle, grads[10:20])
    last = optim.AdamW(params, lr=1.0, **options)
    last.load_state_dict(convert_state_dict(middle.state_dict(), to="fusedops"))
    follow(last, grads[20:])
    state = last.state[params[0]]
    assert float(state["step"]) == 30
    if "master_weights" in options:
        assert state["exp_avg"].dtype is F32
        assert torch.equal(params[0], state["master"].bfloat16())
    if "kahan_sum" in options:
        assert state["compensation"].any()
    for p, q in zip(params, reference, strict=True):  # 30 steps of 0.01, ten of them rounded after every operation
        assert (p.detach().float() - q).abs().max() < 0.05


@quiet
def test_ours_to_ours_keeps_everything():
    params = make_params("cpu", BF16, (9,))
    ours = optim.AdamW(params, master_weights=True, state_dtype=F32, betas=(torch.tensor(0.9), torch.tensor(0.99)))
    ours.step()
    again = optim.AdamW(twins(params))
    again.load_state_dict(convert_state_dict(ours.state_dict(), to="fusedops"))
    new_grads(params)
    for p, q in zip(params, again.param_groups[0]["params"], strict=True):
        q.grad = p.grad.clone()
    ours.step()
    again.step()
    assert torch.equal(params[0], again.param_groups[0]["params"][0])


def test_old_counters_become_tensors():
    optimizer = torch.optim.Adam([ones(3)])
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = 5  # as torch 1.11 wrote it
    step = convert_state_dict(saved, to="fusedops")["state"][0]["step"]
    assert step.dtype is F32
    assert step.shape == ()
    assert saved["state"][0]["step"] == 5


def test_what_can_not_be_converted():
    with pytest.raises(ValueError, match='to: expected "torch" or "fusedops", got'):
        convert_state_dict(optim.AdamW([ones(3)]).state_dict(), to="apex")
    with pytest.raises(ValueError, match="param_groups"):
        convert_state_dict({"state": {}}, to="torch")
    momentum = torch.optim.SGD([ones(3)], lr=0.1, momentum=0.9)
    momentum.step()
    with pytest.raises(ValueError, match="step"):
        convert_state_dict(momentum.state_dict(), to="fusedops")
