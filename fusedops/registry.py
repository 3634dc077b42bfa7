"""One record per op and per optimizer.

Parity tests, benchmarks, the tuner and the docs are generated from these records, so that a new op touches no file of
theirs. The records hold data and small pure functions; nothing here runs a kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

import torch

from .dispatch import Call

# How tensors lie in memory, and what the numbers look like; ``fusedops.testing`` makes them.
LAYOUTS = (
    "contiguous",
    "rows_strided",
    "transposed",
    "misaligned",
    "expanded_grad",
    "strided_grad",
    "strided_parameters",
)
VALUES = ("normal", "large_mean", "tiny_spread", "constant_rows", "huge", "subnormal", "inf_nan_rows")

_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", None: "none"}


def short(dtype: torch.dtype | None) -> str:
    """Return the short name of a dtype, as ``fp32`` or ``bf16``."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Memory:
    """How one tensor lies in memory, told without its shape; ``fusedops.testing.lay_out`` makes it.

    Attributes:
        offset: elements between the start of the storage and the tensor.
        step: distance of neighbours along the innermost dimension.
        gaps: unused elements behind each dimension, innermost first; none behind the dimensions it does not reach.
        roll: how often the innermost dimension is made the outermost one; 1 transposes a matrix.
        expand: the outermost dimension has stride 0: all its slices are one.
    """

    offset: int = 0
    step: int = 1
    gaps: tuple[int, ...] = ()
    roll: int = 0
    expand: bool = False


@dataclass(frozen=True)
class Case:
    """What to call an op with, before any tensor exists.

    Attributes:
        shape: shape of ``input``.
        normalized: number of trailing dimensions the op works over.
        dtypes: dtype of each floating-point argument, by name; an argument that is missing is not passed.
        out_dtype: requested output dtype, or None for the op's own rule.
        options: further keyword arguments (eps, …).
        layout: how the tensors lie in memory; one of ``LAYOUTS``.
        values: what the numbers look like; one of ``VALUES``.
        memory: how a tensor lies in memory, by argument name (``"grad"`` for gradients of outputs), where ``layout``
            says too little.
    """

    shape: tuple[int, ...]
    normalized: int
    dtypes: Mapping[str, torch.dtype]
    out_dtype: torch.dtype | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"
    values: str = "normal"
    memory: Mapping[str, Memory] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """A readable test id."""
        parts = ["x".join(map(str, self.shape)) + (f"n{self.normalized}" if self.normalized > 1 else "")]
        parts += [short(dtype) if name == "input" else f"{name}_{short(dtype)}" for name, dtype in self.dtypes.items()]
        parts += [f"to_{short(self.out_dtype)}"] if self.out_dtype else []
        parts += [f"{k}={v}" for k, v in self.options.items()]
        parts += [part for part in (self.layout, self.values) if part not in ("contiguous", "normal")]
        parts += [f"{name}_in_{memory}" for name, memory in self.memory.items()]
        return "-".join(parts)


@dataclass(frozen=True)
class Sample:
    """One call of an op: ``function(**kwargs)``.

    Attributes:
        kwargs: the arguments.
        grads: names of the arguments that require a gradient.
        outputs: names of the results.
        arithmetic: dtype that backends compute in, whatever the arguments' own.
    """

    kwargs: dict[str, Any]
    grads: tuple[str, ...]
    outputs: tuple[str, ...] = ("output",)
    arithmetic: torch.dtype = torch.float32


