"""A step that raises, for its gradients or whatever goes wrong halfway, has changed nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optim_helpers import PLACES, assert_unchanged, build, give, ones, snapshot

from fusedops import optim
from fusedops.backends.reference_adam import ReferenceAdamPlan

BAD = {
    "shape": (torch.ones(5), r"shape \(4, 4\) on .*, got \(5,\)"),
    "sparse": (torch.ones(4, 4).to_sparse(), r"a dense tensor, got layout torch\.sparse_coo; use torch\.optim"),
    "complex": (torch.ones(4, 4, dtype=torch.complex64), r"a dtype of .*, got torch\.complex64"),
    "integer": (torch.ones(4, 4, dtype=torch.int32), r"a dtype of .*, got torch\.int32"),
    "fp8": (torch.ones(4, 4).to(torch.float8_e4m3fn), r"a dtype of .*, got torch\.float8"),
    "freed": (torch.ones(4, 4), r"a tensor with storage, got one of shape \(4, 4\) whose storage was freed"),
}


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("bad", BAD)
def test_gradients_no_step_can_take(bad, first, max_grad_norm, backend, device, need_backend):
    need_backend(backend)
    good, other = ones(4, device=device), ones(4, 4, device=device)
    # Numbers count through all groups, also past what has no gradient and no place in a plan.
    groups = [{"params": [ones(2, device=device), torch.nn.Parameter(good.detach().clone())]}]
    optimizer = build(optim.AdamW, [*groups, {"params": [good, other]}], backend, max_grad_norm=max_grad_norm)
    if not first:
        optimizer.step()
    before = snapshot(optimizer)
    grad, words = BAD[bad]
    give(other, grad.to(device, copy=True))
    if bad == "freed":
        other.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^AdamW: gradient of parameter 3: expected {words}"):
        optimizer.step()
    assert_unchanged(optimizer, before)
    other.grad = None
    give(other, torch.ones(4, 4, device=device))
    optimizer.step()  # and it is none the worse for it
    assert float(optimizer.state[good]["step"]) == (1 if first else 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
def test_a_gradient_on_another_device(backend):
    p, good = ones(4, device="cuda"), ones(4, device="cuda")
    optimizer = build(optim.AdamW, [good, p], backend)
    optimizer.step()
    before = snapshot(optimizer)
    give(p, torch.ones(4))
    with pytest.raises((ValueError, RuntimeError), match=r"cpu"):
        optimizer.step()
    assert_unchanged(optimizer, before)


class Sub(torch.Tensor):
    """A subclass: plain torch serves it, in a plan of its own beside the others' on the device."""


