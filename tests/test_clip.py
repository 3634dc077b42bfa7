"""clip_grad_norm_ against torch's."""

from __future__ import annotations

import pytest
import torch
from optim_helpers import DEVICES, PLACES, make_params, skipped_if_refused, twins

import fusedops
from fusedops import clip_grad_norm_
from fusedops.backends.reference_adam import clip_coefficient

torchs_clip = torch.nn.utils.clip_grad_norm_


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_gradients_without_elements(backend, device, need_backend):
    """As on a rank whose shards are empty; on a stream that has seen no others."""
    need_backend(backend)
    params = make_params(device, torch.float32, (0,), (3, 0))
    stream = torch.cuda.Stream() if device == "cuda" else None
    with fusedops.use_backend(backend), torch.cuda.stream(stream), skipped_if_refused(backend):
        assert float(clip_grad_norm_(params, 1.0)) == 0.0
        assert float(clip_grad_norm_(params, 1.0)) == 0.0


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_against_float64(dtype, max_norm, backend, device, need_backend):
    need_backend(backend)
    torch.manual_seed(0)
    params = make_params(device, dtype, (40, 3), (), (0,), (10_001,))
    params.append(torch.nn.Parameter(torch.ones(3, device=device)))  # no gradient
    before = [p.grad.clone() for p in params[:4]]
    truth = torch.cat([g.double().flatten() for g in before]).norm()
    with fusedops.use_backend(backend), skipped_if_refused(backend):
        norm = clip_grad_norm_(params, max_norm)
    assert norm.shape == ()
    assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(norm.double(), truth, rtol=1e-6, atol=0)
    coef = min(1.0, max_norm / (float(truth) + 1e-6))
    for p, g in zip(params, before, strict=False):
        if coef == 1.0:
            assert torch.equal(p.grad, g)
        torch.testing.assert_close(p.grad, (g.double() * coef).to(dtype))
    assert params[4].grad is None


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_dtypes_strides_and_one_tensor(device):
    torch.manual_seed(1)
    params = make_params(device, torch.float32, (9, 4)) + make_params(device, torch.bfloat16, (65,))
    params[0].grad = torch.randn(4, 9, device=device).t()
    copies = twins(params)
    norm = clip_grad_norm_(iter(params), 0.1)
    torch.testing.assert_close(norm, torch.cat([q.grad.float().flatten() for q in copies]).norm())
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p.grad, (q.grad.float() * (0.1 / norm)).to(q.dtype), rtol=1e-2, atol=1e-5)
    assert torch.equal(clip_grad_norm_(params[1], 1e9), params[1].grad.float().norm())


@pytest.mark.parametrize("norm_type", [1, 3.0, float("inf"), "inf"])
def test_other_norms_are_torchs(norm_type):
    params = make_params("cpu", torch.float32, (9, 4), (7,))
    copies = twins(params)
    assert torch.equal(clip_grad_norm_(params, 0.1, norm_type), torchs_clip(copies, 0.1, norm_type))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(params, copies, strict=True))


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norms_that_are_not_finite(bad, backend, device, need_backend):
    need_backend(backend)
    if not hasattr(fusedops.backends.get(backend), "grad_norm"):
        pytest.skip(f"{backend}: it measures no gradients")
    params = make_params(device, torch.float32, (9, 4), (7,))
    params[0].grad[0, 0] = bad
    copies = twins(params)
    with fusedops.use_backend(backend):
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        assert torch.equal(params[1].grad, copies[1].grad), "scaled before the error"
        torch.testing.assert_close(clip_grad_norm_(params, 1.0), torchs_clip(copies, 1.0), equal_nan=True)
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_nothing_to_clip():
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(torch.nn.Parameter(torch.ones(3)), 1.0) == 0
    with pytest.warns(UserWarning, match="empty generator") as seen:
        clip_grad_norm_((p for p in ()), 1.0)
    assert seen[0].filename == __file__


def test_one_norm_over_all_groups():
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in "ab"]
    for p, size in zip(params, (3.0, 4.0), strict=True):
        p.grad = torch.zeros(4)
        p.grad[0] = size
    torch.testing.assert_close(clip_grad_norm_(params, 1.0), torch.tensor(5.0))
    torch.testing.assert_close(torch.stack([p.grad[0] for p in params]), torch.tensor([0.6, 0.8]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices():
    params = [torch.nn.Parameter(torch.zeros(4, device=f"cuda:{i}")) for i in (0, 1)]
    for p, size in zip(params, (3.0, 4.0), strict=True):
        p.grad = torch.full((4,), size / 2, device=p.device)
    norm = clip_grad_norm_(params, 1.0)
    assert norm.device == params[0].device
    torch.testing.assert_close(norm.cpu(), torch.tensor(5.0))
    torch.testing.assert_close(params[1].grad.cpu(), torch.full((4,), 0.4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_bound_on_a_device_is_not_read_back(shape, dtype):
    """A tensor without memory has nothing to read."""
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")
    norm = clip_grad_norm_([p], torch.ones(shape, dtype=dtype, device="meta"))
    assert norm.shape == ()
    assert norm.dtype is torch.float32


@pytest.mark.parametrize(("shape", "dtype"), [((2,), torch.float32), ((), torch.bool), ((), torch.complex64)])
def test_a_bound_on_a_device_is_one_real_number(shape, dtype):
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")
    with pytest.raises(ValueError, match=r"^clip_grad_norm_: max_norm: expected a number ≥ 0, got a tensor of "):
        clip_grad_norm_([p], torch.ones(shape, dtype=dtype, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_coefficient_has_the_same_bits_by_number_and_by_tensor(dtype):
    torch.manual_seed(0)
    norms = [
        *(torch.rand(100, dtype=dtype) * 10),
        torch.tensor(float("inf"), dtype=dtype),
        torch.zeros((), dtype=dtype),
    ]
    for bound in (0.0, 1e-8, 0.1, 1 / 3, 3.0, float("inf")):
        for norm in norms:
            expected = clip_coefficient(norm, bound)
            for shape in ((), (1,)):
                found = clip_coefficient(norm, torch.full(shape, bound, dtype=dtype))
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(expected, (bound / (norm + 1e-6)).clamp(max=1.0), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_host_sync():
    params = make_params("cuda", torch.float32, (9, 4), (7,))
    clip_grad_norm_(params, 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_grad_norm_(params, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_gradients_that_are_not_in_memory(backend, device, need_backend):
    need_backend(backend)
    if not hasattr(fusedops.backends.get(backend), "grad_norm"):
        pytest.skip(f"{backend}: it measures no gradients")
    params = make_params(device, torch.float32, (4, 8), (4, 8))
    expected = twins(params)
    grads = torch._neg_view(torch.randn(4, 8, device=device)), torch._efficientzerotensor((4, 8), device=device)
    for p, q, grad in zip(params, expected, grads, strict=True):
        p.grad, q.grad = grad, grad + 0.0
    with fusedops.use_backend(backend):
        norm = clip_grad_norm_(params, 0.5)
    torch.testing.assert_close(norm, torchs_clip(expected, 0.5))
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad + 0.0, q.grad)
