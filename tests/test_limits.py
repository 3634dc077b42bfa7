"""Where numbers end: widths, elements beyond 32 bits, strides, many rows, and values that arithmetic can't hold.

Every op and optimizer of the registry. What needs tens of GiB runs on a large GPU, its small image everywhere.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from optim_helpers import build
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops.registry import OPS, OPTIMS, VALUES, Case, OpSpec, OptimSpec, Sample

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GIB = torch.cuda.get_device_properties(0).total_memory >> 30 if torch.cuda.is_available() else 0
every_op = pytest.mark.parametrize("spec", OPS.values(), ids=OPS)
every_optimizer = pytest.mark.parametrize("spec", OPTIMS.values(), ids=OPTIMS)


def needs(gib: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(gib > GIB, reason=f"needs a GPU of {gib} GiB")


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    if torch.cuda.is_available():  # a collection takes most of a second once the whole suite is loaded
        gc.collect()
        torch.cuda.empty_cache()


def skip_slow(backend: str, device: str, large: bool = False) -> None:
    if backend == "triton" and device == "cpu":
        pytest.skip("the interpreter takes milliseconds for each program")
    if backend == "reference" and large:
        pytest.skip("plain PyTorch keeps several fp32 copies")


def mixed(spec: OpSpec, input: torch.dtype = BF16, others: torch.dtype = F32) -> dict[str, torch.dtype]:
    return {name: input if name == "input" else others for name in spec.grads}


def each(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Apply to an output or to each of several."""
    return tuple(map(function, output)) if isinstance(output, tuple) else function(output)


def assert_sound(spec: OpSpec, case: Case, backend: str, device: str) -> None:
    if reason := testing.refused(spec, case, backend, device):
        pytest.skip(f"{backend}: {reason}")
    outcome = testing.check(spec, case, backend, device)
    assert outcome.passed, str(outcome)


# ---------------------------------------------------------------- sizes

WIDTHS = (
    1, 2, 31, 33, 127, 257, 1000, 1500, 2049, 4095, 6000, 8193, 12289, 16385, 32769, 65536, 131073, 2**20 - 1, 2**20,
)  # fmt: skip


@every_op
@pytest.mark.parametrize("width", WIDTHS)
def test_width(spec: OpSpec, width: int, backend: str, device: str) -> None:
    if width > 2**17:
        skip_slow(backend, device)
    assert_sound(spec, Case((3, width), 1, mixed(spec)), backend, device)


@every_op
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_rows_of_one_column(spec: OpSpec, eps: float, dtype: torch.dtype, backend: str, device: str) -> None:
    """All but nothing is left of dx, and of what is normalised with its mean."""
    assert_sound(spec, Case((129, 1), 1, mixed(spec, dtype), options={"eps": eps}), backend, device)


def test_widths_reach_every_way_triton_lays_out_rows() -> None:
    pytest.importorskip("triton")
    from fusedops.backends.triton import norm

    for configs in (norm.FORWARD, norm.BACKWARD, norm.BACKWARD_RMS):
        assert {norm.row_config(configs, width) for width in WIDTHS} == {None, *configs}


@every_op
@pytest.mark.parametrize("shape", [(65535, 2, 4), (65536, 2, 4), (65537, 3), (131073, 1, 5), (300, 300, 2, 2)], ids=str)
def test_more_rows_than_a_grid_axis_holds(spec: OpSpec, shape: tuple[int, ...], backend: str, device: str) -> None:
    skip_slow(backend, device)
    assert_sound(spec, Case(shape, max(1, len(shape) - 1 - (shape[0] == 300)), mixed(spec)), backend, device)


