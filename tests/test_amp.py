"""Autocast is a choice of output dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops import amp
from fusedops.testing import ulp

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
Norm = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def mode_left_as_it_was() -> Iterator[None]:
    before = amp._norm_output
    yield
    amp._norm_output = before


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if reason := fusedops.backends("cpu")[request.param]:
        pytest.skip(reason)
    with fusedops.use_backend(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("input_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("norm", [fusedops.layer_norm, fusedops.rms_norm])
def test_result_is_torchs_fp32_result_rounded_once(
    norm: Norm, input_dtype: torch.dtype, dtype: torch.dtype, backend: str
) -> None:
    x, w = torch.randn(6, 64).to(input_dtype), torch.rand(64)
    with torch.autocast("cpu", dtype):
        y = norm(x, 64, w)
    exact = norm(x.double(), 64, w.double(), eps=1e-5 if norm is fusedops.layer_norm else torch.finfo(F32).eps)
    assert y.dtype is dtype
    # One rounding is half a ULP, and the fp32 arithmetic before it some 1e-6.
    assert ((y.double() - exact).abs() <= 0.5 * ulp(exact, dtype) + 2e-6).all()


def test_fp64_stays_fp64(backend: str) -> None:
    with torch.autocast("cpu", BF16):
        assert fusedops.layer_norm(torch.randn(2, 8, dtype=F64), 8).dtype is F64


def test_autocast_of_another_device_or_switched_off_changes_nothing(backend: str) -> None:
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast("cuda", F16):
            assert fusedops.layer_norm(x, 8).dtype is F32
    with torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
        assert fusedops.layer_norm(x, 8).dtype is F32


def test_set_norm_output_as_context_and_as_call(backend: str) -> None:
    x = torch.randn(2, 8, dtype=BF16)
    with torch.autocast("cpu", BF16):
        with amp.set_norm_output("fp32"):
            y = fusedops.layer_norm(x, 8)
            assert y.dtype is F32
            torch.testing.assert_close(y, F.layer_norm(x.float(), (8,)))
            with amp.set_norm_output("autocast"):
                assert fusedops.rms_norm(x, 8).dtype is BF16
            assert fusedops.rms_norm(x, 8).dtype is F32
        assert fusedops.layer_norm(x, 8).dtype is BF16
        amp.set_norm_output("fp32")
        assert fusedops.layer_norm(x, 8).dtype is F32
    assert fusedops.layer_norm(x, 8).dtype is BF16  # outside autocast: the input's dtype


def test_compiled_code_follows_set_norm_output(backend: str) -> None:
    """Compiled once for each mode, whether the mode is set around the code or within it."""
    torch._dynamo.reset()
    x = torch.randn(2, 8)
    compiled = torch.compile(lambda x: fusedops.layer_norm(x, 8), backend="eager", fullgraph=True)

    def within(x: Tensor) -> Tensor:
        with amp.set_norm_output("fp32"):
            return fusedops.rms_norm(x, 8)

    with torch.autocast("cpu", BF16):
        dtypes = [compiled(x).dtype]
        with amp.set_norm_output("fp32"):
            dtypes.append(compiled(x).dtype)
        dtypes.append(compiled(x).dtype)
        assert torch.compile(within, backend="eager", fullgraph=True)(x).dtype is F32
    assert [*dtypes, compiled(x).dtype] == [BF16, F32, BF16, F32]
    assert amp._norm_output == "autocast"


def test_set_norm_output_refuses_other_modes() -> None:
    with pytest.raises(ValueError, match="mode: expected 'autocast' or 'fp32', got 'bf16'"):
        amp.set_norm_output("bf16")
    assert amp._norm_output == "autocast"


def test_out_dtype_beats_autocast(backend: str) -> None:
    x = torch.randn(2, 8)
    with torch.autocast("cpu", BF16):
        assert fusedops.layer_norm(x, 8, out_dtype=F16).dtype is F16
        assert fusedops.nn.RMSNorm(8, out_dtype=F32)(x).dtype is F32


@pytest.mark.parametrize("input_dtype", [F32, BF16], ids=str)
def test_gradients_have_their_tensors_dtype(input_dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(6, 64).to(input_dtype).requires_grad_()
    module = fusedops.nn.LayerNorm(64)
    with torch.autocast("cpu", BF16):
        y = module(x)
    y.float().square().sum().backward()
    assert x.grad.dtype is input_dtype
    assert {p.grad.dtype for p in module.parameters()} == {F32}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_network_trains_under_autocast(dtype: torch.dtype, backend: str) -> None:
    """16-bit activations meet fp32 weights in every norm; no cast by the user, no scaler needed for bf16."""
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 8), fusedops.nn.LayerNorm(8), torch.nn.Linear(8, 8), fusedops.nn.RMSNorm(8)
    )
    with torch.autocast("cpu", dtype):
        y = net(torch.randn(4, 8))
    y.float().sum().backward()
    assert y.dtype is dtype
    assert all(p.grad is not None and p.grad.dtype is F32 and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_in_the_same_precision(reentrant: bool, backend: str) -> None:
    from torch.utils.checkpoint import checkpoint

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), fusedops.nn.RMSNorm(8), fusedops.nn.LayerNorm(8))
    x, found = torch.randn(4, 8), []
    for wrapped in (False, True):
        net.zero_grad()
        a = x.clone().requires_grad_()
        with torch.autocast("cpu", BF16):
            y = checkpoint(net, a, use_reentrant=reentrant) if wrapped else net(a)
        y.float().square().sum().backward()
        found.append([a.grad, *[p.grad.clone() for p in net.parameters()]])
    assert all(torch.equal(g, h) for g, h in zip(*found, strict=True))


def test_checkpoint_keeps_set_norm_output_of_backward_out(backend: str) -> None:
    """A mode set for a block alone: with both checkpoint variants its block sits inside the recomputed function."""
    from torch.utils.checkpoint import checkpoint

    def block(x: Tensor) -> Tensor:
        with amp.set_norm_output("fp32"):
            return fusedops.layer_norm(x, 8)

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", BF16):
        y = checkpoint(block, x, use_reentrant=False)
    assert y.dtype is F32
    y.sum().backward()
