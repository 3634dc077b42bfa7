"""What optimizers go through in long runs: every option at once, tensors for betas, hooks, layouts, memory."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import time
from collections.abc import Callable

import pytest
import torch
from optim_helpers import DEVICES, PLACES, build, make_params, new_grads, ones, truncates, twins

import fusedops
from fusedops import optim
from fusedops.testing_optim import assert_step

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
quiet = pytest.mark.filterwarnings("ignore:.*round.* away")
MODES = {
    "fp32": (F32, {}),
    "fp64": (F64, {}),
    "bf16": (BF16, {}),
    "fp16": (F16, {}),
    "bf16-state": (BF16, {"state_dtype": F32}),
    "bf16-master": (BF16, {"state_dtype": F32, "master_weights": True}),
    "fp16-master": (F16, {"master_weights": True}),
    "bf16-kahan": (BF16, {"kahan_sum": True}),
    "fp16-kahan": (F16, {"kahan_sum": True, "state_dtype": F32}),
    "bf16-stochastic": (BF16, {"bf16_stochastic_round": True}),
}


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_every_combination(cls, mode, backend, device, need_backend):
    """amsgrad × maximize × weight decay, a group each, with its own lr, betas and eps; three steps of each."""
    need_backend(backend)
    dtype, options = MODES[mode]
    if truncates(backend, device) and dtype is BF16 and "master_weights" in options:
        pytest.skip("Triton's interpreter truncates to bf16: the parameter is not its master, rounded")
    torch.manual_seed(0)
    groups = [
        {
            "params": make_params(device, dtype, (37,), (3, 11)),
            "amsgrad": amsgrad,
            "maximize": maximize,
            "weight_decay": decay,
            "lr": 0.03 + 0.01 * number,
            "betas": (0.0 if number == 3 else 0.8, 0.95),
            "eps": 1e-6,
        }
        for number, (amsgrad, maximize, decay) in enumerate(itertools.product((False, True), (False, True), (0.0, 0.1)))
    ]
    optimizer = build(cls, groups, backend, **options)
    for _ in range(1 if truncates(backend, device) else 3):
        assert_step(optimizer)
        new_grads([p for group in groups for p in group["params"]])


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("place", ["cpu", "device"])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_betas_that_are_tensors(dtype, place, backend, device, need_backend):
    """The steps of the same numbers, also when they change in place, and torch's own with the same tensors."""
    need_backend(backend)
    params = make_params(device, F32, (300,), (4, 5))
    copies, others = twins(params), twins(params)
    betas = tuple(torch.tensor(b, dtype=dtype, device=device if place == "device" else "cpu") for b in (0.8, 0.95))
    with_tensors = build(optim.AdamW, params, backend, lr=0.05, betas=betas)
    with_numbers = build(optim.AdamW, copies, backend, lr=0.05, betas=tuple(map(float, betas)))
    torchs = torch.optim.AdamW(others, lr=0.05, betas=tuple(map(float, betas)))
    for step in range(4):
        if step == 2:
            for beta in betas:
                beta.fill_(0.5)
            with_numbers.param_groups[0]["betas"] = torchs.param_groups[0]["betas"] = (0.5, 0.5)
        for optimizer in (with_tensors, with_numbers, torchs):
            optimizer.step()
        for p, q, r in zip(params, copies, others, strict=True):
            assert torch.equal(p, q)
            torch.testing.assert_close(p, r, rtol=1e-5, atol=1e-6)
    saved = copy.deepcopy(with_tensors.state_dict())
    loaded = build(optim.AdamW, twins(params), backend, betas=(torch.tensor(0.1), torch.tensor(0.2)))
    loaded.load_state_dict(saved)
    assert all(
        a == b and a.device.type == "cpu"
        for a, b in zip(loaded.param_groups[0]["betas"], map(torch.Tensor.cpu, betas), strict=True)
    )
    with_tensors.step()
    loaded.step()
    for p, q in zip(params, loaded.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
def test_a_captured_step_reads_betas_at_replay(backend):
    p = ones(4097, device="cuda")
    q = twins([p])[0]
    betas = torch.tensor(0.9, device="cuda"), torch.tensor(0.99, device="cuda", dtype=F64)
    ours = build(optim.AdamW, [p], backend, lr=torch.tensor(0.1, device="cuda"), betas=betas)
    torchs = torch.optim.AdamW([q], lr=0.1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.step()
    torch.cuda.current_stream().wait_stream(side)
    torchs.param_groups[0]["betas"] = (0.9, 0.99)
    torchs.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for beta1, beta2 in ((0.9, 0.99), (0.5, 0.8), (0.0, 0.999)):
        betas[0].fill_(beta1)
        betas[1].fill_(beta2)
        torchs.param_groups[0]["betas"] = (beta1, beta2)
        p.grad.normal_()
        q.grad.copy_(p.grad)
        graph.replay()
        torchs.step()
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@quiet
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_no_step_waits_for_the_gpu(mode, backend):
    dtype, options = MODES[mode]
    params = make_params("cuda", dtype, (64, 3), (1000,), ())
    numbers = [torch.tensor(x, device="cuda") for x in (0.1, 0.9, 0.99)]
    optimizer = build(
        optim.AdamW,
        params,
        backend,
        lr=numbers[0],
        betas=tuple(numbers[1:]),
        max_grad_norm=1.0,
        amsgrad=True,
        **options,
    )
    scaler = fusedops.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    grads = [torch.ones_like(p) for p in params]
    strided = torch.ones(3, 64, device="cuda", dtype=dtype).t()
    for step in range(4):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        if step == 3:
            params[0].grad, params[1].grad = strided, None
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            if step % 2:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            assert optimizer.step_was_skipped.shape == ()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
def test_one_optimizer_a_parameter_in_backward(device, monkeypatch):
    """200 optimizers in hooks: each makes one plan, keeps it, and steps as one optimizer over all does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(100))).to(device)
    copied = copy.deepcopy(model)
    built = []
    make_plan = optim.AdamW.make_plan
    monkeypatch.setattr(optim.AdamW, "make_plan", lambda self, bucket: built.append(1) or make_plan(self, bucket))
    optimizers = {p: optim.AdamW([p], lr=0.01) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    whole = optim.AdamW(copied.parameters(), lr=0.01)
    x = torch.randn(5, 6, device=device)
    for _ in range(4):
        model(x).square().sum().backward()
        copied(x).square().sum().backward()
        whole.step()
        whole.zero_grad()
    assert len(built) == 201
    assert all(p.grad is None for p in model.parameters())
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(p, q)


def resident() -> int:
    """Memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_ten_thousand_steps_need_no_more_memory_than_a_hundred(backend, device, need_backend):
    """Gradients at new addresses that come and go, a changing lr, a norm, a scaler; no tensor is left over."""
    need_backend(backend)
    if truncates(backend, device):
        pytest.skip("10,000 steps are too many for Triton's interpreter")
    steps = 2_000 if backend == "reference" else 10_000
    sets = [make_params(device, dtype, (40,), (7, 9)) for dtype in (F32, BF16, F16)]
    groups = [
        {"params": sets[0]},
        {"params": sets[1], "bf16_stochastic_round": True},
        {"params": sets[2], "kahan_sum": True},
    ]
    optimizer = build(optim.AdamW, groups, backend, lr=1e-3, max_grad_norm=1.0)
    scaler = fusedops.amp.GradScaler(device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    params = [p for ps in sets for p in ps]
    grads = [[torch.randn(p.shape).to(device, p.dtype) for p in params] for _ in range(3)]

    def run(count):
        for i in range(count):
            for p, g in zip(params, grads[i % 3], strict=True):
                p.grad = g.clone()
            params[i % len(params)].grad = None
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + i)
            scaler.step(optimizer)
            scaler.update()

    def measure():
        gc.collect()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        return tensors, torch.cuda.memory_allocated() if device == "cuda" else 0, resident()

    run(steps // 20)
    before = measure()
    run(steps)
    after = measure()
    cached = 200 if backend == "triton" else 0  # tables of the last 16 lists of gradients, then it starts anew
    assert after[0] <= before[0] + cached
    assert after[1] <= before[1] + cached * 1024
    assert after[2] <= before[2] + (8 << 20)


@quiet
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_needs_no_room_of_a_parameter(mode, backend):
    dtype, options = MODES[mode]
    params = make_params("cuda", dtype, (4096, 1024), (1024, 2048))
    optimizer = build(optim.AdamW, params, backend, lr=0.01, max_grad_norm=1.0, **options)
    scaler = fusedops.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones((), device="cuda"))
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scaler.step(optimizer)
        scaler.update()
        if step:
            assert torch.cuda.max_memory_allocated() - before <= 256 << 10  # of 12 to 48 MiB of parameters


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_resuming_with_a_scaler(mode, backend, device, need_backend):
    """Optimizer and scaler saved after a skipped step, loaded into new ones: the same bits from there on."""
    need_backend(backend)
    dtype, options = MODES[mode]
    params = make_params(device, dtype, (50,), (4, 7))
    grads = [[torch.randn(p.shape).to(device, dtype) for p in params] for _ in range(8)]
    grads[3][1][0, 0] = float("inf")

    def run(scaler, optimizer, mine, rows):
        for row in rows:
            for p, g in zip(mine, row, strict=True):
                p.grad = g.clone()
            scaler.step(optimizer)
            scaler.update()

    def new(mine, lr):
        scaler = fusedops.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        scaler.scale(torch.ones((), device=device))
        return scaler, build(optim.AdamW, mine, backend, lr=lr, max_grad_norm=1.0, **options)

    scaler, optimizer = new(params, 0.01)
    run(scaler, optimizer, params, grads[:4])
    assert bool(optimizer.step_was_skipped)
    copies = twins(params)
    other_scaler, other = new(copies, 0.5)
    other_scaler.load_state_dict(pickle.loads(pickle.dumps(scaler.state_dict())))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(scaler, optimizer, params, grads[4:])
    run(other_scaler, other, copies, grads[4:])
    for p, q in zip(params, copies, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(value, other.state[q][key]) for key, value in optimizer.state[p].items())
    assert scaler.state_dict() == other_scaler.state_dict()


@quiet
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", MODES)
def test_moving_between_devices_mid_run(mode):
    """CUDA → CPU → CUDA by state dict: state arrives bit for bit, and both ends go on."""
    dtype, options = MODES[mode]
    params = make_params("cuda", dtype, (50,), (4, 7))
    optimizer = optim.AdamW(params, lr=0.05, **options)
    optimizer.step()
    for device in ("cpu", "cuda"):
        moved = [torch.nn.Parameter(p.detach().to(device)) for p in params]
        other = optim.AdamW(moved, lr=1.0, **options)
        other.load_state_dict(optimizer.state_dict())
        for p, q in zip(params, moved, strict=True):
            for key, value in optimizer.state[p].items():
                assert torch.equal(value.cpu(), other.state[q][key].cpu())
                assert other.state[q][key].device.type == device
        params, optimizer = moved, other
        new_grads(params)
        assert_step(optimizer)


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("options", [{"kahan_sum": True}, {"bf16_stochastic_round": True, "seed": 3}])
def test_copies_and_pickles_of_the_16_bit_modes(options, backend, device, need_backend):
    need_backend(backend)
    params = make_params(device, BF16, (33,), (4, 4))
    optimizer = build(optim.AdamW, params, backend, lr=0.05, **options)
    optimizer.step()
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    optimizer.step()
    for other in others:
        for p, q in zip(params, other.param_groups[0]["params"], strict=True):
            q.grad = p.grad.clone()
        other.step()
        for p, q in zip(params, other.param_groups[0]["params"], strict=True):
            assert torch.equal(p, q)


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("mode", ["bf16-kahan", "bf16-stochastic", "bf16-master"])
def test_layouts_of_the_16_bit_modes(mode, backend, device, need_backend):
    """Channels-last, transposed, gapped, a view of a flat buffer; gradients of other strides and views."""
    need_backend(backend)
    dtype, options = MODES[mode]
    if truncates(backend, device) and "master_weights" in options:
        pytest.skip("Triton's interpreter truncates to bf16: the parameter is not its master, rounded")
    torch.manual_seed(2)
    flat, flat_grad = torch.randn(1000, device=device).to(dtype), torch.randn(1000, device=device).to(dtype)
    leaves = [
        torch.randn(2, 3, 4, 5, device=device).to(dtype).to(memory_format=torch.channels_last),
        torch.randn(31, 17, device=device).to(dtype).t(),
        torch.randn(20, 20, device=device).to(dtype)[:, 3:14],
        flat[3:510].view(13, 39),
    ]
    params = [torch.nn.Parameter(t.detach()) for t in leaves]
    optimizer = build(optim.AdamW, params, backend, lr=0.05, **options)
    for _ in range(3):
        for p in params[:3]:
            p.grad = torch.randn(p.shape, device=device).to(dtype)
        params[3].grad = flat_grad[1:508].view(13, 39)
        assert_step(optimizer)


# ---- threads ----


class SlowPlan:
    """A plan that lets other threads run between what its step prepares and what it writes."""

    def __init__(self, plan: object, meanwhile: Callable[[], object]) -> None:
        self.plan, self.meanwhile = plan, meanwhile

    def prepare(self, *args: object) -> None:
        self.plan.prepare(*args)
        self.meanwhile()

    def grad_norm(self, *args: object) -> torch.Tensor:
        return self.plan.grad_norm(*args)

    def launch(self) -> None:
        self.plan.launch()


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_threads_that_share_an_optimizer_take_their_steps_in_turn(backend, device, need_backend):
    need_backend(backend)
    p = ones(64, device=device)
    ours, alone = build(optim.AdamW, [p], backend, lr=0.1), build(optim.AdamW, twins([p]), backend, lr=0.1)
    ours.step()
    ours._buckets[0].plan = SlowPlan(ours._buckets[0].plan, lambda: time.sleep(0.001))
    threads = [threading.Thread(target=lambda: [ours.step() for _ in range(10)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(31):
        alone.step()
    assert float(ours.state[p]["step"]) == 31
    assert torch.equal(p, alone.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    "act",
    [
        lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.zero_grad(),
        lambda optimizer: optimizer.add_param_group({"params": [ones(3)]}),
        lambda optimizer: optimizer.step_scaled(torch.ones(1), torch.zeros(1)),
    ],
    ids=["load_state_dict", "state_dict", "zero_grad", "add_param_group", "step_scaled"],
)
def test_nothing_meddles_with_a_step_that_is_under_way(act):
    p = ones(64)
    optimizer = optim.AdamW([p], lr=0.1)
    optimizer.step()
    plan = optimizer._buckets[0].plan
    done = []
    other = threading.Thread(target=lambda: done.append(act(optimizer)))
    early = []

    def meanwhile() -> None:
        if other.ident is None:
            other.start()
            other.join(timeout=0.2)
            early.append(not other.is_alive())

    optimizer._buckets[0].plan = SlowPlan(plan, meanwhile)
    optimizer.step()
    other.join(timeout=10)
    assert not other.is_alive()
    assert len(done) == 1, "it raised"
    assert early == [False]
    assert float(optimizer.state[p]["step"]) >= 2
