"""What an add + norm has beside a norm: dropout without a mask, a residual stream of its own dtype, two results."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_helpers import assert_close, assert_same
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops import nn, testing
from fusedops.ops.dropout import dropout_factor, philox, threshold_and_scale
from fusedops.registry import OPS, Case, OpSpec

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ADDS = [spec for spec in OPS.values() if "residual" in spec.grads]
SPECS = pytest.mark.parametrize("spec", ADDS, ids=[spec.name for spec in ADDS])


def tensors(*shape: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    """Return an input, a residual and a weight that require a gradient."""
    made = torch.randn(shape), torch.randn(shape), torch.rand(shape[-1])
    return tuple(t.to(dtype).requires_grad_() for t in made)  # type: ignore[return-value]


def kept(spec: OpSpec, p: float, rows: int, hidden: int) -> Tensor:
    """Return what the op multiplies its input with, from ones added to zeros."""
    return spec.function(torch.ones(rows, hidden), torch.zeros(rows, hidden), hidden, dropout_p=p)[1]


# ---------------------------------------------------------------- random bits


@pytest.mark.parametrize(
    ("word", "want"),
    [(0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd")],
)
def test_philox_isphilox(word: int, want: str) -> None:
    """The known answers of its authors' own test."""
    counter = torch.tensor(word)
    got = philox((counter,) * 4, counter, counter)
    assert " ".join(f"{int(w):08x}" for w in got) == want


@SPECS
@pytest.mark.parametrize("shape", [(3, 1), (5, 3), (4, 64), (3, 37), (2, 1030), (2, 33000)], ids=str)
def test_every_backend_keeps_the_same_elements(spec: OpSpec, shape: tuple[int, int], backend: str) -> None:
    """Bit for bit what plain PyTorch makes of the seed that this very call drew."""
    torch.manual_seed(5)
    seed = torch.ops.fusedops.dropout_seed(torch.empty(0, dtype=torch.int64))
    assert (seed.dtype, seed.shape) == (torch.int64, (2,))
    torch.manual_seed(5)
    assert torch.equal(kept(spec, 0.375, *shape), dropout_factor(seed, 0.375, shape, 1, F32))


@pytest.mark.parametrize("row", [0, 1, 2**32 - 1, 2**32, 2**40 + 3])
def test_rows_beyond_32_bits_have_bits_of_their_own(row: int) -> None:
    counter = (torch.tensor(0), torch.tensor(row & 0xFFFFFFFF), torch.tensor(row >> 32), torch.tensor(7))
    words = {tuple(map(int, philox(counter, torch.tensor(1), torch.tensor(2))))}
    other = (counter[0], torch.tensor((row + 2**32) & 0xFFFFFFFF), torch.tensor(row + 2**32 >> 32), counter[3])
    words.add(tuple(map(int, philox(other, torch.tensor(1), torch.tensor(2)))))
    assert len(words) == 2


@SPECS
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(spec: OpSpec, p: float, backend: str) -> None:
    """Within five standard deviations in all, in each row and each column, and neighbours know nothing of each other.

    A sound generator fails one of these about once in 3,000 seeds; the seed is fixed.
    """
    rows, hidden = 64, 512
    factor = kept(spec, p, rows, hidden).double()
    assert set(factor.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - p), dtype=F32))}
    keep = (factor > 0).double()
    deviation = math.sqrt(p * (1 - p))
    assert abs(float(keep.mean()) - (1 - p)) < 5 * deviation / math.sqrt(rows * hidden)
    assert float((keep.mean(1) - (1 - p)).abs().max()) < 5 * deviation / math.sqrt(hidden)
    assert float((keep.mean(0) - (1 - p)).abs().max()) < 5 * deviation / math.sqrt(rows)
    centred = (keep - keep.mean()) / deviation
    for shift, dim in ((1, 1), (2, 1), (4, 1), (1, 0)):
        assert abs(float((centred * centred.roll(shift, dim)).mean())) < 5 / math.sqrt(rows * hidden)
    assert abs(float(factor.mean()) - 1) < 5 * deviation / (1 - p) / math.sqrt(rows * hidden)


