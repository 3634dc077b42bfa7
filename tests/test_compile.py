"""torch.compile, torch.export, tracing and opcheck."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusedops
from fusedops.ops import _common
from fusedops.registry import OPS, OpSpec

F32, BF16 = torch.float32, torch.bfloat16
SPECS = pytest.mark.parametrize("spec", OPS.values(), ids=OPS)


@pytest.fixture(params=["native", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if reason := fusedops.backends("cpu")[request.param]:
        pytest.skip(reason)
    torch._dynamo.reset()
    with fusedops.use_backend(request.param):
        yield request.param


def gradients(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]


@SPECS
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=str)
def test_compiled_equals_eager(spec: OpSpec, dynamic: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return spec.function(x * 1, x.shape[-1], w) + 1

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for rows, hidden in ((4, 16), (5, 24), (7, 40)):
        x = torch.randn(rows, hidden).to(dtypes[0]).requires_grad_()
        w = torch.rand(hidden).to(dtypes[1]).requires_grad_()
        for got, want in zip(gradients(compiled, x, w), gradients(function, x, w), strict=True):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got, want)
        counts.append(counter.frame_count)
    if dynamic:
        assert len(set(counts)) == 1, "another shape compiled again"


@SPECS
def test_compiled_under_autocast(spec: OpSpec) -> None:
    linear = torch.nn.Linear(16, 16)

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return spec.function(linear(x), 16, w)

    x, w = torch.randn(4, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(gradients(compiled, x, w), gradients(function, x, w), strict=True):
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want)


def test_compiled_modules_in_inference_mode() -> None:
    net = torch.nn.Sequential(fusedops.nn.RMSNorm(8), fusedops.nn.LayerNorm(8))
    x = torch.randn(3, 8)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), net(x))


def test_inductor() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return fusedops.rms_norm(fusedops.layer_norm(x, 32, w) * 2, 32, w)

    x, w = torch.randn(4, 32, requires_grad=True), torch.rand(32, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True)
    for got, want in zip(gradients(compiled, x, w), gradients(function, x, w), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_export_and_trace_depend_on_their_input() -> None:
    net = torch.nn.Sequential(fusedops.nn.RMSNorm(8), fusedops.nn.LayerNorm(8)).eval()
    a, b = torch.randn(2, 8), torch.randn(2, 8)
    torch.testing.assert_close(torch.export.export(net, (a,)).module()(b), net(b))
    torch.testing.assert_close(torch.jit.trace(net, a)(b), net(b))


def test_export_with_a_dynamic_number_of_rows() -> None:
    net = fusedops.nn.LayerNorm(8)
    exported = torch.export.export(net, (torch.randn(4, 8),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    x = torch.randn(9, 8)
    torch.testing.assert_close(exported.module()(x), net(x))


# ---------------------------------------------------------------- the registered operators


def registered() -> list[str]:
    """Names of our operators in PyTorch's registry."""
    fusedops.backends("cpu")
    return sorted({name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                   if name.startswith("fusedops::")})  # fmt: skip


X, X16 = torch.randn(3, 8), torch.randn(2, 3, 8).to(BF16)
W, B, ROWS = torch.rand(8), torch.rand(8), torch.rand(3)
NONE, DX = (None, None), [True, False, False]
# The public names of an op stand for its forward; arguments of the ops beneath them, in order.
SAMPLES: dict[str, list[tuple[object, ...]]] = {
    "layer_norm": [(X, [8], W, B, 1e-5, None), (X16, [3, 8], None, None, 1e-5, F32), (X.mT, [3], *NONE, 1e-5, None)],
    "rms_norm": [(X, [8], W, 1e-5, 0.0, None), (X16, [8], None, 1e-5, 0.0, F32), (X16, [8], W, 1e-5, 1.0, None)],
    "layer_norm_fwd": [(X, [8], W, B, 1e-5, None), (X16, [8], W, None, 1e-5, F32)],
    "rms_norm_fwd": [(X, [8], W, 1e-5, 0.0, None), (X16, [3, 8], None, 1e-5, 0.0, F32)],
    "layer_norm_bwd": [(X, X, [8], W, ROWS, ROWS, [True, True, True]), (X, X, [8], None, ROWS, ROWS, DX)],
    "rms_norm_bwd": [(X, X, [8], W, ROWS, 0.0, [True, True]), (X, X, [8], W, ROWS, 0.0, [False, True])],
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str, backend: str) -> None:
    if backend != "native":
        pytest.skip("the operators are the native backend's")
    assert set(registered()) <= set(SAMPLES), "an operator without a sample"
    for args in SAMPLES[name]:
        leaves = tuple(
            a.clone().requires_grad_() if isinstance(a, Tensor) and not name.endswith(("fwd", "bwd")) else a
            for a in args
        )
        torch.library.opcheck(getattr(torch.ops.fusedops, name).default, leaves)


def test_two_ops_first_seen_in_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: neither op has been compiled before."""
    monkeypatch.setattr(_common, "_traced", _common._Traced())
    x, w = torch.randn(4, 16), torch.rand(16)

    def function(x: Tensor) -> Tensor:
        return fusedops.rms_norm(fusedops.layer_norm(x, 16, w), 16, w, backend="reference")

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), function(x))
