"""Under torch.compile graphs of norms and losses hold the Triton launches, forward and backward, without a break.

The graphs are read, not run: that needs no GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: interpreted kernels can't be traced", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

import fusedops.backends.triton as backend  # noqa: E402
from fusedops.registry import OPS  # noqa: E402


class FakeDriver:
    """Names a target: tracing compiles a kernel far enough to see what it writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 1090

    def get_current_stream(self, device: int) -> int:
        return 0


def reading_backend(launches: dict[str, int]) -> Any:
    """A compiler that counts the Triton launches of each graph and returns zeros in the graph's shapes."""

    def compiler(name: str) -> Any:
        def read(graph: torch.fx.GraphModule, _: Any) -> Any:
            calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            launches[name] = sum("triton_kernel_wrapper" in call for call in calls)
            for node in graph.graph.nodes:
                if "constant_args_idx" in node.kwargs:
                    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"]).values()
                    assert all(abs(value) < 2**31 for value in constants if isinstance(value, int)), "Inductor fails"
            (output,) = (node for node in graph.graph.nodes if node.op == "output")

            def zeros(node: Any) -> Any:
                value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
                if isinstance(value, torch.Tensor):
                    return torch.zeros([int(size) for size in value.shape], dtype=value.dtype)
                return int(value) if isinstance(value, torch.SymInt) else value

            def run(arguments: list[Any]) -> list[Any]:
                return [zeros(node) for node in output.args[0]]

            run._boxed_call = True
            return run

        return read

    return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_graph_holds_the_launches(monkeypatch, op, dynamic):
    monkeypatch.setattr(driver, "_active", FakeDriver())
    torch._dynamo.reset()
    whole, launches = OPS[op].wrap(backend), {}
    x = torch.zeros(8, 768, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.zeros(768, requires_grad=True) for _ in range(2))
    rest = (bias, 1e-5) if op == "layer_norm" else (1e-6, 1.0)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return whole(x, (768,), weight, *rest, torch.bfloat16)

    y = torch.compile(call, backend=reading_backend(launches), fullgraph=True, dynamic=dynamic)(x, weight)
    y.sum().backward()
    assert launches == {"forward": 1, "backward": 2}  # backward: the pass over the rows, then the partial sums


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
def test_graph_of_an_add_norm_holds_its_seed_and_the_launches(monkeypatch, op, post_norm):
    monkeypatch.setattr(driver, "_active", FakeDriver())
    torch._dynamo.reset()
    whole, launches = OPS[op].wrap(backend), {}
    x, residual = (torch.zeros(8, 768, dtype=dtype, requires_grad=True) for dtype in (torch.bfloat16, torch.float32))
    weight, bias = (torch.zeros(768, requires_grad=True) for _ in range(2))
    rest = (bias, 1e-5) if op == "add_layer_norm" else (1e-6, 1.0)

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, total = whole(x, residual, (768,), weight, *rest, 0.5, post_norm, torch.bfloat16, None)
        return y.sum() + total.sum()

    torch.compile(call, backend=reading_backend(launches), fullgraph=True)(x, residual, weight).backward()
    assert launches == {"forward": 1, "backward": 2}


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_graph_of_a_loss_holds_the_launches(monkeypatch, reduction):
    monkeypatch.setattr(driver, "_active", FakeDriver())
    torch._dynamo.reset()
    whole, launches = OPS["cross_entropy"].wrap(backend), {}
    x, target = torch.zeros(8, 1001, dtype=torch.bfloat16, requires_grad=True), torch.zeros(8, dtype=torch.int64)

    def call(x: torch.Tensor) -> torch.Tensor:
        return whole(x * 1, target, None, -100, reduction, 0.1, 0.0, 30.0, False).sum()

    torch.compile(call, backend=reading_backend(launches), fullgraph=True)(x).backward()
    assert launches == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_another_batch_compiles_nothing(monkeypatch, op, autocast):
    """A batch below and one above what fills the device share a graph; both take the same kernels."""
    monkeypatch.setattr(driver, "_active", FakeDriver())
    monkeypatch.setattr(backend, "unavailable", lambda device_type: None)
    torch._dynamo.reset()
    weight = torch.zeros(768, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return OPS[op].function(x, 768, weight, backend="triton")

    compiled = torch.compile(call, backend=reading_backend({}), fullgraph=True)
    for batch in (4, 5, 64, 2, 10_000, 17):
        with torch._dynamo.config.patch(error_on_recompile=batch not in (4, 5)):
            compiled(torch.zeros(batch, 768, requires_grad=True))