def test_threshold() -> None:
    assert threshold_and_scale(0.0) == (0, 1.0)
    assert threshold_and_scale(0.5) == (2**31, 2.0)
    assert threshold_and_scale(1.0) == (2**32 - 1, 0.0)
    assert threshold_and_scale(2.0**-32)[0] == 1


@SPECS
def test_no_and_all_dropout_are_exact(spec: OpSpec, backend: str) -> None:
    x, r, w = tensors(5, 48)
    state = torch.default_generator.get_state()
    for options in ({"dropout_p": 0.0}, {"dropout_p": 0.7, "training": False}, {}):
        assert torch.equal(spec.function(x, r, 48, w, **options)[1], x + r)
    assert torch.equal(torch.default_generator.get_state(), state), "nothing to draw for"
    y, total = spec.function(x, r, 48, w, dropout_p=1.0)
    assert torch.equal(total, r)
    (dx, dr) = torch.autograd.grad((y.sum() + (total * 2).sum()), (x, r))
    assert not dx.any()
    assert dr.all()


@SPECS
def test_the_generator_decides(spec: OpSpec, backend: str) -> None:
    x, r, _ = tensors(4, 64)

    def draw() -> Tensor:
        total: Tensor = spec.function(x, r, 64, dropout_p=0.5)[1]
        return total.detach()

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)


# ---------------------------------------------------------------- forward and backward belong together


@SPECS
@pytest.mark.parametrize("residual_dtype", [None, F32, BF16], ids=str)
def test_the_norm_is_that_of_the_sum_returned(spec: OpSpec, residual_dtype: torch.dtype | None, backend: str) -> None:
    norm = getattr(fusedops, spec.name.removeprefix("add_"))
    x, r, w = tensors(6, 72, dtype=BF16)
    y, total = spec.function(x, r.float(), 72, w, dropout_p=0.3, residual_dtype=residual_dtype, out_dtype=F32)
    assert total.dtype is (residual_dtype or F32)
    torch.testing.assert_close(y, norm(total, 72, w, out_dtype=F32), rtol=1e-5, atol=1e-5)


@SPECS
def test_backward_replays_the_mask(spec: OpSpec, backend: str) -> None:
    x, r, w = tensors(7, 65)
    y, total = spec.function(x, r, 65, w, dropout_p=0.4)
    factor = torch.where((total - r).detach() == 0, 0.0, torch.tensor(1 / 0.6, dtype=F32))
    dx, dr = torch.autograd.grad((y, total), (x, r), (torch.randn(7, 65), torch.randn(7, 65)))
    assert torch.equal(dx, dr * factor)


@SPECS
def test_derivatives_with_dropout(spec: OpSpec, backend: str) -> None:
    """First and second derivatives against finite differences, the mask being the same at each call."""
    case = Case((3, 5), 1, dict.fromkeys(spec.grads, F64))
    if reason := testing.refused(spec, case, backend, str(torch.get_default_device())):
        pytest.skip(reason)
    kwargs = testing.make_sample(spec, case, str(torch.get_default_device())).kwargs
    leaves = [kwargs.pop(name) for name in spec.grads]

    def function(*given: Tensor) -> Any:
        torch.manual_seed(3)
        return spec.function(**dict(zip(spec.grads, given, strict=True)), **kwargs, eps=1e-2, dropout_p=0.4)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@SPECS
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("used", ["y", "residual_out"])
def test_a_gradient_that_is_absent(
    spec: OpSpec, p: float, dtypes: tuple[torch.dtype, ...], used: str, backend: str
) -> None:
    """As if the other gradient were zero; parameters that the one result does not depend on have none."""
    x, r, w = tensors(4, 24)
    leaves = [t.detach().to(dtype).requires_grad_() for t, dtype in ((x, dtypes[0]), (r, dtypes[1]), (w, F32))]
    number = ("y", "residual_out").index(used)
    found = []
    for zeros in (False, True):
        torch.manual_seed(2)
        outputs = spec.function(*leaves[:2], 24, leaves[2], dropout_p=p)
        grads = [torch.randn(4, 24, generator=torch.Generator(outputs[0].device).manual_seed(9), dtype=F32).to(o.dtype)
                 if i == number else torch.zeros_like(o) for i, o in enumerate(outputs)]  # fmt: skip
        given = (outputs, grads) if zeros else ([outputs[number]], [grads[number]])
        found.append(torch.autograd.grad(given[0], leaves, given[1], allow_unused=True))
    absent, zero = found
    assert (absent[2] is None) == (used == "residual_out")
    assert_close(absent[:2], zero[:2], **({} if BF16 in dtypes else {"rtol": 1e-5, "atol": 1e-6}))
    assert absent[2] is None or torch.equal(absent[2], zero[2])


