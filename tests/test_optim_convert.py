"""convert_state_dict: ours into torch's and back, and what it says of what is lost."""

from __future__ import annotations

import copy
import re
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
        ({"bf16_stochastic_round": True, "state_dtype": F32}, "fp32 moments of 2 parameters, where these have 16"),
        ({"state_dtype": F32}, "^convert_state_dict: torch will round the fp32 moments of 2 parameters, where these"),
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
        assert said[0].filename == __file__
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
    if "state_dtype" in options:
        assert {middle.state[p]["exp_avg"].dtype for p in params} == {BF16}, "torch has not rounded them after all"
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_counters_are_where_torch_wants_them(options, device):
    """On the CPU, else torch reads each one back in every step; its fused and capturable steps take them along."""
    params = make_params(device, F32, (5,), (3,))
    ours = optim.AdamW(params, **options)
    ours.step()
    converted = convert_state_dict(ours.state_dict(), to="torch")
    assert {values["step"].device.type for values in converted["state"].values()} == {"cpu"}
    torchs = torch.optim.AdamW(twins(params))
    torchs.load_state_dict(converted)
    new_grads(torchs.param_groups[0]["params"])
    torchs.step()
    assert {(s["step"].device.type, float(s["step"])) for s in torchs.state.values()} == {
        (device if options else "cpu", 2.0)
    }


def test_what_can_not_be_converted():
    with pytest.raises(ValueError, match='to: expected "torch" or "fusedops", got'):
        convert_state_dict(optim.AdamW([ones(3)]).state_dict(), to="apex")
    momentum = torch.optim.SGD([ones(3)], lr=0.1, momentum=0.9)
    momentum.step()
    with pytest.raises(ValueError, match=r"param_groups\[0\]: .* an Adam, but betas, eps is missing"):
        convert_state_dict(momentum.state_dict(), to="fusedops")


def holder(saved: dict, place: tuple) -> dict:
    """Return the part of a state dict that holds a place of it under its last key."""
    for key in place[:-1]:
        saved = saved[key]
    return saved


@pytest.mark.parametrize("stepped", [True, False])
def test_notes_beside_the_state_of_parameters_are_kept(stepped):
    """As torch does: what stands under a key that is no id is passed through, by loading as a copy."""
    optimizer = optim.AdamW([ones(3)], lr=0.1)
    if stepped:
        optimizer.step()
    optimizer.state["note"] = note = {"epochs": [1, 2]}
    saved = optimizer.state_dict()
    for to in ("torch", "fusedops"):
        assert convert_state_dict(saved, to=to)["state"]["note"] == note
    optimizer.load_state_dict(saved)
    assert optimizer.state["note"] == note
    assert optimizer.state["note"] is not note
    torchs = torch.optim.AdamW([ones(3)])
    torchs.load_state_dict(convert_state_dict(saved, to="torch"))
    assert torchs.state["note"] == note
    for one in (optimizer, torchs):
        one.step()
    assert optimizer.state_dict()["state"]["note"] == note


GROUP, STATE = ("param_groups", 0), ("state", 0)
# Where, what stands there instead, and what the error names.
MALFORMED = [
    (("state",), [], r"state: expected a dict, got list"),
    (("state",), None, r"state: expected a dict, got NoneType"),
    (("param_groups",), {}, r"param_groups: expected a list, got dict"),
    (GROUP[:1], [[]], r"param_groups\[0\]: expected a dict, got list"),
    ((*GROUP, "params"), 0, r"param_groups\[0\]\['params'\]: expected a list of ids, got int"),
    ((*GROUP, "params"), [[0]], r"param_groups\[0\]\['params'\]: expected ids .*, got list"),
    ((*GROUP, "params"), [0, 0], r"param_groups\[0\]\['params'\]: expected every id once, got 0"),
    ((*GROUP, "lr"), "fast", r"(param_groups\[0\]|group 0): lr: expected a finite number ≥ 0, got 'fast'"),
    ((*GROUP, "betas"), {0.9, 0.99}, r"(param_groups\[0\]|group 0): betas: expected a pair of numbers, got \{"),
    ((*GROUP, "eps"), None, r"(param_groups\[0\]|group 0): eps: expected a finite number ≥ 0, got None"),
    (STATE, [1.0], r"state\[0\]: expected a dict, got list"),
    (("state", 7), {}, r"state: expected ids that param_groups name, got 7"),
    ((*STATE, "step"), None, r"step: expected a number of steps, got None"),
    ((*STATE, "step"), torch.ones(2), r"step: expected one number, got torch.float32 of shape \(2,\)"),
    ((*STATE, "step"), torch.tensor(1j), r"step: expected one number, got torch.complex64"),
    ((*STATE, "step"), -1, r"step: expected a number of steps, got -1"),
    ((*STATE, "step"), 1e300, r"step: expected a number of steps, got 1e\+300"),
    ((*STATE, "exp_avg"), [0.0], r"exp_avg: expected a tensor, got list"),
    ((*STATE, "exp_avg_sq"), torch.ones(3, dtype=torch.int8), r"exp_avg_sq: expected dense .*int8"),
    ((*STATE, "master"), 1.0, r"master: expected a tensor, got float"),
]
MISSING = [
    ("state",),
    ("param_groups",),
    (*GROUP, "params"),
    (*STATE, "step"),
    (*STATE, "exp_avg"),
    (*STATE, "exp_avg_sq"),
]


def refusals(saved: object) -> list[str]:
    """Return what convert_state_dict, both ways, and load_state_dict say of a state dict."""
    optimizer = optim.AdamW([ones(3)])
    said = []
    for take in (
        lambda: convert_state_dict(saved, to="torch"),
        lambda: convert_state_dict(saved, to="fusedops"),
        lambda: optimizer.load_state_dict(saved),
    ):
        with pytest.raises(ValueError, match="expected") as caught:
            take()
        said.append(str(caught.value))
    assert not optimizer.state
    return said


@pytest.mark.parametrize(("place", "new", "words"), MALFORMED)
def test_malformed_dicts_are_refused_by_name(place, new, words):
    optimizer = optim.AdamW([ones(3)])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    holder(saved, place)[place[-1]] = new
    for said in refusals(saved):
        assert re.search(words, said), said


@pytest.mark.parametrize("place", MISSING)
def test_dicts_that_lack_something_are_refused_by_name(place):
    optimizer = optim.AdamW([ones(3)])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del holder(saved, place)[place[-1]]
    for said in refusals(saved):
        assert str(place[-1]) in said


@pytest.mark.parametrize("saved", [None, [], "state", {}])
def test_what_is_no_dict_is_refused(saved):
    refusals(saved)
