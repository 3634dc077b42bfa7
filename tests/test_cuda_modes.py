"""On a GPU: captured in a CUDA graph, on side streams, on a device that is not the current one, without a host sync."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from op_helpers import (
    RANDOM_SPECS,
    SPECS,
    Function,
    as_function,
    assert_close,
    assert_same,
    make_leaves,
    results,
    small_case,
    total,
)
from optim_helpers import build, make_params, twins
from torch import Tensor, nn

import fusedops
from fusedops import backends, optim
from fusedops.registry import Case, OpSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(params=["native", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if reason := backends.get(request.param).unavailable("cuda"):
        if request.param in request.config.getoption("--require").split(","):
            pytest.fail(f"--require {request.param}: {reason}", pytrace=False)
        pytest.skip(reason)
    with fusedops.use_backend(request.param):
        yield request.param


@contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run on a stream, after what the current one was given and before what it is given next."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def no_sync() -> Iterator[None]:
    """Make every wait of the host for the GPU an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def cases(spec: OpSpec) -> list[Case]:
    """Narrow, wide and odd rows, which are different kernels."""
    return [small_case(spec, BF16, F32, shape=shape) for shape in ((64, 1024), (33, 8200), (700, 63))]


# ---------------------------------------------------------------- CUDA graphs


