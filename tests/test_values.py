"""Where numbers end in their values: what arithmetic can't hold, rows that are all alike, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from op_helpers import assert_sound, every_op, mixed, needs
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops.registry import OPS, VALUES, Case, OpSpec, Sample

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = pytest.mark.usefixtures("memory_given_back")


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
        interpret_few_programs(monkeypatch, BACKWARD=rows_alone, BACKWARD_WIDE=wide)
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


@pytest.mark.parametrize("hidden", [2, 64])
def test_fp64_gradients_that_are_all_alike(hidden: int, backend: str, device: str) -> None:
    """The truth is the product: PyTorch's own fp64 sum is no better than one of ours that drifts."""
    if backend in ("triton", "apex"):
        pytest.skip("no fp64")
    rows, value = 20_000, 1.3
    signs = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=device).repeat(hidden // 2)  # mean 0, variance 1
    weight, bias = (torch.ones(hidden, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    y = fusedops.layer_norm(signs.expand(rows, hidden), hidden, weight, bias, eps=0.0, backend=backend)
    y.backward(torch.full_like(y, value))
    want = float(Fraction(value) * rows)
    for grad, sign in ((weight.grad, signs), (bias.grad, torch.ones_like(signs))):
        off = (grad - want * sign).abs().max()
        assert float(off) <= 4 * 2.0**-53 * math.sqrt(math.log2(rows)) * want


@every_op
def test_a_row_of_the_largest_fp16_numbers(spec: OpSpec, backend: str, device: str) -> None:
    """Their squares are beyond fp16, the sums of squares far beyond."""
    case = Case((4, 4096), 1, mixed(spec, F16))
    sample = testing.make_sample(spec, case, device)
    sample.kwargs["input"] = sample.kwargs["input"].detach().sign().mul_(65504).requires_grad_()
    assert_sound_on(spec, case, sample, backend)
