"""GradScaler, torch's and ours, on our optimizers: what is skipped, what is scaled, how the scale moves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from optim_helpers import DEVICES, PLACES, build

import fusedops
from fusedops import optim

SCALERS = [pytest.param(torch.amp.GradScaler, id="torchs"), pytest.param(fusedops.amp.GradScaler, id="ours")]
both_scalers = pytest.mark.parametrize("make_scaler", SCALERS)
INF = float("inf")


def weights(device: str, *sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(0.5, 1.5, n, device=device)) for n in sizes]


def slow(params: object, **options: object) -> torch.optim.Optimizer:
    """torch's loop: the oracle; the scaler unscales for it."""
    return torch.optim.AdamW(params, foreach=False, fused=False, **options)


def backward(scaler: torch.amp.GradScaler, params: list[torch.nn.Parameter], factors: list[float]) -> None:
    """Leave a gradient of ``factor`` times the scale in every parameter."""
    loss = sum(
        (p * torch.arange(1.0, p.numel() + 1, device=p.device)).sum() * f for p, f in zip(params, factors, strict=True)
    )
    scaler.scale(loss).backward()


def snapshot(optimizer: torch.optim.Optimizer) -> list:
    return copy.deepcopy(
        [[p.detach(), dict(optimizer.state.get(p, {}))] for g in optimizer.param_groups for p in g["params"]]
    )


@both_scalers
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("where", [0, 1], ids=["inf in first group", "inf in second group"])
def test_an_inf_changes_nothing(where, backend, device, make_scaler, need_backend):
    need_backend(backend)
    params = weights(device, 7, 300)
    optimizer = build(optim.AdamW, [{"params": params[:1]}, {"params": params[1:], "lr": 0.01}], backend, lr=0.1)
    scaler = make_scaler(device, init_scale=1024.0)
    for bad in (True, False, True, False):  # step 1 is bad
        optimizer.zero_grad()
        factors = [1.0, 1.0]
        if bad:
            factors[where] = INF
        before = snapshot(optimizer)
        backward(scaler, params, factors)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        skipped = optimizer.step_was_skipped
        scaler.update()
        assert skipped.shape == ()
        assert bool(skipped) is bad
        assert bool(optimizer.step_was_skipped) is bad
        assert scaler.get_scale() == (scale / 2 if bad else scale)
        if not bad:
            continue
        for (p, state), (q, old) in zip(snapshot(optimizer), before, strict=True):
            assert torch.equal(p, q)
            assert all(torch.equal(value, old.get(key, torch.zeros_like(value))) for key, value in state.items())
    assert [float(optimizer.state[p]["step"]) for p in params] == [2.0, 2.0]


@both_scalers
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_every_kind_of_bad_gradient(bad, make_scaler):
    params = weights("cpu", 5)
    optimizer, scaler = optim.AdamW(params), make_scaler("cpu")
    backward(scaler, params, [bad])
    scaler.step(optimizer)
    assert bool(optimizer.step_was_skipped)


@both_scalers
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clip", [None, "outside", "inside"])
def test_same_as_unfused(clip, unscale, backend, device, make_scaler, need_backend):
    """With and without unscale_, clipped after it or within the step, over two accumulated backward passes."""
    if clip == "outside" and not unscale:
        pytest.skip("scaled gradients are not clipped from outside")
    need_backend(backend)
    ours, theirs = weights(device, 8, 33), weights(device, 8, 33)
    limit = 1.0 if clip == "inside" else None
    fused = build(optim.AdamW, ours, backend, lr=0.1, eps=1.0, max_grad_norm=limit)
    plain = slow(theirs, lr=0.1, eps=1.0)
    scalers = make_scaler(device, init_scale=1024.0), torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(3):
        for scaler, params, optimizer in ((scalers[0], ours, fused), (scalers[1], theirs, plain)):
            optimizer.zero_grad()
            for _ in range(2):
                backward(scaler, params, [0.5 + step, 2.0])
            if unscale or optimizer is plain:
                scaler.unscale_(optimizer)
            if clip == "outside":
                fusedops.clip_grad_norm_(params, 1.0)
            if clip == "inside" and optimizer is plain:
                norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)
    if clip == "inside":
        torch.testing.assert_close(fused.grad_norm, norm)


@both_scalers
def test_a_gradient_spoilt_after_unscale_acts_as_unfused(make_scaler):
    """The check belongs to unscale_; what happens to gradients after it is the user's business, fused or not."""
    results = []
    for make in (optim.AdamW, slow):
        p = torch.nn.Parameter(torch.ones(4))
        optimizer, scaler = make([p]), make_scaler("cpu", init_scale=2.0)
        scaler.scale(p.sum()).backward()
        scaler.unscale_(optimizer)
        p.grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        results.append(p.isnan().tolist())
    assert results[0] == results[1] == [True, False, False, False]