def two_plans(backend: str, device: str) -> tuple[optim.AdamW, torch.nn.Parameter]:
    q = torch.nn.Parameter(torch.ones(4, device=device).as_subclass(Sub))
    q.grad = torch.ones_like(q)
    optimizer = build(optim.AdamW, [ones(4, device=device), q], backend, lr=0.1)
    optimizer.step()
    assert len(optimizer._buckets) == 2
    assert all(float(p.detach()[0]) < 1 for p in optimizer.param_groups[0]["params"])
    return optimizer, q


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("order", [1, -1], ids=["second plan", "first plan"])
def test_a_step_that_raises_halfway_changes_nothing(order, backend, device, monkeypatch, need_backend):
    need_backend(backend)
    optimizer, _ = two_plans(backend, device)
    optimizer._buckets = optimizer._buckets[::order]
    before = snapshot(optimizer)

    def no_memory(self, *args):
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceAdamPlan, "prepare", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            optimizer.step()
    assert_unchanged(optimizer, before)
    optimizer.step()
    assert [float(s["step"]) for s in optimizer.state.values()] == [2.0, 2.0]


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_a_bad_gradient_in_the_second_plan(backend, device, need_backend):
    need_backend(backend)
    optimizer, q = two_plans(backend, device)
    before = snapshot(optimizer)
    q.grad_dtype = None
    q.grad = torch.ones(4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="int64"):
        optimizer.step()
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize(("backend", "device"), [place for place in PLACES if place.values[0] == "triton"])
@pytest.mark.parametrize("name", ["adam_prologue_kernel", "adam_kernel"])
def test_a_kernel_that_does_not_compile_changes_nothing(name, backend, device, monkeypatch, need_backend):
    need_backend(backend)
    from fusedops.backends.triton import adam

    optimizer = build(optim.AdamW, [ones(4, device=device)], backend)
    compile_ahead = adam.compile_ahead

    def refuse(kernel, *args):
        if kernel is getattr(adam.kernels, name):
            raise RuntimeError("injected")
        compile_ahead(kernel, *args)

    def refused() -> None:
        before = snapshot(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(adam, "compile_ahead", refuse)
            with pytest.raises(RuntimeError, match="injected"):
                optimizer.step()
        assert_unchanged(optimizer, before)

    (p,) = optimizer.param_groups[0]["params"]
    refused()
    assert not optimizer.state
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1
    optimizer.found_inf = torch.zeros(1, device=device)  # compiles the prologue anew
    if name == "adam_prologue_kernel":
        refused()
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2


def _spoil(optimizer: optim.AdamW, how: str) -> None:
    """Make the next step raise, by what the last parameter, the last group or a scaler has."""
    last = optimizer.param_groups[-1]["params"][-1]
    scaling = {
        "grad_scale of two": ("grad_scale", torch.ones(2, device=last.device)),
        "grad_scale in fp64": ("grad_scale", torch.ones(1, dtype=torch.float64, device=last.device)),
        "grad_scale a number": ("grad_scale", 2.0),
        "found_inf of two": ("found_inf", torch.zeros(2, device=last.device)),
        "found_inf in int32": ("found_inf", torch.zeros(1, dtype=torch.int32, device=last.device)),
    }
    if how in scaling:
        setattr(optimizer, *scaling[how])
    elif how == "lr":
        optimizer.param_groups[-1]["lr"] = math.inf
    elif how == "max_grad_norm":
        optimizer.max_grad_norm = -1.0
    else:
        give(last, BAD[how][0].to(last.device))


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize(
    "how",
    ["grad_scale of two", "grad_scale in fp64", "grad_scale a number", "found_inf of two", "found_inf in int32", "lr",
     "max_grad_norm", "sparse", "shape", "integer"],
)  # fmt: skip
def test_a_step_that_raises_leaves_the_state_dict(how, first, backend, device, need_backend):
    """State that the step would have made, or mended, is not there after it."""
    need_backend(backend)
    narrow, wide, late = ones(4, device=device, dtype=torch.bfloat16), ones(3, device=device), ones(4, 4, device=device)
    groups = [{"params": [narrow], "master_weights": True}, {"params": [wide, late]}]
    optimizer = build(optim.AdamW, groups, backend, max_grad_norm=1.0)
    if not first:
        late.grad = None
        optimizer.step()
        optimizer.param_groups[0].update(master_weights=False, kahan_sum=True)
        late.grad = torch.ones_like(late)
    lr = optimizer.param_groups[-1]["lr"]
    before, state, norm = snapshot(optimizer), copy.deepcopy(optimizer.state_dict()["state"]), optimizer.grad_norm
    _spoil(optimizer, how)
    with pytest.raises(ValueError, match=r"^AdamW: .*expected .*, got "):
        optimizer.step()
    assert_unchanged(optimizer, before)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    assert optimizer.grad_norm is norm
    for name in {"grad_scale", "found_inf"} & set(vars(optimizer)):
        delattr(optimizer, name)
    optimizer.param_groups[-1]["lr"], optimizer.max_grad_norm = lr, 1.0
    late.grad = None
    give(late, torch.ones_like(late))
    optimizer.step()  # and it is none the worse for it
    assert [float(optimizer.state[p]["step"]) for p in (narrow, wide, late)] == [2 - first, 2 - first, 1]
    assert list(optimizer.state[narrow]) == ["step", "exp_avg", "exp_avg_sq", "master" if first else "compensation"]


def test_a_plan_that_can_not_be_made_leaves_no_state(monkeypatch):
    optimizer = optim.AdamW([ones(4)])
    monkeypatch.setattr(optim.AdamW, "make_plan", lambda *_: (_ for _ in ()).throw(RuntimeError("injected")))
    with pytest.raises(RuntimeError, match="injected"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_a_refused_step_leaves_other_groups_as_they_were(backend, device, need_backend):
    """Group 0 is to trade its masters for compensations, but group 1 is refused."""
    need_backend(backend)
    groups = [
        {"params": [ones(4, device=device, dtype=torch.bfloat16)], "master_weights": True},
        {"params": [ones(4, device=device)]},
    ]
    optimizer = build(optim.AdamW, groups, backend)
    optimizer.step()
    before = snapshot(optimizer)
    optimizer.param_groups[0].update(master_weights=False, kahan_sum=True)
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(ValueError, match="group 1: lr"):
        optimizer.step()
    assert_unchanged(optimizer, before)
