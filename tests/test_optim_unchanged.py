"""What a step and clipping pass over because nothing changed, and what they see all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from optim_helpers import PLACES, assert_unchanged, build, ones, snapshot, twins
from torch.optim.optimizer import register_optimizer_step_post_hook

import fusedops
from fusedops import UnsupportedError, clip_grad_norm_, dispatch, optim
from fusedops.backends import native

needs_extension = pytest.mark.skipif(native._C is None, reason="needs the extension")


class Subclass(torch.Tensor):
    """A type that Python alone knows of."""


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_betas_in_a_list_that_is_written_into(backend, device, need_backend):
    need_backend(backend)
    params = [ones(4, device=device)]
    copies = twins(params)
    optimizer, reference = build(optim.AdamW, params, backend), torch.optim.AdamW(copies)
    betas = optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    for beta in (0.9, 0.9, 0.5, 0.8):
        betas[0], reference.param_groups[0]["betas"] = beta, (beta, 0.99)
        params[0].grad.mul_(-2.0)
        copies[0].grad.copy_(params[0].grad)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], reference.state[copies[0]]["exp_avg"])
    betas[0] = 1.0
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"^AdamW: group 0: betas\[0\]: expected a number in \[0, 1\), got 1\.0"):
        optimizer.step()
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize(("name", "equal"), [("lr", False), ("eps", False), ("amsgrad", 0), ("maximize", 0.0)])
def test_what_equals_an_option_need_not_be_one(name: str, equal: object) -> None:
    optimizer = optim.AdamW([{"params": [ones(4)]}, {"params": [ones(4)]}], lr=0.0, eps=0.0)
    optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[1][name] == equal
    optimizer.param_groups[1][name] = equal
    with pytest.raises(ValueError, match=rf"^AdamW: group 1: {name}: expected"):
        optimizer.step()


def test_a_schedule_a_new_group_and_another_choice_are_seen() -> None:
    params = [ones(4), ones(4)]
    optimizer = optim.AdamW(params[:1], lr=0.1, weight_decay=0.0)
    optimizer.step()
    before = params[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(params[0], before)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.add_param_group({"params": params[1:], "lr": 0.2})
    optimizer.step()
    assert (params[0] < before).all()
    torch.testing.assert_close(params[1].detach(), torch.full((4,), 0.8))
    with fusedops.use_backend("reference"):
        optimizer.step()
        assert [bucket.backend.NAME for bucket in optimizer._buckets] == ["reference"]
    with fusedops.use_backend("apex"), pytest.raises(UnsupportedError):
        optimizer.step()


# ---------------------------------------------------------------- tensors


@needs_extension
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("size", [0, 2])
def test_state_that_was_resized_in_its_own_storage(key: str, size: int) -> None:
    optimizer = optim.AdamW([ones(4), ones(4)])
    optimizer.step()
    before = snapshot(optimizer)
    state = list(optimizer.state.values())[1]
    state[key].resize_(size)
    with pytest.raises(ValueError, match=rf"^AdamW: {key}\[1\]: expected shape \[4\] as the parameter, got \[{size}\]"):
        optimizer.step()
    state[key].resize_(4)
    assert_unchanged(optimizer, before)
    optimizer.step()


@needs_extension
def test_a_parameter_that_moved_within_its_storage() -> None:
    buffer = torch.ones(12)
    p = torch.nn.Parameter(torch.empty(0))
    p.data = buffer[:4]
    p.grad = torch.ones(4)
    optimizer = optim.AdamW([p], lr=0.5, weight_decay=0.0)
    optimizer.step()
    p.data = buffer[8:]
    optimizer.step()
    torch.testing.assert_close(buffer, torch.tensor([0.5] * 4 + [1.0] * 4 + [0.5] * 4))


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_gradients_change_their_kind_from_step_to_step(max_grad_norm, backend, device, need_backend):
    """Plain, negated, of other strides, standing for zeros, gone, with a gap, plain again."""
    need_backend(backend)
    params = [torch.nn.Parameter(torch.ones(4, 6, device=device)) for _ in "ab"]
    copies = twins(params)
    optimizer = build(optim.AdamW, params, backend, max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(copies)
    base = torch.randn(4, 6, device=device)
    kinds: list[Callable[[], torch.Tensor | None]] = [
        lambda: base.clone(),
        lambda: torch._neg_view(base.clone()),
        lambda: base.t().contiguous().t(),
        lambda: torch._efficientzerotensor((4, 6), device=device),
        lambda: None,
        lambda: base.repeat(1, 2)[:, ::2].clone(memory_format=torch.preserve_format),
        lambda: base.repeat(2, 1)[::2],
        lambda: base.clone(),
    ]
    for kind in kinds:
        for p, q in zip(params, copies, strict=True):
            p.grad = kind()
            q.grad = None if p.grad is None else torch.zeros(4, 6, device=device) + p.grad
        optimizer.step()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(copies, max_grad_norm)
        reference.step()
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- who watches


def test_hooks_and_profilers_see_a_step() -> None:
    optimizer, seen = optim.AdamW([ones(4)]), []
    optimizer.step()
    assert not native.is_profiled() or native._C is None
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("any"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert seen == ["any"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert native.is_profiled()
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}
    with torch.autograd.profiler.record_function("nobody looks"):
        optimizer.step()


@needs_extension
def test_a_parameter_of_another_dtype_in_the_same_memory_is_seen() -> None:
    p = ones(8, dtype=torch.bfloat16)
    optimizer = optim.AdamW([p], lr=0.1, weight_decay=0.0, backend="native")
    optimizer.step()
    p.grad = None
    p.data = p.data.view(torch.float16).fill_(1.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.detach().float() == pytest.approx(torch.full((8,), 0.9), abs=0.01)


@needs_extension
def test_a_parameter_of_another_shape_in_the_same_memory_is_refused() -> None:
    memory = torch.ones(16)
    p = torch.nn.Parameter(memory.as_strided((4, 2), (2, 1)))
    p.grad = torch.ones_like(p)
    optimizer = optim.AdamW([p], lr=0.1, backend="native")
    optimizer.step()
    before = memory.clone()
    p.grad = None
    p.data = memory.as_strided((8, 1), (2, 1))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="expected shape"):
        optimizer.step()
    assert torch.equal(memory, before)


# ---------------------------------------------------------------- clipping


@needs_extension
def test_gradients_by_device() -> None:
    params = [ones(4), torch.nn.Parameter(torch.ones(3)), ones(2, 5, dtype=torch.bfloat16), torch.ones(3), ones(0)]
    (grads,) = native.gradients_of(params)
    assert [g is p.grad for g, p in zip(grads, (params[0], params[2], params[4]), strict=True)] == [True] * 3
    assert (len(grads), grads.largest) == (3, 10)
    assert grads.dtypes == native._C.GradientList([torch.ones(1), torch.ones(1).bfloat16()]).dtypes
    assert native.gradients_of(params[1:2]) == native.gradients_of([]) == []


@needs_extension
@pytest.mark.parametrize(
    "grad",
    [
        torch.ones(4).as_subclass(Subclass),
        torch.ones(4).to_sparse(),
        torch.ones(4, dtype=torch.complex64),
        torch.ones(1).expand(4),
        torch.nn.Parameter(torch.ones(4)),
    ],
    ids=["subclass", "sparse", "complex", "expanded", "parameter"],
)
def test_unusual_gradients_are_left_to_python(grad: torch.Tensor) -> None:
    odd = torch.nn.Parameter(torch.ones(4, dtype=grad.dtype))
    odd.grad = grad
    assert native.gradients_of([ones(4), odd]) is None
    assert native.gradients_of([torch.ones(4).as_subclass(Subclass)]) is None
    assert native.gradients_of([1.0]) is None


def test_another_choice_of_a_backend_is_seen() -> None:
    params = [ones(3), ones(4)]
    want = torch.nn.utils.clip_grad_norm_(twins(params), 1.0)
    for _ in range(2):
        torch.testing.assert_close(clip_grad_norm_(params, 100.0), want)
    for backend in ("reference", "native", "reference"):
        if backend == "native" and native._C is None:
            continue
        with fusedops.use_backend(backend):
            torch.testing.assert_close(clip_grad_norm_(params, 100.0), want)
            kinds = [choice.backend for key, choice in dispatch.cache.items() if key[0] == "clip_grad_norm_"]
            assert kinds == ([] if native._C is None else [backend])
