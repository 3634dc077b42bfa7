"""Every op on every backend against the float64 truth, generated from the registry: nothing here names an op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch

from fusedops import testing
from fusedops.config import BACKENDS
from fusedops.registry import OPS, Case, OpSpec

pytestmark = pytest.mark.usefixtures("poison")
Need = Callable[[str], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    argument = "case" if "case" in metafunc.fixturenames else "wanted"
    cells = _every_case(metafunc.config.getoption("--full")) if argument == "case" else _every_subset()
    if metafunc.function is test_repeatable and not metafunc.config.getoption("--full"):
        cells = cells[::5]
    metafunc.parametrize(
        ("backend", "spec", argument),
        [pytest.param(backend, *cell[1:], id=f"{backend}-{cell[0]}") for backend in BACKENDS for cell in cells],
    )


def _every_case(full: bool) -> list[tuple[str, OpSpec, Any]]:
    level = "full" if full else "quick"
    return [(f"{spec.name}-{case.id}", spec, case) for spec in OPS.values() for case in spec.cases(level)]


def _every_subset() -> list[tuple[str, OpSpec, Any]]:
    def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for size in range(len(names)):
            yield from combinations(names, size)

    return [
        (f"{spec.name}-{'+'.join(wanted) or 'nothing'}", spec, wanted)
        for spec in OPS.values()
        for wanted in subsets(spec.grads)
    ]


def _skip_refused(spec: OpSpec, case: Case, backend: str, device: str) -> None:
    if reason := testing.refused(spec, case, backend, device):
        pytest.skip(f"{backend}: {reason}")


def test_parity(backend: str, spec: OpSpec, case: Case, need_backend: Need, device: str) -> None:
    need_backend(backend)
    _skip_refused(spec, case, backend, device)
    outcome = testing.check(spec, case, backend, device)
    assert outcome.passed, str(outcome)


def test_frozen(backend: str, spec: OpSpec, wanted: tuple[str, ...], need_backend: Need, device: str) -> None:
    """Gradients of some arguments are bitwise those of all, and a result needs a gradient only if an argument does."""
    need_backend(backend)
    case = next(case for case in spec.cases("quick") if set(case.dtypes) == set(spec.grads))
    _skip_refused(spec, case, backend, device)

    def call(**kwargs: object) -> object:
        result = spec.function(**kwargs, backend=backend)
        outputs = testing.outputs_of(result)
        assert outputs[0].requires_grad == any(isinstance(v, torch.Tensor) and v.requires_grad for v in kwargs.values())
        return result

    sample = testing.make_sample(spec, case, device)
    every = testing.run(call, sample, lambda output: testing.make_grad(case, output))
    some = testing.run(call, sample, lambda output: testing.make_grad(case, output), wanted)
    assert set(some) == {*spec.outputs, *wanted}
    assert all(torch.equal(some[name], every[name]) for name in some)


def test_repeatable(backend: str, spec: OpSpec, case: Case, need_backend: Need, device: str) -> None:
    """The same call gives the same bits."""
    need_backend(backend)
    _skip_refused(spec, case, backend, device)
    sample = testing.make_sample(spec, case, device)
    first, second = (
        testing.run(
            lambda **kwargs: spec.function(**kwargs, backend=backend),
            sample,
            lambda output: testing.make_grad(case, output),
        )
        for _ in range(2)
    )
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=0, equal_nan=True)