def boundaries(count: int, unit: int = 1) -> list[int]:
    """Return places in units of so many elements: both ends, and around element 2^31 and 2^32."""
    near = [0, 1, *(2**power // unit + i for power in (31, 32) for i in (-1, 0, 1)), count - 2, count - 1]
    return sorted({place for place in near if 0 <= place < count})


@every_op
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        pytest.param(70_001, 24, id="small"),
        pytest.param(2**20 + 3, 4096, id="2^32 elements", marks=needs(120)),
        pytest.param(2**28 + 5, 16, id="2^28 rows", marks=needs(120)),
    ],
)
def test_more_elements_than_32_bits_count(spec: OpSpec, rows: int, width: int, backend: str, device: str) -> None:
    """Rows of zeros but for a few, which have to be what they are among themselves, and so have their sums."""
    skip_slow(backend, device, large=rows * width >= 2**31)
    places = boundaries(rows, width)
    case = Case((len(places), width), 1, mixed(spec))
    sample = testing.make_sample(spec, case, device)

    def among_zeros(few: Tensor) -> Tensor:
        many = few.new_zeros(rows, *few.shape[1:])
        for place, row in zip(places, few.detach(), strict=True):
            many[place].copy_(row)
        return many

    given: list[Any] = []

    def grad(output: Any) -> Any:
        given.append(testing.make_grad(case, each(lambda t: t[: len(places)], output)))
        return each(among_zeros, given[0])

    large = dict(sample.kwargs)
    for name in sample.grads:
        if testing.shape_of(spec, case, name) == case.shape:
            large[name] = among_zeros(large[name]).requires_grad_()
    found = testing.run(partial(spec.function, backend=backend), replace(sample, kwargs=large), grad)
    few = {
        name: torch.stack([value[place] for place in places]) if value.shape == (rows, width) else value
        for name, value in found.items()
    }
    outcome = testing.judge(spec, case, sample, given[0], few, backend=backend)
    assert outcome.passed, str(outcome)


@every_op
def test_rows_further_apart_than_32_bits_count(spec: OpSpec, backend: str, device: str) -> None:
    """Input and gradient as two rows 2^31 elements apart; on a CPU the pages between are never touched."""
    case = Case((2, 64), 1, mixed(spec))
    sample = testing.make_sample(spec, case, device)

    def apart(t: Tensor) -> Tensor:
        far = torch.empty(2**31 + 64, dtype=t.dtype, device=device).as_strided((2, 64), (2**31, 1))
        return far.copy_(t.detach())

    def run(change: Any) -> dict[str, Tensor]:
        kwargs = dict(sample.kwargs)
        for name in sample.grads:
            if testing.shape_of(spec, case, name) == case.shape:
                kwargs[name] = change(kwargs[name]).requires_grad_()
        return testing.run(
            partial(spec.function, backend=backend),
            replace(sample, kwargs=kwargs),
            lambda output: each(change, testing.make_grad(case, output)),
        )

    near, far = run(lambda t: t.detach().clone()), run(apart)
    for name, value in near.items():
        torch.testing.assert_close(far[name], value, rtol=0, atol=0)


# ---------------------------------------------------------------- optimizers

COUNTS = [
    pytest.param(70_001, F32, id="small"),
    pytest.param(2**31 + 4096, F32, id="2^31 fp32", marks=needs(60)),
    pytest.param(2**32 + 4096, BF16, id="2^32 bf16", marks=needs(60)),
]


def windows(count: int) -> list[slice]:
    """Return stretches around each boundary, which do not overlap."""
    near = [place for place in boundaries(count) if place % 2**31 == 1] + [count - 32]
    return [slice(max(0, place - 32), min(count, place + 32)) for place in near]


def pieces(t: Tensor, places: list[slice]) -> Tensor:
    return torch.cat([t[place] for place in places])


