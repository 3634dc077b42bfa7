"""Faults that users of fused norms met elsewhere, each kind with its right value.

Kinds that parity already covers (strides, alignment, dtype mixes, wide rows, empty inputs) are not repeated.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops import testing
from fusedops.registry import OPS, Case, OpSpec

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = pytest.mark.usefixtures("backend")
layer_norm, rms_norm, close = fusedops.layer_norm, fusedops.rms_norm, torch.testing.assert_close


def slow_in_interpreter(backend: str) -> None:
    if backend == "triton" and torch.get_default_device().type == "cpu":
        pytest.skip("one program a row, and the interpreter takes milliseconds for each")


def rms_truth(x: Tensor, w: Tensor | None = None) -> Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], None if w is None else w.double(), torch.finfo(F32).eps)


@pytest.mark.parametrize("rows", [65535, 65536, 131073])
def test_rows_beyond_a_grid_axis(rows: int, backend: str) -> None:
    slow_in_interpreter(backend)
    x, w, b = torch.randn(rows, 8), torch.rand(8), torch.rand(8)
    for part in (slice(0, 5), slice(-5, None)):
        close(layer_norm(x, 8, w, b)[part], F.layer_norm(x[part].clone(), (8,), w, b), rtol=1e-5, atol=1e-5)


def test_row_offsets_beyond_32_bits() -> None:
    """Two rows 2^31 elements apart; the pages between are never touched."""
    base = torch.empty(2**31 + 4096, dtype=BF16)
    x = base.as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    close(rms_norm(x, 64), rms_norm(x.contiguous(), 64), rtol=0, atol=0)
    close(layer_norm(x, 64), layer_norm(x.contiguous(), 64), rtol=0, atol=0)


@pytest.mark.parametrize("hidden", [8193, 65536, 65537, 102400])
def test_row_wider_than_a_block(hidden: int) -> None:
    x = torch.randn(2, hidden)
    close(rms_norm(x, hidden), rms_truth(x).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [1, 2, 3, 5, 7, 17, 100, 256, 1000, 4097])
def test_widths_on_nobodys_list(hidden: int) -> None:
    x, w = torch.randn(3, hidden), torch.rand(hidden)
    close(rms_norm(x, hidden, w), rms_truth(x, w).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [("weight", "bias"), ("bias",), ("weight",)], ids="+".join)
def test_gradients_of_a_multi_dimensional_shape_over_many_rows(given: tuple[str, ...], backend: str) -> None:
    slow_in_interpreter(backend)
    spec = OPS["layer_norm"]
    case = Case((70000, 2, 8), 2, {"input": F32, **dict.fromkeys(given, F32)})
    outcome = testing.check(spec, case, backend, str(torch.get_default_device()))
    assert outcome.passed, str(outcome)


def test_axis_of_size_one_with_odd_strides() -> None:
    """A stride along an axis of size 1 means nothing, be it that of the rows or of the row itself."""
    base = torch.randn(200)
    for x in (
        base.as_strided((1, 8), (100, 1)),
        base.as_strided((8, 1), (1, 77)),
        base.as_strided((2, 1, 8), (8, 3, 1)),
    ):
        hidden = x.shape[-1]
        a, c = x.clone().requires_grad_(), x.detach().requires_grad_()
        close(layer_norm(c, hidden), F.layer_norm(a, (hidden,)))
        (g,) = torch.autograd.grad(layer_norm(c, hidden).square().sum(), c)
        (h,) = torch.autograd.grad(F.layer_norm(a, (hidden,)).square().sum(), a)
        close(g, h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 7])
def test_every_misalignment(offset: int, backend: str) -> None:
    """Contiguous views at odd offsets, parameters of flat buffers included; bitwise as the aligned copy."""
    flat = torch.randn(offset + 8 * 64 + 64).to(BF16)
    views = flat[offset : offset + 512].view(8, 64), flat[offset + 512 :]
    aligned = [v.clone().requires_grad_() for v in views]
    odd = [v.detach().requires_grad_() for v in views]
    found = [
        [y := rms_norm(x, 64, w), *torch.autograd.grad(y.float().square().sum(), (x, w))] for x, w in (aligned, odd)
    ]
    for got, want in zip(*found, strict=True):
        close(got, want)


def test_square_sum_is_not_kept_in_16_bits() -> None:
    x = (torch.randn(4, 4096).sign() * 3e4).to(F16)
    for y in (rms_norm(x, 4096), layer_norm(x, 4096)):
        close(y.abs().float(), torch.ones(4, 4096), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "x",
    [torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) + 2000,
     torch.tensor([[4e4, 4e4 + 1, 4e4 + 2, 4e4 + 3]]),
     torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * 1e-3 + 8],
    ids=["2000", "40000", "8"],
)  # fmt: skip
def test_mean_shifted_rows(x: Tensor, device: str) -> None:
    x = x.to(device)
    close(layer_norm(x, x.shape[-1]), F.layer_norm(x.double(), x.shape[-1:]).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dy", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dx", [F32, BF16, F16], ids=str)
def test_result_dtype_of_a_mix_is_the_inputs(dx: torch.dtype, dy: torch.dtype) -> None:
    x, w = torch.randn(3, 8).to(dx), torch.rand(8).to(dy)
    for op in (layer_norm, rms_norm):
        assert op(x, 8, w).dtype is dx


def test_backward_is_bitwise_repeatable_over_many_rows(backend: str) -> None:
    slow_in_interpreter(backend)
    x, dy = torch.randn(20000, 64, requires_grad=True), torch.randn(20000, 64)
    w, b = torch.rand(64, requires_grad=True), torch.rand(64, requires_grad=True)
    first, *others = [torch.autograd.grad(layer_norm(x, 64, w, b), (x, w, b), dy) for _ in range(3)]
    assert all(torch.equal(g, h) for other in others for g, h in zip(first, other, strict=True))


def test_result_does_not_depend_on_the_number_of_threads(backend: str) -> None:
    """Partial sums are cut by rows, not by threads."""
    slow_in_interpreter(backend)
    x, dy, w = torch.randn(3000, 64, requires_grad=True), torch.randn(3000, 64), torch.rand(64, requires_grad=True)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(torch.autograd.grad(rms_norm(x, 64, w), (x, w), dy))
    finally:
        torch.set_num_threads(threads)
    if backend == "native":
        assert all(torch.equal(g, h) for other in found[1:] for g, h in zip(found[0], other, strict=True))


def test_one_rows_nan_stays_in_its_row() -> None:
    x = torch.randn(4, 64)
    clean = layer_norm(x, 64)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    y = layer_norm(x, 64)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert torch.equal(y.isfinite(), F.layer_norm(x, (64,)).isfinite())


def test_rows_of_zeros() -> None:
    x = torch.zeros(3, 64, requires_grad=True)
    for op in (layer_norm, rms_norm):
        y = op(x, 64)
        (g,) = torch.autograd.grad(y.sum(), x)
        assert not y.any()
        assert g.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 16), (0, 3, 16), (4, 0, 16)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, w, b = (
        torch.empty(shape, requires_grad=True),
        torch.rand(16, requires_grad=True),
        torch.rand(16, requires_grad=True),
    )
    y = layer_norm(x, 16, w, b)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert not w.grad.any()
    assert not b.grad.any()


def test_threads_of_python_at_once(backend: str) -> None:
    """Calls from several threads, each with its own result; caches are shared."""
    if backend == "triton" and torch.get_default_device().type == "cpu":
        pytest.skip("Triton's interpreter patches its language module, which threads share")
    from concurrent.futures import ThreadPoolExecutor

    # The wide ones keep rows in shared memory: more than a kernel may have unasked, and of different sizes.
    widths = (8, 16, 24, 32, 20_001, 50_257)
    tensors = [torch.randn(16, n) for n in widths for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: layer_norm(x, x.shape[-1]), tensors))
    for x, y in zip(tensors, results, strict=True):
        close(y, F.layer_norm(x, x.shape[-1:]))


@pytest.mark.parametrize("spec", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, torch.float64], ids=str)
def test_inputs_stay_as_they_are_and_results_have_memory_of_their_own(
    spec: OpSpec, dtype: torch.dtype, backend: str, device: str
) -> None:
    """`.float()` of fp32 is the same tensor: writing to it would destroy the caller's, in that dtype alone."""
    case = Case((3, 8), 1, dict.fromkeys(spec.grads, dtype))
    if reason := testing.refused(spec, case, backend, device):
        pytest.skip(reason)
    sample = testing.make_sample(spec, case, device)
    before = {name: sample.kwargs[name].detach().clone() for name in sample.grads}
    found = testing.run(partial(spec.function, backend=backend), sample, lambda output: testing.make_grad(case, output))
    assert all(torch.equal(sample.kwargs[name], kept) for name, kept in before.items())
    given = {sample.kwargs[name].untyped_storage().data_ptr() for name in sample.grads}
    assert not given & {result.untyped_storage().data_ptr() for result in found.values()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_inputs_memory_is_used_again_at_once(backend: str) -> None:
    """The allocator hands a freed input to the next tensor of the stream, while the kernel may still wait to run."""
    for _ in range(50):
        y = rms_norm(torch.ones(2048, 2048), 2048)
        torch.full((2048, 2048), float("nan"))
        assert bool(y.isfinite().all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nothing_is_allocated_on_another_device(backend: str) -> None:
    torch.cuda.set_device(0)
    before = torch.cuda.memory_stats(0)["allocation.all.allocated"]
    x = torch.randn(512, 512, device="cuda:1", requires_grad=True)
    for op in (layer_norm, rms_norm):
        op(x, 512).sum().backward()
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == before


def test_kernels_are_not_tuned_on_the_callers_tensors(backend: str) -> None:
    """An autotuner runs an update several times at the first step, and hides a config that writes too little."""
    if backend != "triton":
        pytest.skip("only Triton has an autotuner")
    from triton.runtime.autotuner import Autotuner

    from fusedops.backends.triton import adam_kernels, norm_bwd_kernels, norm_kernels

    for module in (norm_kernels, norm_bwd_kernels, adam_kernels):
        assert not [name for name, value in vars(module).items() if isinstance(value, Autotuner)]
