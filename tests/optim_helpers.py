"""What the optimizer tests share: where they run, and parameters to run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fusedops import UnsupportedError, optim
from fusedops.config import BACKENDS

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


# (backend, device) pairs; the fixture need_backend skips those that are not there, or fails where they are required.
# Beside a GPU the CPU runs only what belongs there, so that requiring Triton or Apex asks for them on the GPU.
PLACES = [
    pytest.param(name, device, id=f"{name}-{device}")
    for device in DEVICES
    for name in BACKENDS
    if device == DEVICES[-1] or name in ("native", "reference")
]


def truncates(backend: str, device: str) -> bool:
    """Tell whether bf16 is truncated, not rounded: Triton's interpreter does that, a GPU does not."""
    return backend == "triton" and device == "cpu"


@contextmanager
def skipped_if_refused(backend: str) -> Iterator[None]:
    """Skip the test where a backend that need not serve everything declares that it can't serve this."""
    try:
        yield
    except UnsupportedError as error:
        if backend in ("native", "reference"):
            raise
        pytest.skip(str(error))


def build(cls: type[optim.Adam], params: object, backend: str, **options: object) -> optim.Adam:
    """Make an optimizer on a backend, or skip the test."""
    with skipped_if_refused(backend):
        return cls(params, backend=backend, **options)


def ones(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """Return a parameter of ones with a gradient of ones."""
    p = torch.nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
    p.grad = torch.ones_like(p)
    return p


def make_params(
    device: str, dtype: torch.dtype, *shapes: tuple[int, ...], size: float = 0.1
) -> list[torch.nn.Parameter]:
    """Return parameters of the given shapes with gradients."""
    params = [torch.nn.Parameter((torch.randn(shape) * size).to(device, dtype)) for shape in shapes]
    new_grads(params)
    return params


def new_grads(params: list[torch.nn.Parameter], scale: float = 1.0) -> None:
    """Give every parameter a new random gradient."""
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape) * scale)


def twins(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return copies of parameters and their gradients."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params, copies, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    return copies


def snapshot(optimizer: torch.optim.Optimizer) -> list:
    """Return copies of the parameters, each with its state."""
    return [
        [p.detach().clone(), {key: value.clone() for key, value in optimizer.state.get(p, {}).items()}]
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def assert_unchanged(optimizer: torch.optim.Optimizer, before: list) -> None:
    """Compare an optimizer with an earlier snapshot, bit for bit."""
    torch.testing.assert_close(snapshot(optimizer), before, rtol=0, atol=0)


def give(p: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Set a gradient of whatever shape, dtype and layout, as a graph with hooks of its own may."""
    p.grad = None
    p.grad_dtype = None
    shape = p.data
    p.data = torch.empty(grad.shape, dtype=p.dtype, device=grad.device)
    p.grad = grad
    p.data = shape
