"""The tensors of a case: numbers that are hard on arithmetic, in memory that is hard on kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..registry import Case, Memory, OpSpec, Sample
from .bound import ulp


def _large_mean(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    spread = max(1.0, 8 * float(ulp(torch.tensor(1e4), dtype)))
    return 1e4 + spread * noise


def _tiny_spread(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    spread = max(1e-3, 2 * float(ulp(torch.tensor(8.0), dtype)))
    return 8 + spread * noise


def _constant_rows(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    rows = _as_rows(noise, normalized)
    return rows[:, :1].expand_as(rows).reshape(noise.shape)


def _huge(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    """Near the maximum of fp16; else 1e12 (rstd³ still fits fp32) by turns with 1e30 (its square does not)."""
    if torch.finfo(dtype).max < 1e6:
        return 2e4 * noise.clamp(-3, 3)
    rows = _as_rows(noise, normalized).clone()
    rows[0::2] *= 1e12
    rows[1::2] *= 1e30
    return rows.reshape(noise.shape)


def _subnormal(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    return noise * (torch.finfo(dtype).smallest_normal / 4)


def _inf_nan_rows(noise: Tensor, normalized: int, dtype: torch.dtype) -> Tensor:
    rows = _as_rows(noise, normalized).clone()
    for row, bad in zip(rows[:-1], (math.inf, math.nan, -math.inf), strict=False):
        row[len(row) // 3] = bad
    return rows.reshape(noise.shape)


def _as_rows(values: Tensor, normalized: int) -> Tensor:
    return values.reshape(-1, math.prod(values.shape[values.dim() - normalized :]))


# registry.VALUES: from standard normal noise in float64, the number of normalised dimensions and the dtype.
_VALUES: dict[str, Callable[[Tensor, int, torch.dtype], Tensor]] = {
    "normal": lambda noise, normalized, dtype: noise,
    "large_mean": _large_mean,
    "tiny_spread": _tiny_spread,
    "constant_rows": _constant_rows,
    "huge": _huge,
    "subnormal": _subnormal,
    "inf_nan_rows": _inf_nan_rows,
}


def _in_wider(values: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Store as a slice of a tensor that is wider along ``dim``; what surrounds it is NaN."""
    shape = list(values.shape)
    shape[dim] += before + after
    view = values.new_full(shape, math.nan).narrow(dim, before, values.shape[dim])
    return view.copy_(values)


def _misaligned(values: Tensor) -> Tensor:
    """Store contiguously, one element off the start of an allocation."""
    return values.new_full((values.numel() + 1,), math.nan)[1:].view(values.shape).copy_(values)


def _transposed(values: Tensor) -> Tensor:
    return values.mT.contiguous().mT if values.dim() > 1 else values


def lay_out(values: Tensor, memory: Memory) -> Tensor:
    """Store values as ``memory`` says, NaN before, between and behind them."""
    shape, strides = values.shape, [0] * values.dim()
    inner = [*range(values.dim())][::-1]  # innermost first
    inner = [*inner[memory.roll % max(values.dim(), 1) :], *inner[: memory.roll % max(values.dim(), 1)]]
    reach = memory.step
    for number, dim in enumerate(inner):
        strides[dim] = reach
        reach = reach * max(shape[dim], 1) + (memory.gaps[number] if number < len(memory.gaps) else 0)
    if memory.expand and shape and shape[0] > 0:
        values, strides[0] = values[:1], 0
    storage = values.new_full((memory.offset + reach + 1,), math.nan)
    storage.as_strided(values.shape, strides, memory.offset).copy_(values)
    return storage.as_strided(shape, strides, memory.offset)


# From a shape and a generator standard normal noise in float64.
Noise = Callable[[tuple[int, ...], torch.Generator], Tensor]


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return standard normal noise in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def shape_of(spec: OpSpec, case: Case, name: str) -> tuple[int, ...]:
    """Return the shape of an argument."""
    return case.shape if is_like_input(spec, name) else spec.parameter_shape(case)


def is_like_input(spec: OpSpec, name: str) -> bool:
    """Whether an argument has the input's shape."""
    return name == "input" or name in spec.like_input


def make_sample(spec: OpSpec, case: Case, device: str = "cpu", seed: int = 0, noise: Noise = normal) -> Sample:
    """Make the tensors of a case.

    Args:
        spec: the op.
        case: what to call it with.
        device: where the tensors go.
        seed: the same seed gives the same numbers on every device and backend.
        noise: where the numbers come from.

    Returns:
        A sample whose differentiable tensors are leaves that require a gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    kwargs: dict[str, Any] = {}
    for name, dtype in case.dtypes.items():
        main = is_like_input(spec, name)
        numbers = noise(shape_of(spec, case, name), generator)
        values = (_VALUES[case.values](numbers, case.normalized, dtype) if main else numbers).to(device, dtype)
        if name in case.memory:
            values = lay_out(values, case.memory[name])
        elif case.layout == "misaligned":
            values = _misaligned(values)
        elif case.layout == "rows_strided" and main:
            values = _in_wider(values, -max(case.normalized, 1), 0, 8)
        elif case.layout == "strided_parameters" and not main:
            values = lay_out(values, Memory(step=2))
        elif case.layout == "transposed" and main:
            values = _transposed(values)
        kwargs[name] = values.requires_grad_(name in spec.grads)
    grads = tuple(name for name in kwargs if name in spec.grads)
    if case.normalized and spec.takes("normalized_shape"):
        kwargs["normalized_shape"] = case.shape[len(case.shape) - case.normalized :]
    if case.out_dtype is not None and spec.takes("out_dtype"):
        kwargs["out_dtype"] = case.out_dtype
    kwargs |= spec.constants(kwargs["input"], case.options)
    return Sample({**kwargs, **case.options}, grads, spec.outputs)


def outputs_of(output: Any) -> tuple[Tensor, ...]:
    """Return the results of an op as a tuple."""
    return output if isinstance(output, tuple) else (output,)


def make_grad(case: Case, output: Any, seed: int = 0, noise: Noise = normal) -> Any:
    """Make the gradient of an output (its shape, dtype and device), laid out as the case says; of several, a tuple."""
    if isinstance(output, tuple):
        return tuple(make_grad(case, one, seed + number, noise) for number, one in enumerate(output))
    if case.layout == "expanded_grad":
        return output.new_ones(()).expand(output.shape)
    generator = torch.Generator().manual_seed(seed + 1)
    values = noise(tuple(output.shape), generator).to(output.device, output.dtype)
    if "grad" in case.memory:
        return lay_out(values, case.memory["grad"])
    if case.layout == "strided_grad":
        return _in_wider(values, -1, 3, 2)
    return _misaligned(values) if case.layout == "misaligned" else values