@dataclass(frozen=True)
class OpSpec:
    """All that tests, benchmarks and dispatch need to know of an op.

    Attributes:
        name: public name.
        family: the stem its files share.
        function: the public function.
        reference: the same call in plain torch; in float64 it is the truth.
        wrap: makes a differentiable op of a backend's ``<op>_fwd`` and ``<op>_bwd``.
        describe: turns the arguments of a call into a ``Call`` (what ``explain`` shows) or refuses them as it does.
        grads: names of the differentiable arguments, ``input`` first.
        parameter_shape: shape of every argument but ``input`` and those like it, from a case.
        cases: yields the cases of a level, ``"quick"`` or ``"full"``.
        condition: from the float64 sample and the float64 gradient of the output (a tuple where there are several), the
            condition number of each output and of each gradient, elementwise: the size of what was added up to make it.
        terms: length of the sum behind the output and each gradient, from a case.
        bytes_moved: least bytes of device memory a call moves, from a sample and ``"fwd"`` or ``"bwd"``.
        defaults: from a call's arguments, what it finds out itself (a default that depends on dtypes, a seed that it
            draws); the float64 truth gets it spelt out.
        outputs: names of the results, ``"output"`` first.
        like_input: arguments of ``input``'s shape; all others have ``parameter_shape``.
        pinned: what results are computed from as the backend rounded it, as arguments of ``reference``: from the
            backend's function, the arguments of a call and its results. The truth is that of those numbers.
        tolerance_overrides: (backend, device type, name) → (factor on what arithmetic may lose, from the length of the
            sum, and the reason). Empty for a sound op.
        draw_options: draws the options of a fuzzed call, given the dtypes of its differentiable arguments.
        constants: further arguments that no gradient is taken of (targets, tables), from the input and the options; a
            function of the input's shape and device alone, so that it may be traced.
        sizes: (rows, hidden) that benchmarks measure; none: their own, by width.
    """

    name: str
    family: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    wrap: Callable[[ModuleType], Callable[..., Any]]
    describe: Callable[..., Call]
    grads: tuple[str, ...]
    parameter_shape: Callable[[Case], tuple[int, ...]]
    cases: Callable[[str], Iterator[Case]]
    condition: Callable[[Sample, Any], dict[str, torch.Tensor]]
    terms: Callable[[Case], dict[str, int]]
    bytes_moved: Callable[[Sample, str], int]
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda kwargs: {}
    outputs: tuple[str, ...] = ("output",)
    like_input: tuple[str, ...] = ()
    pinned: Callable[[Callable[..., Any], Mapping[str, Any], Mapping[str, torch.Tensor]], dict[str, Any]] = (
        lambda function, kwargs, results: {}
    )
    tolerance_overrides: Mapping[tuple[str, str, str], tuple[Callable[[int], float], str]] = field(default_factory=dict)
    draw_options: Callable[[Random, Mapping[str, torch.dtype]], Mapping[str, Any]] = lambda random, dtypes: {}
    constants: Callable[[torch.Tensor, Mapping[str, Any]], dict[str, Any]] = lambda input, options: {}
    sizes: tuple[tuple[int, int], ...] = ()

    def takes(self, name: str) -> bool:
        """Tell whether the function has an argument of a name (``"normalized_shape"``, ``"out_dtype"``)."""
        return name in inspect.signature(self.function).parameters


@dataclass(frozen=True)
class OptimSpec:
    """All that tests and benchmarks need to know of an optimizer.

    Attributes:
        name: dispatch name (``adamw``).
        optimizer: our class.
        reference: torch's class with the same arithmetic.
        options: variants to test: keyword arguments both classes take.
        condition: from a group's options and a parameter's float64 weight, gradient and state before the step, and the
            state and weight after it, and whether the gradient was computed on its way (unscaled, clipped), the
            elementwise size of what was added up to make each tensor, by its key (``"weight"`` is the parameter or its
            master).
        bytes_per_parameter: least bytes of device memory a step moves, by (parameter dtype, state dtype, masters?).
    """

    name: str
    optimizer: type[torch.optim.Optimizer]
    reference: type[torch.optim.Optimizer]
    options: tuple[Mapping[str, Any], ...]
    condition: Callable[
        [Mapping[str, Any], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], bool], dict[str, torch.Tensor]
    ]
    bytes_per_parameter: Callable[[torch.dtype, torch.dtype, bool], int]


OPS: dict[str, OpSpec] = {}
OPTIMS: dict[str, OptimSpec] = {}


def register(spec: OpSpec | OptimSpec) -> None:
    """Add a record; a name may be used once."""
    table: dict[str, Any] = OPS if isinstance(spec, OpSpec) else OPTIMS
    if spec.name in table:
        raise ValueError(f"register: {spec.name!r} is registered already")
    table[spec.name] = spec