@SPECS
def test_one_gradient_where_nothing_tells_two_apart(spec: OpSpec, backend: str) -> None:
    x, r, w = tensors(4, 32)
    for options, same in (({}, True), ({"dropout_p": 0.5}, False)):
        grads: list[Tensor] = []
        a, b = (t * 1 for t in (x, r))
        for t in (a, b):
            t.register_hook(grads.append)
        y, total = spec.function(a, b, 32, w, **options)
        (y.sum() + total.sum()).backward()
        if backend != "reference":
            assert (grads[0].data_ptr() == grads[1].data_ptr()) is same
    y, total = spec.function(x, r.detach(), 32, w)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@SPECS
def test_the_sum_needs_no_gradient_of_parameters(spec: OpSpec, backend: str) -> None:
    x, r, w = tensors(4, 32)
    y, total = spec.function(x.detach(), r.detach(), 32, w)
    assert y.requires_grad
    assert not total.requires_grad


@SPECS
def test_a_sum_changed_in_place_is_noticed(spec: OpSpec, backend: str) -> None:
    """Backward reads it. The norm itself may be changed."""
    if backend == "reference":
        pytest.skip("plain PyTorch keeps intermediate results of its own")
    x, r, w = tensors(4, 32)
    y, total = spec.function(x, r, 32, w)
    y.mul_(2).sum().backward(retain_graph=True)
    total.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@SPECS
def test_backward_twice(spec: OpSpec, backend: str) -> None:
    x, r, w = tensors(4, 32)
    loss = sum(out.square().sum() for out in spec.function(x, r, 32, w, dropout_p=0.5))
    first = torch.autograd.grad(loss, (x, r, w), retain_graph=True)
    assert_same(torch.autograd.grad(loss, (x, r, w)), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


# ---------------------------------------------------------------- dtypes


@SPECS
def test_result_dtypes(spec: OpSpec, backend: str) -> None:
    for x_dtype in (F32, F16, BF16):
        for r_dtype in (F32, F16, BF16):
            x, r = torch.randn(3, 16).to(x_dtype), torch.randn(3, 16).to(r_dtype)
            assert [t.dtype for t in spec.function(x, r, 16)] == [x_dtype, r_dtype]
            results = spec.function(x, r, 16, out_dtype=F16, residual_dtype=F32)
            assert [t.dtype for t in results] == [F16, F32]


@SPECS
def test_autocast_leaves_the_residual_alone(spec: OpSpec, backend: str) -> None:
    x, r, w = tensors(3, 16)
    with torch.autocast(x.device.type, BF16):
        y, total = spec.function(x, r, 16, w)
        assert (y.dtype, total.dtype) == (BF16, F32)
        assert spec.function(x, r, 16, w, residual_dtype=F16)[1].dtype is F16
        with fusedops.amp.set_norm_output("fp32"):
            assert spec.function(x, r, 16, w)[0].dtype is F32
    assert torch.equal(total, x + r)


@SPECS
@pytest.mark.parametrize("kind", ["negative", "zeros"])
def test_tensors_that_are_not_in_memory(spec: OpSpec, kind: str, backend: str) -> None:
    def lazy(*shape: int) -> Tensor:
        if kind == "negative":
            return torch._neg_view(torch.randn(shape))
        return torch._efficientzerotensor(shape, device=torch.get_default_device())

    given = [lazy(5, 16), lazy(5, 16), *(lazy(16) for _ in spec.grads[2:])]
    grads = lazy(5, 16), lazy(5, 16)
    found = []
    for written in (False, True):
        leaves = [(t + 0.0 if written else t).detach().requires_grad_() for t in given]
        outputs = spec.function(**dict(zip(spec.grads, leaves, strict=True)), normalized_shape=16, eps=1e-3)
        dys = [g + 0.0 if written else g for g in grads]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, dys)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got + 0.0, want)