@both_scalers
def test_in_a_compiled_function(make_scaler):
    """The compiler replaces neither the optimizer nor its stage in the scaler."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer, scaler = optim.AdamW([p], lr=0.1), make_scaler("cpu", init_scale=4.0, growth_interval=2)

        def train(x, p=p, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            scaler.scale((p * x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        function = torch.compile(train, backend="eager") if compiled else train
        for x in (torch.ones(3), torch.full((3,), INF), torch.arange(3.0), torch.ones(3)):
            function(x)
        results.append((p.detach(), scaler.get_scale(), float(optimizer.state[p]["step"])))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:] == (4.0, 3.0)


@pytest.mark.parametrize("device", DEVICES)
def test_growth_and_backoff_over_2000_steps(device):
    generator = torch.Generator().manual_seed(0)
    bad_steps = (torch.rand(2000, generator=generator) < 0.02).tolist()
    bad_steps[0] = True
    traces = []
    for make_scaler, make in ((fusedops.amp.GradScaler, optim.AdamW), (torch.amp.GradScaler, slow)):
        p = torch.nn.Parameter(torch.ones(3, device=device))
        scaler, optimizer = make_scaler(device, init_scale=2.0**10, growth_interval=7), make([p], lr=1e-4)
        scaler.scale(p.sum())  # makes the scale
        trace = []
        for bad in bad_steps:
            p.grad = torch.full_like(p, INF) if bad else torch.ones_like(p) * scaler._scale
            scaler.step(optimizer)
            scaler.update()
            trace.append(scaler._scale.clamp(max=2.0**40).clone())
            scaler._scale.clamp_(max=2.0**40)
        traces.append(
            (torch.stack(trace).cpu(), scaler.state_dict(), float(optimizer.state[p]["step"]), p.detach().cpu())
        )
    (ours, our_dict, our_steps, our_p), (theirs, their_dict, their_steps, their_p) = traces
    assert torch.equal(ours, theirs)
    assert our_dict == their_dict
    assert our_steps == their_steps == 2000 - sum(bad_steps)
    # Each of 2,000 steps rounds a weight of about 1 once, in the same direction while the gradient is constant.
    torch.testing.assert_close(our_p, their_p, rtol=0, atol=2000 * 2.0**-24)


@both_scalers
def test_two_optimizers_on_one_scaler(make_scaler):
    """One inf halves the scale for both and skips only its own optimizer."""
    a, b = weights("cpu", 4), weights("cpu", 6)
    first, second = optim.AdamW(a, lr=0.1), optim.AdamW(b, lr=0.1)
    scaler = make_scaler("cpu", init_scale=256.0)
    backward(scaler, [*a, *b], [1.0, INF])
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert not bool(first.step_was_skipped)
    assert bool(second.step_was_skipped)
    assert scaler.get_scale() == 128.0
    assert float(first.state[a[0]]["step"]) == 1
    assert not torch.equal(a[0], weights("cpu", 4)[0])
    assert torch.equal(b[0], weights("cpu", 6)[0])


def test_ours_beside_torchs_optimizer():
    a, b = weights("cpu", 4), weights("cpu", 4)
    scaler = fusedops.amp.GradScaler("cpu", init_scale=256.0)
    ours, plain = optim.AdamW(a, lr=0.1), slow(b, lr=0.1)
    for _ in range(2):
        for optimizer in (ours, plain):
            optimizer.zero_grad()
        backward(scaler, [*a, *b], [1.0, 1.0])
        scaler.step(ours)
        scaler.step(plain)
        scaler.update()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@both_scalers
def test_disabled(make_scaler):
    params = weights("cpu", 4)
    scaler, optimizer = make_scaler("cpu", enabled=False), optim.AdamW(params, lr=0.1)
    assert scaler.scale(torch.tensor(3.0)) == 3.0
    backward(scaler, params, [1.0])
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 5.0) == 5.0
    scaler.update()
    assert float(optimizer.state[params[0]]["step"]) == 1
    assert not bool(optimizer.step_was_skipped)
    assert scaler.state_dict() == {}


@both_scalers
def test_fused_false_leaves_it_to_the_scaler(make_scaler):
    params = weights("cpu", 4)
    scaler, optimizer = make_scaler("cpu", init_scale=256.0), optim.AdamW(params, lr=0.1, fused=False)
    backward(scaler, params, [1.0])
    scaler.step(optimizer)
    torch.testing.assert_close(params[0].grad, torch.arange(1.0, 5.0))  # the scaler unscaled it
    assert float(optimizer.state[params[0]]["step"]) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unscale", [False, True])
def test_fused_false_tells_of_a_step_that_is_skipped(unscale, device):
    params = weights(device, 4, 5)
    scaler, optimizer = fusedops.amp.GradScaler(device, init_scale=256.0), optim.AdamW(params, fused=False)
    for bad in (True, False, True):
        optimizer.zero_grad()
        backward(scaler, params, [1.0, INF if bad else 1.0])
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.step_was_skipped.shape == ()
        assert bool(optimizer.step_was_skipped) is bad
    assert float(optimizer.state[params[0]]["step"]) == 1
    optimizer.step()
    assert not bool(optimizer.step_was_skipped)


def test_before_any_step_none_was_skipped_under_any_default_device():
    with torch.device("meta"):
        skipped = optim.AdamW(weights("cpu", 4)).step_was_skipped
    assert skipped.device.type == "cpu"
    assert skipped.item() is False


def test_gradients_are_not_written():
    params = weights("cpu", 4, 5)
    scaler, optimizer = fusedops.amp.GradScaler("cpu", init_scale=256.0), optim.AdamW(params, max_grad_norm=0.1)
    backward(scaler, params, [1.0, 1.0])
    kept = [p.grad.clone() for p in params]
    scaler.step(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, kept, strict=True))
    norm = torch.cat([g / 256 for g in kept]).norm()
    torch.testing.assert_close(optimizer.grad_norm, norm)


def test_a_plain_step_after_a_scaled_one_measures_nothing():
    params = weights("cpu", 4, 5)
    scaler, optimizer = fusedops.amp.GradScaler("cpu", init_scale=256.0), optim.AdamW(params)
    backward(scaler, params, [1.0, INF])
    scaler.step(optimizer)
    assert optimizer.grad_norm == INF
    assert bool(optimizer.step_was_skipped)
    optimizer.step()
    assert optimizer.grad_norm is None
    assert not bool(optimizer.step_was_skipped)


def test_misuse_is_torchs_error():
    params = weights("cpu", 4)
    scaler, optimizer = fusedops.amp.GradScaler("cpu"), optim.AdamW(params)
    with pytest.raises(AssertionError, match="scale"):
        scaler.step(optimizer)
    backward(scaler, params, [1.0])
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.step(optimizer)  # no gradient at all
    with pytest.raises(AssertionError, match="inf checks"):
        scaler.update()


def test_an_error_in_the_step_leaves_nothing_behind():
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer, scaler = optim.AdamW([p]), fusedops.amp.GradScaler("cpu")
    scaler.scale(p.sum())
    p.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(ValueError, match="dense"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


def test_state_dict_and_pickle_are_torchs():
    params = weights("cpu", 4)
    ours, torchs = fusedops.amp.GradScaler("cpu", init_scale=64.0), torch.amp.GradScaler("cpu")
    optimizer = optim.AdamW(params)
    backward(ours, params, [INF])
    ours.step(optimizer)
    ours.update()
    torchs.load_state_dict(ours.state_dict())
    assert torchs.state_dict() == ours.state_dict()
    assert torchs.get_scale() == 32.0
    revived = pickle.loads(pickle.dumps(ours))
    assert type(revived) is fusedops.amp.GradScaler
    assert revived.get_scale() == 32.0


def test_users_own_grad_scale_counts():
    results = []
    for make_scaler in (torch.amp.GradScaler, fusedops.amp.GradScaler):
        p = torch.nn.Parameter(torch.ones(4))
        optimizer, scaler = optim.AdamW([p], lr=0.1, eps=1.0), make_scaler("cpu", init_scale=2.0)
        scaler.scale(p.sum() * 3).backward()
        optimizer.grad_scale = torch.tensor(3.0)
        scaler.step(optimizer)
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@both_scalers
@pytest.mark.parametrize("bad", [0, 1])
def test_inf_on_one_device_only(bad, make_scaler):
    params = [torch.nn.Parameter(torch.ones(8, device=f"cuda:{i}")) for i in (0, 1)]
    optimizer, scaler = optim.AdamW(params, lr=0.1), make_scaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones((), device="cuda:0"))
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, INF if i == bad else 4.0)
    scaler.step(optimizer)
    scaler.update()
    assert bool(optimizer.step_was_skipped)
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)
    assert scaler.get_scale() == 2.0