@SPECS
def test_a_captured_op_is_the_eager_one(spec: OpSpec, backend: str) -> None:
    """Forward and backward, replayed on other numbers, give the bits of eager calls."""
    for case in cases(spec):
        op, static = as_function(spec, case), make_leaves(spec, case, "cuda")
        with on(torch.cuda.Stream()):
            for _ in range(2):
                results(op, static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results(op, static)
        for seed in range(25):
            fresh = make_leaves(spec, case, "cuda", seed)
            with torch.no_grad():
                for leaf, value in zip(static, fresh, strict=True):
                    leaf.copy_(value)
            graph.replay()
            assert_same(captured, results(op, fresh))


@RANDOM_SPECS
def test_every_replay_drops_other_elements(spec: OpSpec, backend: str) -> None:
    """As eager calls do: replay after replay the same masks as call after call, in forward and backward alike."""
    case = small_case(spec, shape=(64, 1024))
    op, leaves = as_function(spec, case, dropout_p=0.5), make_leaves(spec, case, "cuda")
    with on(torch.cuda.Stream()):
        results(op, leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(op, leaves)
    # PyTorch writes the graph's seed on the stream of the capture, and at a replay on the current one, in no order.
    torch.cuda.synchronize()
    torch.cuda.manual_seed(3)
    replayed = []
    for _ in range(4):
        graph.replay()
        replayed.append([t.clone() for t in captured])
    torch.cuda.manual_seed(3)
    for got in replayed:
        assert_same(got, results(op, leaves))
    assert not torch.equal(replayed[0][0], replayed[1][0])


class Net(nn.Module):
    """Norms between element-wise layers: nothing whose bits depend on a library's mood."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.linspace(0.5, 1.5, 256)) for _ in range(2))
        self.layer_norm, self.rms_norm = fusedops.nn.LayerNorm(256), fusedops.nn.RMSNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(torch.tanh(self.layer_norm(x * self.first)) * self.second)


class Training:
    """A network in fp16 autocast with its optimizer and scaler; everything that changes is a tensor on the GPU."""

    def __init__(
        self,
        backend: str,
        cls: type[optim.Adam],
        make_scaler: Callable[..., torch.amp.GradScaler],
        dtype: torch.dtype = F32,
        **options: object,
    ) -> None:
        self.net = Net().to("cuda", dtype)
        self.lr = torch.tensor(1e-2, device="cuda")
        self.optimizer = build(cls, self.net.parameters(), backend, lr=self.lr, capturable=True, **options)
        # Grows after two sound steps, so that the scale moves many times.
        self.scaler = make_scaler("cuda", init_scale=2.0**10, growth_interval=2)
        self.x, self.target = torch.zeros(64, 256, device="cuda"), torch.ones(64, 256, device="cuda")

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", F16, cache_enabled=False):
            y = self.net(self.x)
        self.scaler.scale(((y.float() - self.target) ** 2).mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def everything(self) -> list[Tensor]:
        states = [value for p in self.net.parameters() for value in self.optimizer.state[p].values()]
        return [*(p.detach() for p in self.net.parameters()), *states, self.scaler._scale, self.scaler._growth_tracker]


def torchs_scaler_takes(dtype: torch.dtype) -> bool:
    found, scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(1, dtype=dtype, device="cuda")], found, scale)
    except NotImplementedError:
        return False
    return True


VARIANTS = [
    (F32, {}),
    (F32, {"amsgrad": True, "max_grad_norm": 1.0}),
    (BF16, {"master_weights": True}),
    (BF16, {"kahan_sum": True}),
    (BF16, {"bf16_stochastic_round": True, "max_grad_norm": 1.0}),
]


@pytest.mark.parametrize(("dtype", "options"), VARIANTS, ids=str)
@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, fusedops.amp.GradScaler], ids=["torchs", "ours"])
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_a_captured_training_step(
    cls: type[optim.Adam],
    make_scaler: type[torch.amp.GradScaler],
    dtype: torch.dtype,
    options: dict[str, object],
    backend: str,
) -> None:
    """Forward, backward, scaler and step in one graph: learning rate and scale change between replays, some steps are
    skipped, and every tensor stays bit for bit that of the eager run."""
    if make_scaler is torch.amp.GradScaler and not torchs_scaler_takes(dtype):
        pytest.skip(f"PyTorch's own scaler takes no {dtype} gradients on CUDA")
    captured, eager = (Training(backend, cls, make_scaler, dtype, **options) for _ in range(2))

    def feed(step: int) -> None:
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).cuda()
        if step % 7 == 5:
            x[3, 4] = float("inf")  # spoils the gradients: the step must change nothing but the scale
        for training in (captured, eager):
            training.x.copy_(x)
            training.lr.fill_(1e-2 / (1 + step))

    for step in range(3):
        feed(step)
        with on(torch.cuda.Stream()):
            captured.step()
        eager.step()
        assert not eager.optimizer.step_was_skipped
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    scales, skipped = set(), []
    for step in range(3, 60):
        feed(step)
        graph.replay()
        eager.step()
        assert_same(captured.everything(), eager.everything())
        scales.add(float(eager.scaler._scale))
        if eager.optimizer.step_was_skipped:
            skipped.append(step)
    assert len(scales) > 3, "the scale never moved"
    assert {5, 12, 19, 26, 33, 40, 47, 54} <= set(skipped)
    steps = {float(captured.optimizer.state[p]["step"]) for p in captured.net.parameters()}
    assert steps == {60.0 - len(skipped)}


@SPECS
def test_compiled_into_cuda_graphs(spec: OpSpec, backend: str) -> None:
    """mode="reduce-overhead" captures what Inductor makes of the ops, forward and backward apart."""
    torch._dynamo.reset()
    case = small_case(spec, shape=(64, 1024))
    op = as_function(spec, case)
    compiled = torch.compile(op, mode="reduce-overhead", fullgraph=True)
    for seed in range(6):
        leaves = make_leaves(spec, case, "cuda", seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in results(compiled, leaves)]
        assert_close(found, results(op, leaves), rtol=1e-4, atol=1e-4)


@RANDOM_SPECS
def test_compiled_cuda_graphs_drop_other_elements(spec: OpSpec, backend: str) -> None:
    """At each run, whether it warms up, records or replays; backward the same as its forward."""
    torch._dynamo.reset()
    case = small_case(spec, shape=(64, 1024))
    compiled = torch.compile(as_function(spec, case, dropout_p=0.5), mode="reduce-overhead", fullgraph=True)
    leaves, masks = make_leaves(spec, case, "cuda"), []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        _, summed, dx, dr = (t.clone() for t in results(compiled, leaves)[:4])
        dropped = summed - leaves[1].detach() == 0
        assert 0.4 < float(dropped.float().mean()) < 0.6
        torch.testing.assert_close(dx, torch.where(dropped, 0.0, dr * 2))
        masks.append(dropped)
    assert not any(torch.equal(a, b) for a, b in pairwise(masks))


def test_graphed_callables(backend: str) -> None:
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    eager = Net().cuda()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(eager), (x.detach().clone().requires_grad_(),))
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(64, 256, device="cuda", requires_grad=True)
        found = []
        for net in (graphed, eager):
            y = net(x)
            found.append([y.detach().clone(), *torch.autograd.grad((y**3).sum(), [x, *net.parameters()])])
        assert_same(*[[t.clone() for t in some] for some in found])


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_captured_clipping_follows_its_bound(dtype: torch.dtype, backend: str) -> None:
    """A bound on the GPU is read there: never by the host, at each replay anew, with the bits that its number gives."""
    bound = torch.tensor(1.0, dtype=dtype, device="cuda")
    params = make_params("cuda", F32, (40, 3), (7,)) + make_params("cuda", BF16, (10_001,))
    fresh = twins(params)
    fusedops.clip_grad_norm_(params, bound)  # loads kernels
    with no_sync():
        fusedops.clip_grad_norm_(params, bound)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = fusedops.clip_grad_norm_(params, bound)
    for value in (0.5, 1e6, 0.1, 0.0):
        bound.fill_(value)
        for p, q in zip(params, fresh, strict=True):
            p.grad.copy_(q.grad)
        graph.replay()
        copies = twins(fresh)
        expected = fusedops.clip_grad_norm_(copies, value)
        assert_same([norm, *(p.grad for p in params)], [expected, *(q.grad for q in copies)])


# ---------------------------------------------------------------- streams and devices


@SPECS
def test_work_follows_the_current_stream(spec: OpSpec, backend: str) -> None:
    """The inputs are written late on a side stream: a launch elsewhere, forward or backward, would not see them."""
    for case in cases(spec):
        op, fresh = as_function(spec, case), make_leaves(spec, case, "cuda", seed=1)
        expected = results(op, fresh)
        leaves = make_leaves(spec, case, "cuda", seed=2)
        torch.cuda.synchronize()
        with on(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            with torch.no_grad():
                for leaf, value in zip(leaves, fresh, strict=True):
                    leaf.copy_(value)
            found = results(op, leaves)
        assert_same(found, expected)


@SPECS
def test_streams_at_once(spec: OpSpec, backend: str) -> None:
    """Nothing that a launch needs on the device is shared by two streams."""
    work: list[tuple[Function, list[Tensor], list[Tensor]]] = []
    for number, case in enumerate(cases(spec) * 2):
        op, leaves = as_function(spec, case), make_leaves(spec, case, "cuda", seed=number)
        work.append((op, leaves, results(op, leaves)))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in work]
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    for _ in range(20):
        for stream, (op, leaves, expected) in zip(streams, work, strict=True):
            with torch.cuda.stream(stream):
                found.append((results(op, leaves), expected))
    torch.cuda.synchronize()
    for got, want in found:
        assert_same(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@SPECS
@pytest.mark.parametrize("compiled", [False, True])
def test_a_device_that_is_not_the_current_one(spec: OpSpec, compiled: bool, backend: str) -> None:
    torch._dynamo.reset()
    for case in cases(spec):
        op = as_function(spec, case)
        here, there = make_leaves(spec, case, "cuda:0"), make_leaves(spec, case, "cuda:1")
        expected = results(op, here)
        with torch.cuda.device(0):
            found = results(torch.compile(op, fullgraph=True) if compiled else op, there)
            assert torch.cuda.current_device() == 0
        assert all(t.device == torch.device("cuda:1") for t in found)
        if compiled:
            assert_close([t.to("cuda:0") for t in found], expected, rtol=2e-2, atol=1e-2)
        else:
            assert_same([t.to("cuda:0") for t in found], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_an_optimizer_of_another_device(cls: type[optim.Adam], backend: str) -> None:
    found = []
    for device in ("cuda:0", "cuda:1"):
        p = nn.Parameter(torch.linspace(-1, 1, 4097, device=device))
        optimizer = cls([p], lr=0.1, max_grad_norm=1.0)
        for _ in range(3):
            p.grad = p.detach().sin()
            optimizer.step()
        found.append([p.detach().cpu(), optimizer.grad_norm.cpu()])
    assert torch.cuda.current_device() == 0
    assert_same(*found)


# ---------------------------------------------------------------- host syncs


@SPECS
@pytest.mark.parametrize("dtypes", [(F32,), (BF16, F32), (BF16,)], ids=str)
def test_an_op_never_waits_for_the_gpu(spec: OpSpec, dtypes: tuple[torch.dtype, ...], backend: str) -> None:
    for case in cases(spec):
        case = small_case(spec, *dtypes, shape=case.shape)
        op, leaves = as_function(spec, case), make_leaves(spec, case, "cuda")
        results(op, leaves)  # loads kernels
        with no_sync():
            results(op, leaves)
            with torch.no_grad(), torch.autocast("cuda", F16):
                op(*leaves)


@RANDOM_SPECS
def test_dropout_is_deterministic_and_never_waits(spec: OpSpec, backend: str) -> None:
    case = small_case(spec, BF16, F32, shape=(64, 1024))
    op, leaves, found = as_function(spec, case, dropout_p=0.5), make_leaves(spec, case, "cuda"), []
    torch.use_deterministic_algorithms(True)
    try:
        results(op, leaves)  # loads kernels
        for _ in range(2):
            torch.cuda.manual_seed(3)
            with no_sync():
                found.append(results(op, leaves))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(*found)


@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, fusedops.amp.GradScaler], ids=["torchs", "ours"])
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_a_training_step_never_waits_for_the_gpu(
    cls: type[optim.Adam], make_scaler: type[torch.amp.GradScaler], backend: str
) -> None:
    training = Training(backend, cls, make_scaler)
    for _ in range(2):
        training.step()
    with no_sync():
        for _ in range(3):
            training.step()
        assert training.optimizer.step_was_skipped.is_cuda


@SPECS
def test_second_derivatives_never_wait_for_the_gpu(spec: OpSpec, backend: str) -> None:
    op, leaves = as_function(spec, small_case(spec)), make_leaves(spec, small_case(spec), "cuda")

    def twice() -> list[Tensor]:
        first = torch.autograd.grad(total(op(*leaves)), leaves, create_graph=True)
        return list(torch.autograd.grad(total(first), leaves))

    twice()
    with no_sync():
        twice()