@SPECS
def test_meta_tensors(spec: OpSpec) -> None:
    x = torch.empty(3, 8, 16, device="meta", dtype=BF16).transpose(0, 1)
    y, total = spec.function(x, x.float(), 16, dropout_p=0.5)
    assert (y.device.type, y.shape, y.dtype, total.dtype) == ("meta", x.shape, BF16, F32)


# ---------------------------------------------------------------- compiled and captured


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("forced", ["native", "reference"])
@SPECS
def test_compiled_drops_what_eager_drops(spec: OpSpec, forced: str, compiler: str) -> None:
    if reason := fusedops.backends("cpu")[forced]:
        pytest.skip(reason)
    torch._dynamo.reset()

    def function(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first, r = spec.function(x * 1, r, 32, w, dropout_p=0.5)
        return spec.function(first, r, 32, w, dropout_p=0.25)

    found, leaves = [], tensors(4, 32)
    with fusedops.use_backend(forced):
        for call in (function, torch.compile(function, backend=compiler, fullgraph=True)):
            torch.manual_seed(11)
            outputs = call(*leaves)
            loss = sum(out.square().sum() for out in outputs)
            found.append([*(out.detach() for out in outputs), *torch.autograd.grad(loss, leaves)])
    assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forced", ["native", "reference"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@SPECS
def test_two_equal_calls_in_a_graph_draw_twice(spec: OpSpec, mode: Callable[[], Any], forced: str) -> None:
    """What eager draws. Of equal calls the compiler keeps one, unless something tells them apart."""
    if reason := fusedops.backends("cpu")[forced]:
        pytest.skip(reason)
    torch._dynamo.reset()
    x, r, w = tensors(4, 64)

    def function(a: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with mode():
            calls = [spec.function(a, r, 64, dropout_p=0.5)[1] for _ in range(2)]
        return *calls, w * calls[0] - w * calls[1]

    with fusedops.use_backend(forced):
        torch.manual_seed(1)
        eager = function(x, r, w)
        torch.manual_seed(1)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(x, r, w)
    assert_same(compiled, eager)
    assert not torch.equal(compiled[0], compiled[1])


def test_compiled_bits() -> None:
    """Inductor's C++ may do anything where an int64 overflows, so none may."""
    torch._dynamo.reset()
    seed = torch.tensor([7692698082559361259, 4064269471072392264])

    def function(seed: Tensor) -> Tensor:
        return dropout_factor(seed, 0.5, (4, 64), 1, F32)

    assert torch.equal(torch.compile(function, fullgraph=True)(seed), function(seed))


@SPECS
def test_a_captured_graph_draws_anew_at_each_replay(spec: OpSpec, backend: str) -> None:
    if not torch.cuda.is_available() or torch.get_default_device().type != "cuda":
        pytest.skip("needs a GPU")
    x, r, w = tensors(64, 256)
    grads = [torch.randn(64, 256), torch.randn(64, 256)]

    def step() -> list[Tensor]:
        outputs = spec.function(x, r, 256, w, dropout_p=0.5)
        return [*outputs, *torch.autograd.grad(outputs, (x, r, w), grads)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        _, total, dx, dr, _ = (t.clone() for t in static)
        dropped = (total - r.detach()) == 0
        assert 0.4 < float(dropped.float().mean()) < 0.6
        assert torch.equal(dx, torch.where(dropped, 0.0, dr * 2)), "backward replays the mask of its own forward"
        seen.append(dropped)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


# ---------------------------------------------------------------- torch.func


def dropped(spec: OpSpec | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what an op drops of its input, or what PyTorch drops."""
    if spec is None:
        return lambda x, r: F.dropout(x, 0.5) + 0 * r
    return lambda x, r: spec.function(x, r, r.shape[-1], dropout_p=0.5)[1] - r


@SPECS
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("batched", [(0, 0), (None, 0)], ids=str)
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_decides_about_randomness(
    spec: OpSpec, randomness: str, batched: tuple[int | None, ...], compiled: bool
) -> None:
    """As of torch.nn.functional.dropout."""
    found = []
    for drops in (spec, None):
        torch._dynamo.reset()
        function = torch.func.vmap(dropped(drops), batched, randomness=randomness)
        if compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        given = torch.ones(3, 2, 64) if batched[0] == 0 else torch.ones(2, 64), torch.zeros(3, 2, 64)
        if randomness == "error":
            with pytest.raises(RuntimeError, match="random"):
                function(*given)
            continue
        masks = function(*given)
        assert 0.3 < float((masks == 0).float().mean()) < 0.7
        found.append(torch.equal(masks[0], masks[1]))
    assert found == ([] if randomness == "error" else [randomness == "same"] * 2)


@SPECS
def test_vmap_without_dropout_draws_nothing(spec: OpSpec) -> None:
    x, r = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    for options in ({}, {"dropout_p": 0.5, "training": False}):
        found = torch.func.vmap(lambda x, r: spec.function(x, r, 8, **options))(x, r)  # noqa: B023
        assert_close(found, spec.function(x, r, 8))


@SPECS
def test_transforms_draw_what_eager_draws(spec: OpSpec) -> None:
    x, r, w = (t.detach() for t in tensors(4, 64))
    found = []
    for transformed in (False, True):
        torch.manual_seed(1)
        function = lambda a: spec.function(a, r, 64, w, dropout_p=0.5)[0].square().sum()  # noqa: E731
        leaf = x.clone().requires_grad_()
        found.append([torch.func.grad(function)(x)] if transformed else torch.autograd.grad(function(leaf), leaf))
    assert_close(*found, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- several threads


@SPECS
def test_threads_that_draw(spec: OpSpec, backend: str) -> None:
    """They share a generator, which any may seed: who draws what is chance, each mask is whole."""
    where = str(torch.get_default_device())
    if (backend, where) == ("triton", "cpu"):
        pytest.skip("Triton's interpreter keeps the place of a program in one global")
    drawn: dict[int, list[Tensor]] = {}
    start = threading.Barrier(3)

    def run(number: int) -> None:
        x, r = torch.ones(64, 64, device=where, requires_grad=True), torch.zeros(64, 64, device=where)
        start.wait()
        for call in range(20):
            if call % 5 == number:
                torch.manual_seed(number)
            total = spec.function(x, r, 64, dropout_p=0.5)[1]
            assert torch.equal(torch.autograd.grad(total.sum(), x)[0], total.detach())
            drawn.setdefault(number, []).append(total.detach())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    masks = [mask for found in drawn.values() for mask in found]
    assert len(masks) == 60, "a thread failed"
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) > 3


# ---------------------------------------------------------------- what is refused


@SPECS
def test_bad_input_is_named(spec: OpSpec, backend: str) -> None:
    x, r = torch.randn(2, 8), torch.randn(2, 8)
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: spec.function(x, None, 8), "residual"),
        (lambda: spec.function(x, r[:1], 8), "residual"),
        (lambda: spec.function(x, r.double(), 8), "residual"),
        (lambda: spec.function(x, r.int(), 8), "residual"),
        (lambda: spec.function(x, torch.empty(2, 8, device="meta"), 8), "residual"),
        (lambda: spec.function(x, r, 7), "normalized_shape"),
        (lambda: spec.function(x, r, 8, torch.ones(7)), "weight"),
        (lambda: spec.function(x, r, 8, dropout_p=-0.1), "dropout_p"),
        (lambda: spec.function(x, r, 8, dropout_p=1.1), "dropout_p"),
        (lambda: spec.function(x, r, 8, dropout_p=math.nan), "dropout_p"),
        (lambda: spec.function(x, r, 8, eps=-1.0), "eps"),
        (lambda: spec.function(x, r, 8, out_dtype=torch.int32), "out_dtype"),
        (lambda: spec.function(x, r, 8, residual_dtype=torch.int32), "residual_dtype"),
        (lambda: spec.function(x, r, 8, residual_dtype=F64), "residual_dtype"),
    ]
    for _ in range(2):  # the second time without, then with a like call seen before
        for call, named in bad:
            with pytest.raises(ValueError, match=rf"(?s){spec.name}.*{named}"):
                call()
        spec.function(x, r, 8)


def test_offset_needs_a_weight() -> None:
    with pytest.raises(ValueError, match=r"weight_offset: expected 0.0 without a weight, got 1.0"):
        fusedops.add_rms_norm(torch.randn(2, 8), torch.randn(2, 8), 8, weight_offset=1.0)


@SPECS
def test_apex_says_that_it_has_none(spec: OpSpec) -> None:
    x = torch.randn(2, 8)
    verdicts = dict(fusedops.explain(spec.function, x.to("meta"), x.to("meta"), 8).verdicts)
    assert verdicts["apex"]
    assert spec.name not in fusedops.backends.get("apex").LIMITS
    with pytest.raises(fusedops.UnsupportedError, match="apex"):
        spec.function(x, x, 8, backend="apex")


# ---------------------------------------------------------------- modules


@pytest.mark.parametrize(
    ("ours", "plain"), [(nn.AddLayerNorm, torch.nn.LayerNorm), (nn.AddRMSNorm, torch.nn.RMSNorm)], ids=str
)
def test_modules(ours: Callable[..., torch.nn.Module], plain: Callable[..., torch.nn.Module]) -> None:
    module, reference = ours((4, 8), eps=1e-3, dropout_p=0.5, residual_dtype=F32), plain((4, 8), eps=1e-3)
    assert list(module.state_dict()) == list(reference.state_dict())
    for p in module.parameters():
        torch.nn.init.uniform_(p)
    reference.load_state_dict(module.state_dict())
    assert "dropout_p=0.5" in repr(module)
    x, r = torch.randn(3, 4, 8), torch.randn(3, 4, 8).to(BF16)
    torch.manual_seed(1)
    y, total = module(x, r)
    torch.manual_seed(1)
    again = copy.deepcopy(module)(x, r)
    assert_same((y, total), again)
    dropped = (total - r.float()) == 0
    assert 0 < int(dropped.sum()) < dropped.numel()
    torch.testing.assert_close(y, reference(total))
    y, total = module.eval()(x, r)
    assert torch.equal(total, x + r.float())
    torch.testing.assert_close(y, reference(x + r.float()))


def test_a_post_norm_block_is_pytorchs() -> None:
    """dropout, add and norm, as models write them."""
    x, r, w, b = (torch.randn(*s, requires_grad=True) for s in ((6, 32), (6, 32), (32,), (32,)))
    module = nn.AddLayerNorm(32, dropout_p=0.5)
    module.weight, module.bias = torch.nn.Parameter(w.detach()), torch.nn.Parameter(b.detach())
    y, total = module(x, r)
    factor = torch.where((total - r).detach() == 0, 0.0, 2.0)
    want = F.layer_norm(r + x * factor, (32,), w, b)
    torch.testing.assert_close(y, want)
    got = torch.autograd.grad(y.square().sum(), (x, r, module.weight, module.bias))
    assert_close(got, torch.autograd.grad(want.square().sum(), (x, r, w, b)), rtol=1e-4, atol=1e-5)
