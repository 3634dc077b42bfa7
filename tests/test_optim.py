"""What optimizers promise beside their numbers: refusals, groups, warnings, hooks, schedulers, closures."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings

import pytest
import torch
from optim_helpers import DEVICES, PLACES, build, make_params, new_grads, ones, truncates, twins

import fusedops
from fusedops import UnsupportedError, backends, optim
from fusedops.optim.checks import lost_updates

BOTH = pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])


# ---- refusals ----


@BOTH
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"lr": torch.ones(2)}, "lr"),
        ({"lr": torch.tensor(-1.0)}, "lr"),
        ({"lr": "0.1"}, "lr"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
        ({"betas": (0.9, math.nan)}, r"betas\[1\]"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": math.nan}, "weight_decay"),
        ({"state_dtype": torch.int8}, "state_dtype"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": math.nan}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"backend": "cuda"}, "backend"),
        ({"seed": 0.5}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": True}, "seed"),
        ({"betas": (0.9, torch.ones(2))}, r"betas\[1\]"),
        ({"betas": (torch.tensor(1.0), torch.tensor(0.9))}, r"betas\[0\]"),
        ({"betas": (torch.tensor(1), torch.tensor(0.9))}, r"betas\[0\]"),
        ({"betas": "ab"}, "betas"),
        ({"eps": torch.tensor(1e-8)}, "eps"),
        ({"weight_decay": None}, "weight_decay"),
        ({"lr": torch.tensor(1)}, "lr"),
        ({"lr": 1j}, "lr"),
        ({"amsgrad": "yes"}, "amsgrad"),
        ({"maximize": 1}, "maximize"),
        ({"master_weights": None}, "master_weights"),
        ({"master_weights": True, "kahan_sum": True}, "kahan_sum"),
        ({"master_weights": True, "bf16_stochastic_round": True}, "bf16_stochastic_round"),
        ({"kahan_sum": True, "bf16_stochastic_round": True}, "bf16_stochastic_round"),
    ],
)
def test_bad_options(cls, options, named):
    group = {"params": [ones(4)]}
    with pytest.raises(ValueError, match=named):
        cls([group], **options)
    assert set(group) == {"params"}, "the caller's dict was changed"
    if not {"max_grad_norm", "backend"} & set(options):
        with pytest.raises(ValueError, match=named):
            cls([{**group, **options}])


@BOTH
def test_bad_parameters(cls):
    with pytest.raises(ValueError, match="empty parameter list"):
        cls([])
    p = ones(4)
    with pytest.raises(ValueError, match="twice"):
        cls([p, ones(3), p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        cls([{"params": [p]}, {"params": [p]}])
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(ValueError, match=str(dtype)):
            cls([torch.zeros(4, dtype=dtype)])
    with pytest.raises(TypeError):
        cls(p)
    with pytest.raises(ValueError, match="non-leaf"):
        cls([p * 2])


@BOTH
def test_differentiable_is_not_served(cls):
    with pytest.raises(UnsupportedError, match="differentiable"):
        cls([ones(4)], differentiable=True)


def test_a_backend_that_is_absent_is_refused_at_once():
    with pytest.raises(UnsupportedError, match="Triton"):
        optim.AdamW([ones(4)], backend="triton")


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_bad_gradients_change_nothing(backend, device, need_backend):
    need_backend(backend)
    good, bad = ones(4, device=device), ones(4, 4, device=device)
    optimizer = build(optim.AdamW, [good, bad], backend)
    optimizer.step()
    before = copy.deepcopy([optimizer.state[good], good.detach()])
    bad.grad = torch.ones(4, 4, device=device).to_sparse()
    with pytest.raises((ValueError, RuntimeError), match=r"dense|[Ss]parse|layout"):
        optimizer.step()
    bad.grad = None
    bad.data = torch.ones(5, device=device)
    bad.grad = torch.ones(5, device=device)
    bad.data = torch.ones(4, 4, device=device)
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        optimizer.step()
    torch.testing.assert_close([optimizer.state[good], good.detach()], before, rtol=0, atol=0)


def test_first_sparse_gradient_is_refused():
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(ValueError, match="SparseAdam"):
        optim.AdamW([p]).step()


@BOTH
def test_torchs_flags_are_accepted(cls):
    for flag in ("foreach", "fused", "capturable"):
        for value in (None, True, False):
            p, q = ones(4), ones(4)
            cls([p], **{flag: value}).step()
            cls([q]).step()
            assert torch.equal(p, q)
    assert cls([ones(4)], fused=None)._step_supports_amp_scaling
    assert not cls([ones(4)], fused=False)._step_supports_amp_scaling


# ---- the usual life of an optimizer ----


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_named_parameters_schedulers_hooks_and_closures(backend, device, need_backend):
    need_backend(backend)
    model = torch.nn.Linear(4, 3).to(device)
    optimizer = build(optim.AdamW, model.named_parameters(), backend, lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    torchs_model = copy.deepcopy(model)
    torchs = torch.optim.AdamW(torchs_model.parameters(), lr=0.1)
    torchs_scheduler = torch.optim.lr_scheduler.LambdaLR(torchs, lambda step: 0.5**step)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    x = torch.randn(5, 4, device=device)
    for _ in range(4):
        for net, opt, sched in ((model, optimizer, scheduler), (torchs_model, torchs, torchs_scheduler)):

            def closure(net=net, opt=opt):
                opt.zero_grad()
                loss = net(x).square().sum()
                loss.backward()
                return loss

            assert torch.isfinite(opt.step(closure))
            sched.step()
    assert seen == ["before", "after"] * 4
    for p, q in zip(model.parameters(), torchs_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    optimizer.zero_grad(set_to_none=False)
    assert not model.weight.grad.any()
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_a_group_added_late_is_updated(backend, device, need_backend):
    need_backend(backend)
    params = make_params(device, torch.float32, (5,), (6, 3))
    copies = twins(params)
    ours, torchs = build(optim.AdamW, [params[0]], backend, lr=0.1), torch.optim.AdamW([copies[0]], lr=0.1)
    for i in range(4):
        ours.step()
        torchs.step()
        if i == 1:
            ours.add_param_group({"params": params[1], "lr": 0.02})
            torchs.add_param_group({"params": copies[1], "lr": 0.02})
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="more than one"):
        ours.add_param_group({"params": params[1]})
    assert len(ours.param_groups) == 2


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_state_that_others_replace_is_noticed(backend, device, need_backend):
    need_backend(backend)
    p = ones(64, device=device)
    q = twins([p])[0]
    ours, torchs = build(optim.AdamW, [p], backend, lr=0.1), torch.optim.AdamW([q], lr=0.1)

    def both():
        for optimizer in (ours, torchs):
            optimizer.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)

    both()
    ours.state[p]["step"] = 20.0  # a number, as old files hold
    torchs.state[q]["step"] = torch.tensor(20.0)
    both()
    assert float(ours.state[p]["step"]) == 21
    for optimizer, x in ((ours, p), (torchs, q)):
        optimizer.state[x]["step"] = torch.tensor(3.0)
        optimizer.state[x]["exp_avg"] = torch.full_like(x, 0.25)
        both_state = optimizer.state[x]
        both_state["exp_avg_sq"].mul_(2)
    both()
    for optimizer, x in ((ours, p), (torchs, q)):
        optimizer.state[x] = dict(optimizer.state[x])
        optimizer.state[x]["step"] = torch.tensor(0.0)
    both()
    ours.state.clear()
    torchs.state.clear()
    both()
    for x in (p, q):
        x.data = torch.full_like(x, 3.0)  # the parameter's memory moves
    both()
    for optimizer, x in ((ours, p), (torchs, q)):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            optimizer.state[x][key].data = optimizer.state[x][key] + 1  # so does the state's
    both()
    for optimizer in (ours, torchs):
        optimizer.param_groups[0]["amsgrad"] = True
        optimizer.state.clear()
    both()
    assert "max_exp_avg_sq" in ours.state[p]


def test_a_plan_is_kept_while_nothing_changes(monkeypatch):
    params = make_params("cpu", torch.float32, (5,), (6, 3))
    optimizer = optim.AdamW(params, backend="reference")
    built = []
    make_plan = optim.AdamW.make_plan
    monkeypatch.setattr(optim.AdamW, "make_plan", lambda self, bucket: built.append(1) or make_plan(self, bucket))
    for step in range(5):
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        new_grads(params)
    assert len(built) == 1
    with fusedops.use_backend(None):
        optimizer.step()
    assert len(built) == 1


def test_use_backend_is_obeyed_between_steps():
    p = ones(4)
    optimizer = optim.AdamW([p])
    optimizer.step()
    with fusedops.use_backend("triton"), pytest.raises(UnsupportedError, match="triton"):
        optimizer.step()
    with fusedops.use_backend("reference"):
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2


def test_parameters_without_gradients_get_no_state():
    p, frozen = ones(4), ones(4)
    frozen.grad = None
    optimizer = optim.AdamW([p, frozen])
    optimizer.step()
    assert set(optimizer.state) == {p}
    optimizer.zero_grad()
    optimizer.step()  # nothing to do
    assert float(optimizer.state[p]["step"]) == 1


def test_tied_parameters_move_once():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    copied = copy.deepcopy(model)
    ours, torchs = optim.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(copied.parameters(), lr=0.1)
    for _ in range(3):
        for net, optimizer in ((model, ours), (copied, torchs)):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_deepcopy_and_pickle():
    p = ones(8)
    optimizer = optim.AdamW([p], lr=0.1, max_grad_norm=1.0, backend="reference")
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.max_grad_norm == 1.0
        assert twin.backend == "reference"
        q = twin.param_groups[0]["params"][0]
        assert q is not p
        q.grad = torch.ones_like(q)
        twin.step()
        assert float(twin.state[q]["step"]) == 2
        assert float(optimizer.state[p]["step"]) == 1
    old = optimizer.__getstate__()
    del old["max_grad_norm"], old["backend"]  # as an older version would have written it
    revived = optim.AdamW.__new__(optim.AdamW)
    revived.__setstate__(old)
    revived.step()
    assert revived.max_grad_norm is None


def test_nothing_is_kept_alive():
    p = ones(8)
    optimizer = optim.AdamW([p])
    optimizer.step()

    def alive() -> int:
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    before = alive()
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert alive() <= before
    del optimizer, p
    assert alive() < before


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_empty_tensors_anywhere_in_a_long_list(backend, device, need_backend):
    need_backend(backend)
    for hole in (0, 29, 30, 35, 36, 63):
        params = [ones(0 if i == hole else 33, device=device) for i in range(64)]
        optimizer = build(optim.AdamW, params, backend, lr=0.1)
        optimizer.step()
        assert all(torch.equal(p, params[1 - (hole == 1)]) for p in params if p.numel())
        assert float(optimizer.state[params[hole]]["step"]) == 1


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_how_a_parameter_is_cut_does_not_matter(backend, device, need_backend):
    need_backend(backend)
    torch.manual_seed(0)
    values, grads, results = torch.randn(8, 517, device=device), torch.randn(8, 517, device=device), []
    for parts in (1, 8):
        params = [torch.nn.Parameter(c.clone()) for c in values.chunk(parts)]
        for p, g in zip(params, grads.chunk(parts), strict=True):
            p.grad = g.clone()
        optimizer = build(optim.AdamW, params, backend, lr=0.1)
        for _ in range(3):
            optimizer.step()
        results.append(torch.cat([p.detach() for p in params]))
    assert torch.equal(*results)


# ---- 16-bit parameters ----


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_masters_keep_small_updates(backend, device, need_backend):
    need_backend(backend)
    wide = {"master_weights": True, "state_dtype": torch.float32}
    p = ones(64, device=device, dtype=torch.bfloat16)
    optimizer = build(optim.AdamW, [p], backend, lr=1e-4, weight_decay=0.0, **wide)
    for _ in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert abs(1 - optimizer.state[p]["master"].mean().item() - 0.02) < 1e-3
    assert truncates(backend, device) or torch.equal(p, optimizer.state[p]["master"].bfloat16())


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("how", ["fill_", "data", "load_state_dict"])
@pytest.mark.parametrize("drop", [None, "pop", "None"])
def test_weights_written_between_steps_count_once_the_master_is_dropped(drop, how, backend, device, need_backend):
    """Till then the master is the weight: telling from a parameter whether others wrote it costs every step."""
    need_backend(backend)
    model = torch.nn.ParameterDict({"weight": ones(64, device=device, dtype=torch.bfloat16)})
    p = model["weight"]
    optimizer = build(optim.AdamW, [p], backend, lr=0.5, weight_decay=0.0, master_weights=True)
    optimizer.step()
    written = torch.full_like(p, 3.0)
    if how == "fill_":
        with torch.no_grad():
            p.fill_(3.0)
    elif how == "data":
        p.data = written
    else:
        model.load_state_dict({"weight": written})
    for state in optimizer.state.values():
        if drop == "pop":
            state.pop("master", None)
        elif drop == "None":
            state["master"] = None
    optimizer.step()
    expected = torch.full_like(p, 2.5 if drop else 0.0)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(optimizer.state[p]["master"], expected.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_one_warning_where_updates_are_lost(device):
    weights = [torch.nn.Parameter(torch.randn(100, 100, device=device).bfloat16()) for _ in "ab"]
    with pytest.warns(UserWarning, match="master_weights=True") as seen:
        optimizer = optim.AdamW([{"params": weights[0]}, {"params": weights[1]}], lr=1e-4)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": ones(8, dtype=torch.bfloat16, device=device)})
        optim.AdamW(weights, lr=1e-4, master_weights=True)
        optim.AdamW(weights, lr=0.1)
        optim.AdamW([torch.nn.Parameter(p.float()) for p in weights], lr=1e-9)
        optim.AdamW([torch.nn.Parameter(p.data * 1e-3) for p in weights], lr=1e-4)


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_a_warning_names_the_line_that_made_the_group(cls):
    later = cls([ones(4)], lr=1e-9)

    def make():
        cls([ones(4, dtype=torch.bfloat16)], lr=1e-9)

    def add():
        later.add_param_group({"params": [ones(4, dtype=torch.bfloat16)]})

    for call in (make, add, torch.no_grad()(make)):
        with pytest.warns(UserWarning, match="master_weights=True") as seen:
            call()
        line = add.__code__.co_firstlineno + 1 if call is add else make.__code__.co_firstlineno + 1
        assert (seen[0].filename, seen[0].lineno) == (__file__, line)


def test_lost_updates_counts_weights():
    """bf16 at 1 is spaced 2^-7: half of that is the smallest step that moves it."""
    p = torch.tensor([1.0, 1.5, 0.01, 0.0], dtype=torch.bfloat16)
    assert lost_updates([p], 2**-8) == 0
    assert lost_updates([p], 2**-8 * 0.99) == pytest.approx(2 / 3)
    assert lost_updates([p.float()], 1e-9) == 0


# ---- one norm over everything ----


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_max_grad_norm_is_torchs_clip_then_step(backend, device, need_backend):
    need_backend(backend)
    torch.manual_seed(0)
    params = make_params(device, torch.float32, (40, 3), (77,))
    copies = twins(params)
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.01}]
    ours = build(optim.AdamW, groups, backend, lr=0.1, max_grad_norm=1.0)
    torchs = torch.optim.AdamW([{"params": copies[:1]}, {"params": copies[1:], "lr": 0.01}], lr=0.1)
    assert ours.grad_norm is None
    for _ in range(3):
        norm = torch.nn.utils.clip_grad_norm_(copies, 1.0)
        ours.step()
        torchs.step()
        torch.testing.assert_close(ours.grad_norm, norm)
        assert ours.grad_norm.shape == ()
        for p, q in zip(params, copies, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        new_grads(params)
        for p, q in zip(params, copies, strict=True):
            q.grad = p.grad.clone()


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_a_parameter_that_is_transposed_in_place(backend, device, need_backend):
    need_backend(backend)
    torch.manual_seed(0)
    p = make_params(device, torch.float32, (4, 4))[0]
    q = twins([p])[0]
    ours, torchs = build(optim.AdamW, [p], backend, lr=0.1), torch.optim.AdamW([q], lr=0.1)
    for _ in range(3):
        ours.step()
        torchs.step()
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        p.data, q.data = p.data.t(), q.data.t()  # the same memory, other strides
        q.grad = torch.randn(4, 4, device=device)
        p.grad = q.grad.clone()


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_learning_rate_of_any_dtype(dtype, backend, device, need_backend):
    need_backend(backend)
    p, q = ones(64, device=device), ones(64, device=device)
    lr = torch.tensor(0.125, dtype=dtype, device=device)
    build(optim.AdamW, [p], backend, lr=lr).step()
    build(optim.AdamW, [q], backend, lr=0.125).step()
    assert torch.equal(p, q)
    assert float(p.detach()[0]) < 0.9


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_gradients_that_are_not_in_memory(max_grad_norm, backend, device, need_backend):
    need_backend(backend)
    negative = torch.randn(4, 8, dtype=torch.complex64, device=device).conj().imag
    zeros = torch._efficientzerotensor((4, 8), device=device)
    assert negative.is_neg()
    params = make_params(device, torch.float32, (4, 8), (4, 8))
    expected = twins(params)
    for p, q, grad in zip(params, expected, (torch._neg_view(negative.clone()), zeros), strict=True):
        p.grad, q.grad = grad, grad + 0.0
    optimizer = build(optim.AdamW, params, backend, lr=0.1, max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(expected, lr=0.1)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(expected, max_grad_norm)
    optimizer.step()
    reference.step()
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(("freed", "name"), [("params", "params.*"), ("grads", "gradient of parameter 0")])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_freed_storage_is_refused(max_grad_norm, freed, name):
    if backends.get("native").unavailable("cpu"):
        pytest.skip("the native kernels are not built")
    flat, flat_grad = torch.ones(8), torch.ones(8)
    p = torch.nn.Parameter(flat[4:])  # a view with an offset: its pointer is not null when the storage is freed
    p.grad = flat_grad[4:]
    optimizer = optim.AdamW([p], lr=0.1, max_grad_norm=max_grad_norm, backend="native")
    optimizer.step()
    (flat if freed == "params" else flat_grad).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=name + ": expected a tensor with storage, got"):
        optimizer.step()