@every_optimizer
@pytest.mark.parametrize(("count", "dtype"), COUNTS)
def test_a_parameter_of_more_elements_than_32_bits_count(
    spec: OptimSpec, count: int, dtype: torch.dtype, backend: str, device: str
) -> None:
    skip_slow(backend, device, large=count >= 2**31)
    there = windows(count)
    total = sum(place.stop - place.start for place in there)
    grads = [torch.randn(total, device=device).to(dtype) for _ in range(2)]
    found = []
    for size, places in ((count, there), (total, [slice(0, total)])):
        p = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        optimizer: Any = build(spec.optimizer, [p], backend, lr=0.1)  # type: ignore[arg-type]
        for grad in grads:
            p.grad = torch.ones_like(p)
            for place, part in zip(places, grad.split([place.stop - place.start for place in places]), strict=True):
                p.grad[place].copy_(part)
            optimizer.step()
        found.append(pieces(p.detach(), places))
        assert p[size // 3] != 1, "an element between did not move"
        del p, optimizer
    torch.testing.assert_close(*found, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(("count", "dtype"), COUNTS)
def test_clipping_more_elements_than_32_bits_count(count: int, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_slow(backend, device, large=count >= 2**31)
    p = torch.nn.Parameter(torch.empty(count, dtype=dtype, device=device))
    p.grad = torch.full_like(p, 0.5)
    with fusedops.use_backend(backend):
        norm = fusedops.clip_grad_norm_([p], max_norm=1.0)
    truth = 0.5 * math.sqrt(count)
    assert float(norm) == pytest.approx(truth, rel=1e-6)
    got = pieces(p.grad, windows(count)).float()
    torch.testing.assert_close(got, torch.full_like(got, 0.5 / truth), rtol=4 * torch.finfo(dtype).eps, atol=0)


# ---------------------------------------------------------------- values


@every_op
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5])
def test_values(spec: OpSpec, values: str, dtype: torch.dtype, eps: float, backend: str, device: str) -> None:
    case = Case((6, 1000), 1, mixed(spec, dtype), options={"eps": eps}, values=values)
    assert_sound(spec, case, backend, device)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU does not flush subnormals")
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_flushed_subnormals(backend: str, need_backend: Callable[[str], None]) -> None:
    """Where the user has them flushed, native takes those of fp16 for zero too; PyTorch converts them before."""
    need_backend(backend)
    x = torch.full((2, 64), 2.0**-14, dtype=F16)
    x[:, ::2] /= 2  # subnormal
    torch.set_flush_denormal(True)
    try:
        y = fusedops.rms_norm(x, 64, eps=1e-12, backend=backend)
        seen = torch.where(x < 2.0**-14, 0.0, x.double()) if backend == "native" else x.double()
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(y.double(), torch.nn.functional.rms_norm(seen, (64,), eps=1e-12), rtol=1e-3, atol=0.0)


@every_op
@pytest.mark.parametrize("width", [8, 1000, 5000, 70_000])
def test_rows_whose_squares_add_up_to_inf(spec: OpSpec, width: int, backend: str, device: str) -> None:
    """The variance is inf, so rstd is 0 and y the bias; not NaN, though the mean's rounding squares to inf as well."""
    case = Case((5, width), 1, dict.fromkeys(spec.grads, F32))
    if reason := testing.refused(spec, replace(case, values="huge"), backend, device):
        pytest.skip(f"{backend}: {reason}")
    kwargs = testing.make_sample(spec, case, device).kwargs
    for name in ("input", *spec.like_input):
        kwargs[name] = (1e30 * kwargs[name].detach()).requires_grad_()
    output = testing.outputs_of(spec.function(**kwargs, backend=backend))[0]
    assert torch.equal(output, kwargs["bias"].expand(5, width) if "bias" in kwargs else torch.zeros_like(output))
    for grad in torch.autograd.grad(output.sum(), [kwargs[name] for name in spec.grads]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm"])
@pytest.mark.parametrize("width", [7, 1000, 5000, 70_000])
def test_rows_far_from_zero(op: str, width: int, backend: str, device: str) -> None:
    """Squares that add up to more than fp32 holds do not once they are centred."""
    spec = OPS[op]
    case = Case((5, width), 1, dict.fromkeys(spec.grads, F32))
    if reason := testing.refused(spec, replace(case, values="huge"), backend, device):
        pytest.skip(f"{backend}: {reason}")
    sample = testing.make_sample(spec, case, device)
    for name in ("input", *spec.like_input):
        sample.kwargs[name] = (1e20 + 1e16 * sample.kwargs[name].detach()).requires_grad_()
    assert_sound_on(spec, case, sample, backend)


@pytest.mark.parametrize("backend", ["native", "triton"], indirect=True)
@pytest.mark.parametrize("op", ["layer_norm_bwd", "add_layer_norm_bwd"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("width", [1, 24, 100, 1000, 5119, 40_000])
def test_no_element_past_the_end_counts(op: str, dtype: torch.dtype, width: int, backend: str, device: str) -> None:
    """In constant rows so large that zero, which stands for an absent element, less the mean and times rstd, is inf."""
    total = torch.full((5, width), 3e36, dtype=dtype, device=device)
    dy, dsum = (torch.randint(-1, 2, (5, width), device=device).to(dtype) for _ in range(2))
    weight = torch.randint(1, 3, (width,), device=device).to(dtype)
    stats = total[:, 0].float(), torch.full((5,), 1e-5, device=device).rsqrt()
    shape = [[width]] if backend == "native" else []
    bwd = getattr(torch.ops.fusedops if backend == "native" else fusedops.backends.get(backend), op)
    g = dy.double() * weight
    want = stats[1][:, None] * (g - g.mean(1, keepdim=True))  # x̂ is zero
    if op == "layer_norm_bwd":
        dx, dweight, dbias = bwd(dy, total, *shape, weight, *stats, [True] * 3, dtype)
    else:
        rest = (None, 0.0, False, [True] * 4, dtype, dtype, dtype)
        _, dx, dweight, dbias = bwd(dy, dsum, total, *shape, weight, *stats, *rest)
        want += dsum
    torch.testing.assert_close(dx, want.to(dtype))
    assert torch.equal(dweight, torch.zeros_like(weight))
    assert torch.equal(dbias, dy.sum(0))


@every_op
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("width", [7, 1000, 70_000])
def test_one_bad_row_leaves_the_others_bitwise_as_they_are(
    spec: OpSpec, bad: float, width: int, backend: str, device: str
) -> None:
    case = Case((5, width), 1, mixed(spec))
    sample = testing.make_sample(spec, case, device)
    call = partial(spec.function, backend=backend)
    clean = testing.run(call, sample, lambda output: testing.make_grad(case, output))
    spoilt = sample.kwargs["input"].detach().clone()
    spoilt[2, width // 2] = bad
    kwargs = {**sample.kwargs, "input": spoilt.requires_grad_()}
    found = testing.run(call, replace(sample, kwargs=kwargs), lambda output: testing.make_grad(case, output))
    for name in ("output", "input"):
        good = [0, 1, 3, 4]
        torch.testing.assert_close(found[name][good], clean[name][good], rtol=0, atol=0)
        assert not found[name][2].isfinite().all()


def assert_sound_on(spec: OpSpec, case: Case, sample: Sample, backend: str) -> None:
    """Judge a case on numbers of its own."""
    kept: list[Any] = []

    def grad(output: Any) -> Any:
        kept.append(testing.make_grad(case, output))
        return kept[0]

    found = testing.run(partial(spec.function, backend=backend), sample, grad)
    outcome = testing.judge(spec, case, sample, kept[0], found, backend=backend)
    assert outcome.passed, str(outcome)


def alike(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Every row the same, made where they are used: gigabytes take seconds on their way to a GPU."""
    return testing.normal(shape[-1:], generator).to(torch.get_default_device()).expand(shape).contiguous()


def assert_sums_of_numbers_alike_are_sound(
    spec: OpSpec, case: Case, noise: testing.Noise, grad_noise: testing.Noise, backend: str, device: str
) -> None:
    """Rounding errors are alike too: whoever adds up one after another adds them up as well."""
    if backend == "reference":
        pytest.skip("PyTorch does on the CPU: 70,001 rows are off by hundreds of the bound")
    sample = testing.make_sample(spec, case, device, noise=noise)
    given: list[Any] = []

    def grad(output: Any) -> Any:
        given.append(testing.make_grad(case, output, noise=grad_noise))
        return given[0]

    found = testing.run(partial(spec.function, backend=backend), sample, grad)
    outcome = testing.judge(spec, case, sample, given[0], found, backend=backend, on=device, beside=False)
    assert outcome.passed, str(outcome)


def interpret_few_programs(monkeypatch: pytest.MonkeyPatch, **configs: Any) -> None:
    """Let few numbers be many for a program of Triton's."""
    from fusedops.backends.triton import norm
    from fusedops.backends.triton.launch import DeviceLimits

    monkeypatch.setattr(norm, "device_limits", lambda device: DeviceLimits(multiprocessors=1, shared_bytes=2**16))
    for name, config in configs.items():
        monkeypatch.setattr(norm, name, config)


@every_op
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kernel", ["narrow", "wide"])
@pytest.mark.parametrize(
    ("rows", "width"),
    [(70_001, 16), pytest.param(2**20, 256, marks=needs(60)), pytest.param(2**16, 4096, marks=needs(60))],
)
def test_rows_of_gradients_that_are_all_alike(
    spec: OpSpec, rows: int, width: int, kernel: str, dtype: torch.dtype, backend: str, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    case = Case((rows, width), 1, mixed(spec, dtype), out_dtype=F32)
    if backend == "triton" and device == "cpu":
        from fusedops.backends.triton.norm import RowConfig

        rows_alone = () if kernel == "wide" else (RowConfig(256, rows=1, warps=1),)
        wide = RowConfig(16, rows=1, warps=1)
        interpret_few_programs(monkeypatch, BACKWARD=rows_alone, BACKWARD_RMS=rows_alone, BACKWARD_WIDE=wide)
        case = replace(case, shape=(300, 16))
    elif kernel == "wide":  # of CUDA
        case = replace(case, layout="misaligned")
    assert_sums_of_numbers_alike_are_sound(spec, case, alike, alike, backend, device)


@every_op
def test_a_row_of_gradients_that_are_all_alike(
    spec: OpSpec, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((1, 2**20), 1, mixed(spec, F32))
    if backend == "triton" and device == "cpu":
        from fusedops.backends.triton.norm import RowConfig

        means, wide = RowConfig(64, rows=1, warps=1), RowConfig(2**16, rows=1, warps=1)
        interpret_few_programs(monkeypatch, BACKWARD_WIDE_MEANS=means, BACKWARD_WIDE=wide)
        case = replace(case, shape=(1, 64 * 600))

    def parameters_alike(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return testing.normal(shape, generator) if len(shape) > 1 else torch.ones(shape, dtype=torch.float64)

    def gradients_alike(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.full(shape, 1.3, dtype=torch.float64)  # 600 of them, one after another: off by 96 units

    assert_sums_of_numbers_alike_are_sound(spec, case, parameters_alike, gradients_alike, backend, device)


def test_fp64_gradients_that_are_all_alike(backend: str, device: str) -> None:
    """The truth is the product: PyTorch's own fp64 sum is no better than one of ours that drifts."""
    if backend in ("triton", "apex"):
        pytest.skip("no fp64")
    rows, value = 20_000, 1.3
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=device).expand(rows, 2)  # mean 0, variance 1
    weight, bias = (torch.ones(2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    y = fusedops.layer_norm(x, 2, weight, bias, eps=0.0, backend=backend)
    y.backward(torch.full_like(y, value))
    want = float(Fraction(value) * rows)
    for grad, sign in ((weight.grad, (-1, 1)), (bias.grad, (1, 1))):
        off = (grad - want * torch.tensor(sign, device=device)).abs().max()
        assert float(off) <= 4 * 2.0**-53 * math.sqrt(math.log2(rows)) * want


@every_op
def test_a_row_of_the_largest_fp16_numbers(spec: OpSpec, backend: str, device: str) -> None:
    """Their squares are beyond fp16, the sums of squares far beyond."""
    case = Case((4, 4096), 1, mixed(spec, F16))
    sample = testing.make_sample(spec, case, device)
    sample.kwargs["input"] = sample.kwargs["input"].detach().sign().mul_(65504).requires_grad_()
    assert_sound_on(spec, case, sample, backend)
