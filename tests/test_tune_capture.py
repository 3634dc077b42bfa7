"""The tuner within the capture of a CUDA graph, and what is compiled before it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from tune_helpers import NEEDS_GPU

import fusedops


@pytest.mark.parametrize("function", [fusedops.tune, fusedops.warmup], ids=["tune", "warmup"])
def test_within_a_capture_the_error_names_warmup(
    function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"captured.*fusedops\.warmup\(model, batch\)"):
        function(nn.Linear(2, 2), torch.ones(2, 2))


def test_a_kernel_is_not_compiled_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fusedops.backends.triton import adam_kernels, launch, norm_kernels

    if launch.INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for kernel in (norm_kernels.norm_fwd_kernel, adam_kernels.upload_kernel):
        with pytest.raises(RuntimeError, match=rf"{kernel.__name__} .*fusedops\.warmup\(model, batch\)"):
            kernel._do_compile()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with pytest.raises(TypeError):  # Triton's own, which wants arguments
            kernel._do_compile()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


CAPTURE = """
import torch, fusedops
model = fusedops.nn.LayerNorm(6352).cuda()
x = torch.randn(64, 6352, device="cuda", requires_grad=True)
for p in (*model.parameters(), x):
    p.grad = torch.zeros_like(p)
fusedops.use_backend("triton")

def capture(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph

def refused(work):
    try:
        capture(work)
    except RuntimeError as error:
        told = f"{error} {error.__context__}"  # the end of the capture may complain as well
        print("fusedops.warmup(model, batch)" in told)
    torch.cuda.synchronize()

fusedops.layer_norm(torch.ones(2, 64, device="cuda"), 64)  # Triton itself is loaded

refused(lambda: model(x))
refused(lambda: fusedops.tune(model, x))
fusedops.warmup(model, x)
graph = capture(lambda: model(x).sum().backward())
graph.replay()
torch.cuda.synchronize()
print(torch.equal(model.bias.grad, torch.full_like(model.bias, 64.0)))
"""


@NEEDS_GPU
def test_a_capture_compiles_nothing_and_says_what_does(need_backend: Callable[[str], None]) -> None:
    """In a process of its own, which has compiled nothing."""
    need_backend("triton")
    done = subprocess.run([sys.executable, "-c", CAPTURE], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 3), done.stderr
