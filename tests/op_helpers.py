"""What the tests of ops share: small calls of any registered op, as functions of its differentiable arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops import testing
from fusedops.registry import OPS, Case, OpSpec


def _modes(spec: OpSpec) -> Iterator[OpSpec]:
    """Yield an op, and once more in a mode that gives it other results."""
    yield spec
    if "post_norm" in inspect.signature(spec.function).parameters:
        function, reference = (partial(f, post_norm=True) for f in (spec.function, spec.reference))
        yield replace(spec, function=function, reference=reference)


def _mode_id(spec: OpSpec) -> str:
    return f"{spec.name}{'-post_norm' if isinstance(spec.function, partial) else ''}"


# Ops over rows, called with a shape, whose first result is as the input; the others have tests of their own as well.
OVER_ROWS = [spec for spec in OPS.values() if spec.takes("normalized_shape")]
SPECS = pytest.mark.parametrize("spec", [mode for spec in OVER_ROWS for mode in _modes(spec)], ids=_mode_id)
ALL_SPECS = pytest.mark.parametrize("spec", [mode for spec in OPS.values() for mode in _modes(spec)], ids=_mode_id)
_RANDOM = [spec for spec in OPS.values() if "dropout_p" in inspect.signature(spec.function).parameters]
RANDOM_SPECS = pytest.mark.parametrize("spec", _RANDOM, ids=[spec.name for spec in _RANDOM])
every_op = pytest.mark.parametrize("spec", OVER_ROWS, ids=[spec.name for spec in OVER_ROWS])
GIB = torch.cuda.get_device_properties(0).total_memory >> 30 if torch.cuda.is_available() else 0
Function = Callable[..., tuple[Tensor, ...]]


def small_case(spec: OpSpec, *dtypes: torch.dtype, shape: tuple[int, ...] = (4, 16), **more: Any) -> Case:
    """Return a case with every differentiable argument; of several dtypes the last is all the others'."""
    dtypes = dtypes or (torch.float32,)
    of_each = [dtypes[min(i, len(dtypes) - 1)] for i in range(len(spec.grads))]
    works_over = min(next(spec.cases("quick")).normalized, 1)
    return Case(shape, works_over, dict(zip(spec.grads, of_each, strict=True)), **more)


def make_leaves(spec: OpSpec, case: Case, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    """Return the differentiable arguments of a case, each requiring a gradient."""
    sample = testing.make_sample(spec, case, device, seed)
    return [sample.kwargs[name] for name in sample.grads]


def as_function(spec: OpSpec, case: Case, function: Callable[..., Any] | None = None, **more: Any) -> Function:
    """Return an op as a function of its differentiable arguments to a tuple of outputs.

    Args:
        spec: the op.
        case: names the arguments; their shapes may be others.
        function: called instead of the public function.
        **more: keyword arguments.
    """
    function, names, works_over = function or spec.function, tuple(case.dtypes), case.normalized
    fixed = {**case.options, **more, **({"out_dtype": case.out_dtype} if case.out_dtype else {})}

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        told = works_over and spec.takes("normalized_shape")
        beside = {"normalized_shape": tuple(tensors[0].shape[-works_over:])} if told else {}
        beside |= spec.constants(tensors[0], case.options)
        result = function(**dict(zip(names, tensors, strict=True)), **beside, **fixed)
        return result if isinstance(result, tuple) else (result,)

    return call


def total(outputs: Sequence[Tensor]) -> Tensor:
    """Return a loss that every element of every output moves by its own amount."""
    return sum((out.float() ** 3).sum() for out in outputs)  # type: ignore[return-value]


def results(function: Function, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of their ``total``."""
    outputs = function(*leaves)
    return [*(out.detach() for out in outputs), *torch.autograd.grad(total(outputs), leaves)]


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Compare dtypes and bits."""
    for g, w in zip(got, want, strict=True):
        assert g.dtype is w.dtype
        assert torch.equal(g, w), float((g.double() - w.double()).abs().max())


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], **tolerances: float) -> None:
    """Compare dtypes, and values as closely as PyTorch compares tensors of such a dtype."""
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, **tolerances)


def needs(gib: int) -> pytest.MarkDecorator:
    """Skip the test on a smaller GPU, and without one."""
    return pytest.mark.skipif(gib > GIB, reason=f"needs a GPU of {gib} GiB")


def skip_slow(backend: str, device: str, large: bool = False) -> None:
    """Skip the test where a backend would take minutes, or more memory than there is."""
    if backend == "triton" and device == "cpu":
        pytest.skip("the interpreter takes milliseconds for each program")
    if backend == "reference" and large:
        pytest.skip("plain PyTorch keeps several fp32 copies")


def mixed(
    spec: OpSpec, input: torch.dtype = torch.bfloat16, others: torch.dtype = torch.float32
) -> dict[str, torch.dtype]:
    """Return the dtypes of a call: the input's, and that of all the others."""
    return {name: input if name == "input" else others for name in spec.grads}


def assert_sound(spec: OpSpec, case: Case, backend: str, device: str) -> None:
    """Hold a case to the bound, or skip the test where the backend can't be."""
    if reason := testing.refused(spec, case, backend, device):
        pytest.skip(f"{backend}: {reason}")
    outcome = testing.check(spec, case, backend, device)
    assert outcome.passed, str(outcome)
