"""Launching Triton kernels: device guard, options that must not drift between Triton versions, device limits."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

# Whether kernels are Python: Triton looks when it defines them.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# run(kernel, grid, device, args, constexprs, warps)
Launch = Callable[[Any, tuple[int, ...], torch.device, tuple[Any, ...], dict[str, Any], int], None]


_HERE = contextlib.nullcontext()


class DeviceLimits(NamedTuple):
    """What launch decisions need to know of a device."""

    multiprocessors: int
    shared_bytes: int  # shared memory a program may ask for


# The interpreter runs programs one after another, so a handful shows all there is to see.
INTERPRETER = DeviceLimits(multiprocessors=2, shared_bytes=64 * 1024)


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Read the limits of `device` once; the interpreter's CPU counts as a tiny one."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in torch's stub
    return DeviceLimits(properties.multi_processor_count, shared_bytes)


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up; Triton's own is a decorated function that costs microseconds a call."""
    return -(-a // b)


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], meta: dict[str, Any], warps: int
) -> None:
    """Run `kernel` on `device`, which need not be the current one.

    FP fusion is asked for explicitly: its default changes with Triton 3.10.
    """
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else _HERE:
        kernel[grid](*args, **meta, num_warps=warps, enable_fp_fusion=True)


def compile_ahead(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], meta: dict[str, Any], warps: int
) -> None:
    """Compile what `launch` runs with the same arguments, so that a failure comes before anything is written."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else _HERE:
        kernel.warmup(*args, grid=grid, **meta, num_warps=warps, enable_fp_fusion=True)


def refuse_to_compile_while_capturing(kernels: Iterable[Any]) -> None:
    """Let kernels say what to do where they would be compiled while a CUDA graph is captured.

    Launches of compiled kernels cost nothing more: Triton calls `_do_compile` only for a kernel it does not know yet.
    """
    for kernel in kernels:
        if (compile_kernel := getattr(kernel, "_do_compile", None)) is not None:  # the interpreter's have none
            kernel._do_compile = functools.partial(_compile, kernel.__name__, compile_kernel)


def _compile(name: str, compile_kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the Triton kernel {name} would have to be compiled while a CUDA graph is captured: call "
            "fusedops.warmup(model, batch) before (for an optimizer: take a step), with the same shapes and dtypes"
        )
    return compile_kernel(*args, **kwargs)


def launch_traced(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], meta: dict[str, Any], warps: int
) -> None:
    """The same inside a `traced.op`, where torch.compile records the launch and sets the device itself.

    The interpreter's kernels can't be recorded: they run when the op does, and fake tensors have nothing to run on.
    """
    if INTERPRETED:
        if not any(isinstance(arg, FakeTensor) for arg in args):
            launch(kernel, grid, device, args, meta, warps)
        return
    torch.library.wrap_triton(kernel)[grid](*args, **meta, num_warps=warps)
