"""What an optimizer can't take is refused before anything is written: gradients, memory, files, half a step."""

from __future__ import annotations

import copy
import math
import timeit
from fractions import Fraction

import numpy as np
import pytest
import torch
from optim_helpers import PLACES, build, ones, twins

from fusedops import UnsupportedError, explain, optim
from fusedops.backends.reference_adam import ReferenceAdamPlan
from fusedops.optim import overlaps
from fusedops.optim.checks import are_plain
from fusedops.optim.overlaps import check_overlaps


def snapshot(optimizer: torch.optim.Optimizer) -> list:
    return [
        [p.detach().clone(), {key: value.clone() for key, value in optimizer.state.get(p, {}).items()}]
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def assert_unchanged(optimizer: torch.optim.Optimizer, before: list) -> None:
    torch.testing.assert_close(snapshot(optimizer), before, rtol=0, atol=0)


def give(p: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Set a gradient of whatever shape, dtype and layout, as a graph with hooks of its own may."""
    p.grad = None
    p.grad_dtype = None
    shape = p.data
    p.data = torch.empty(grad.shape, dtype=p.dtype, device=grad.device)
    p.grad = grad
    p.data = shape


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


def views_that_meet() -> dict[str, list[torch.Tensor]]:
    flat, matrix, block = torch.zeros(10), torch.zeros(6, 8), torch.zeros(4, 6, 8)
    return {
        "neighbours": [flat[:6], flat[5:]],
        "whole and part": [flat, flat[2:4]],
        "part and whole": [flat[2:4], flat],
        "the same": [flat, flat[:]],
        "reshaped": [flat, flat.view(2, 5)],
        "other dtype": [flat, flat.view(torch.float16)[7:9]],
        "over itself": [flat[:1].expand(4)],
        "a window that slides by one": [matrix.as_strided((4, 4), (1, 1))],
        "a window that slides by part of its length": [matrix.as_strided((3, 4), (2, 1))],
        "three axes, two of which meet": [block.as_strided((2, 3, 4), (7, 4, 2))],
        "whole and columns": [matrix, matrix[:, 4:]],
        "whole and transposed rows": [matrix.t(), matrix[2:3]],
        "columns": [matrix[:, :5], matrix[:, 4:]],
        "columns, later ones first": [matrix[:, 4:], matrix[:, :5]],
        "every other column": [matrix[:, ::2], matrix[:, 2::2]],
        "corners": [matrix[:4, :5], matrix[3:, 4:]],
        "blocks": [block[:3, :4, :5], block[2:, 3:, 4:]],
    }


def views_that_do_not() -> dict[str, list[torch.Tensor]]:
    flat, matrix, block = torch.zeros(10), torch.zeros(6, 8), torch.zeros(4, 6, 8)
    return {
        "shards of one buffer": [*flat.split([3, 0, 4, 3])],
        "experts of one stack": [*block.unbind()],
        "rows": [matrix[:2], matrix[2:]],
        "transposed": [matrix[:2].t(), matrix[2:].t()],
        "two dtypes in one buffer": [flat[:4].view(torch.float16), flat[4:]],
        "columns": [matrix[:, :5], matrix[:, 5:]],
        "single columns": [*matrix.unbind(1)],
        "every other column": [matrix[:, ::2], matrix[:, 1::2]],
        "every other element": [flat[::2], flat[1::2]],
        "a head of each row": [matrix[:, :2], matrix[:, 2:4], matrix[:, 4:6], matrix[:, 6:]],
        "corners": [matrix[:3, :5], matrix[3:, 4:], matrix[3:, :4], matrix[:3, 5:]],
        "blocks": [block[:2, :, :5], block[2:, :, 4:], block[2:, :, :4]],
        "no axis clears the others, yet no element meets another": [matrix.as_strided((2, 3), (3, 2))],
        "nothing": [flat[5:5], flat, flat[5:5]],
    }


def pieces(views: list[torch.Tensor], device: str) -> list[torch.nn.Parameter]:
    """Return parameters that lie on the device as the views do, with a gradient each."""
    storage = views[0].untyped_storage()
    base = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=device)
    params = []
    for view in views:
        there = torch.empty(0, dtype=view.dtype, device=device)
        there.set_(base.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        params.append(torch.nn.Parameter(there))
        params[-1].grad = torch.ones_like(there, memory_format=torch.contiguous_format)
    return params


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("views", views_that_meet())
def test_parameters_that_share_memory(views, backend, device, need_backend):
    """Refused when they are given, whichever way, and when they come to lie so later; nothing is written."""
    need_backend(backend)
    params = pieces(views_that_meet()[views], device)
    words = r"^AdamW: params: parameter \d: expected memory"
    with pytest.raises(ValueError, match=words):
        build(optim.AdamW, params, backend)
    with pytest.raises(ValueError, match=words):
        build(optim.AdamW, [{"params": [p]} for p in params], backend)
    optimizer = build(optim.AdamW, [ones(2, device=device)], backend)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1
    apart = [torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in params]
    optimizer = build(optim.AdamW, apart, backend)
    for p, q in zip(apart, params, strict=True):
        p.data, p.grad = q.data, q.grad
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert not optimizer.state
    assert not any(p.detach().float().any() for p in params)


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("views", views_that_do_not())
def test_parameters_side_by_side(views, backend, device, need_backend):
    need_backend(backend)
    params = pieces(views_that_do_not()[views], device)
    optimizer = build(optim.AdamW, params[:1], backend, lr=1.0, weight_decay=0.0)
    for p in params[1:]:
        optimizer.add_param_group({"params": [p]})
    optimizer.step()
    for p in params:
        torch.testing.assert_close(p.detach().float(), torch.full(p.shape, -1.0, device=device))
    build(optim.AdamW, params, backend).step()


def test_many_parameters_are_compared_in_little_time():
    """In the order of their starts, each with the next: ten times as many take not a hundred times as long."""

    def seconds(count: int) -> float:
        params = [*torch.zeros(count, 4).unbind()]
        return min(timeit.repeat(lambda: check_overlaps("AdamW", params), number=1, repeat=5))

    seconds(10)
    assert seconds(20_000) < 40 * seconds(2_000)


def test_a_group_is_compared_with_its_neighbours_only(monkeypatch):
    """However many there are; else groups that are added one by one would take the square of their number."""
    compared, whole = [], []
    shared = overlaps._shared
    monkeypatch.setattr(overlaps, "_shared", lambda places: compared.append(len(places)) or shared(places))
    monkeypatch.setattr(overlaps, "check_overlaps", lambda *args: whole.append(args) or check_overlaps(*args))
    rows = [torch.nn.Parameter(row) for row in torch.zeros(50, 4).unbind()]
    optimizer = optim.AdamW(rows[:1])
    for row in rows[:0:-1]:
        optimizer.add_param_group({"params": [row]})
    assert len(whole) == 1  # with the first, as nothing was known before
    assert max(compared) <= 3
    optimizer.add_param_group({"params": [ones(2)]})
    with pytest.raises(ValueError, match="parameter 51: expected memory of its own, got memory of parameter"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(rows[7].detach()[2:])]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [rows[7]]})
    rows[7].data = torch.zeros(4)  # its place is free for another now
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))]})
    assert len(optimizer.param_groups) == 52


def test_a_parameter_that_moves_between_two_groups_is_found_where_it_is():
    first, second, third = torch.zeros(3, 4).unbind()
    p = torch.nn.Parameter(first)
    optimizer = optim.AdamW([p])
    optimizer.add_param_group({"params": [torch.nn.Parameter(second)]})
    p.data = third
    optimizer.add_param_group({"params": [torch.nn.Parameter(first)]})
    with pytest.raises(ValueError, match="parameter 3: expected memory of its own, got memory of parameter 0"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(third[:2])]})


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_frozen_parameters_may_lie_where_others_do(backend, device, need_backend):
    """They are not written; one that is to be written after all is refused then."""
    need_backend(backend)
    whole = torch.nn.Parameter(torch.zeros(8, 4, device=device), requires_grad=False)
    part = torch.nn.Parameter(whole.detach()[2:4])
    part.grad = torch.ones_like(part)
    optimizer = build(optim.AdamW, [whole, part], backend, lr=1.0, weight_decay=0.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(whole.detach()[3:], requires_grad=False)]})
    optimizer.step()
    torch.testing.assert_close(whole.sum(1), torch.tensor([0.0, 0, -4, -4, 0, 0, 0, 0], device=device))
    whole.grad = torch.ones_like(whole)
    with pytest.raises(ValueError, match="parameter 1: expected memory of its own, got memory of parameter 0"):
        optimizer.step()
    assert list(optimizer.state) == [part]


def test_freed_parameters_are_no_neighbours():
    """A view into freed memory still has its offset, and those of two have the same."""
    params = [torch.nn.Parameter(torch.zeros(8)[4:]) for _ in range(3)]
    for p in params[:2]:
        p.untyped_storage().resize_(0)
    optim.AdamW(params)
    twice = torch.nn.Parameter(params[2].detach())
    with pytest.raises(ValueError, match="parameter 3: expected memory of its own, got memory of parameter 2"):
        optim.AdamW([*params, twice])


def test_parameters_that_are_not_there_yet():
    lazy = torch.nn.LazyLinear(3)
    optimizer = optim.AdamW(lazy.parameters(), lr=0.1)
    lazy(torch.ones(2, 4)).sum().backward()
    before = [p.detach().clone() for p in lazy.parameters()]
    optimizer.step()
    assert all((p.detach() < q).all() for p, q in zip(lazy.parameters(), before, strict=True))


def test_sparse_parameters_are_refused():
    sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(
        ValueError, match=r"^AdamW: params: parameter 1: expected a dense tensor, got layout torch\.sparse"
    ):
        optim.AdamW([ones(2), sparse])


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
