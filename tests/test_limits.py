"""Where sizes end: widths, elements beyond 32 bits, strides, many rows.

Every op and optimizer of the registry. What needs tens of GiB runs on a large GPU, its small image everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from op_helpers import assert_sound, every_op, mixed, needs, skip_slow
from optim_helpers import build
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops.registry import OPTIMS, Case, OpSpec, OptimSpec

F32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.usefixtures("memory_given_back")
every_optimizer = pytest.mark.parametrize("spec", OPTIMS.values(), ids=OPTIMS)


def each(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Apply to an output or to each of several."""
    return tuple(map(function, output)) if isinstance(output, tuple) else function(output)


WIDTHS = (
    1, 2, 31, 33, 127, 257, 700, 1000, 1500, 2049, 4095, 6000, 8193, 12289, 16385, 32769, 65536, 131073,
    2**20 - 1, 2**20,
)  # fmt: skip


@every_op
@pytest.mark.parametrize("width", WIDTHS)
def test_width(spec: OpSpec, width: int, backend: str, device: str) -> None:
    if width > 2**17:
        skip_slow(backend, device)
    assert_sound(spec, Case((3, width), 1, mixed(spec)), backend, device)


@every_op
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_rows_of_one_column(spec: OpSpec, eps: float, dtype: torch.dtype, backend: str, device: str) -> None:
    """All but nothing is left of dx, and of what is normalised with its mean."""
    assert_sound(spec, Case((129, 1), 1, mixed(spec, dtype), options={"eps": eps}), backend, device)


def test_widths_reach_every_way_triton_lays_out_rows() -> None:
    pytest.importorskip("triton")
    from fusedops.backends.triton import norm

    for configs in (norm.FORWARD, norm.BACKWARD):
        assert {norm.row_config(configs, width) for width in WIDTHS} == {None, *configs}


@every_op
@pytest.mark.parametrize("shape", [(65535, 2, 4), (65536, 2, 4), (65537, 3), (131073, 1, 5), (300, 300, 2, 2)], ids=str)
def test_more_rows_than_a_grid_axis_holds(spec: OpSpec, shape: tuple[int, ...], backend: str, device: str) -> None:
    skip_slow(backend, device)
    assert_sound(spec, Case(shape, max(1, len(shape) - 1 - (shape[0] == 300)), mixed(spec)), backend, device)


def boundaries(count: int, unit: int = 1) -> list[int]:
    """Return places in units of so many elements: both ends, and around element 2^31 and 2^32."""
    near = [0, 1, *(2**power // unit + i for power in (31, 32) for i in (-1, 0, 1)), count - 2, count - 1]
    return sorted({place for place in near if 0 <= place < count})


@every_op
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        pytest.param(70_001, 24, id="small"),
        pytest.param(2**20 + 3, 4096, id="2^32 elements", marks=needs(120)),
        pytest.param(2**28 + 5, 16, id="2^28 rows", marks=needs(120)),
    ],
)
def test_more_elements_than_32_bits_count(spec: OpSpec, rows: int, width: int, backend: str, device: str) -> None:
    """Rows of zeros but for a few, which have to be what they are among themselves, and so have their sums."""
    skip_slow(backend, device, large=rows * width >= 2**31)
    places = boundaries(rows, width)
    case = Case((len(places), width), 1, mixed(spec))
    sample = testing.make_sample(spec, case, device)

    def among_zeros(few: Tensor) -> Tensor:
        many = few.new_zeros(rows, *few.shape[1:])
        for place, row in zip(places, few.detach(), strict=True):
            many[place].copy_(row)
        return many

    given: list[Any] = []

    def grad(output: Any) -> Any:
        given.append(testing.make_grad(case, each(lambda t: t[: len(places)], output)))
        return each(among_zeros, given[0])

    large = dict(sample.kwargs)
    for name in sample.grads:
        if testing.shape_of(spec, case, name) == case.shape:
            large[name] = among_zeros(large[name]).requires_grad_()
    found = testing.run(partial(spec.function, backend=backend), replace(sample, kwargs=large), grad)
    few = {
        name: torch.stack([value[place] for place in places]) if value.shape == (rows, width) else value
        for name, value in found.items()
    }
    outcome = testing.judge(spec, case, sample, given[0], few, backend=backend)
    assert outcome.passed, str(outcome)


@every_op
def test_rows_further_apart_than_32_bits_count(spec: OpSpec, backend: str, device: str) -> None:
    """Input and gradient as two rows 2^31 elements apart; on a CPU the pages between are never touched."""
    case = Case((2, 64), 1, mixed(spec))
    sample = testing.make_sample(spec, case, device)

    def apart(t: Tensor) -> Tensor:
        far = torch.empty(2**31 + 64, dtype=t.dtype, device=device).as_strided((2, 64), (2**31, 1))
        return far.copy_(t.detach())

    def run(change: Any) -> dict[str, Tensor]:
        kwargs = dict(sample.kwargs)
        for name in sample.grads:
            if testing.shape_of(spec, case, name) == case.shape:
                kwargs[name] = change(kwargs[name]).requires_grad_()
        return testing.run(
            partial(spec.function, backend=backend),
            replace(sample, kwargs=kwargs),
            lambda output: each(change, testing.make_grad(case, output)),
        )

    near, far = run(lambda t: t.detach().clone()), run(apart)
    for name, value in near.items():
        torch.testing.assert_close(far[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "classes"),
    [
        pytest.param(70_001, 24, id="small"),
        pytest.param(2**15 + 3, 2**16 + 1, id="2^31 logits", marks=needs(30)),
        pytest.param(2**28 + 5, 16, id="2^28 rows", marks=needs(60)),
    ],
)
def test_more_logits_than_32_bits_count(rows: int, classes: int, backend: str, device: str) -> None:
    """Rows of zeros but for a few, whose losses and gradients are what they are among themselves."""
    skip_slow(backend, device, large=rows * classes >= 2**31)
    places = torch.tensor(boundaries(rows, classes), device=device)
    few = torch.randn(len(places), classes, device=device).bfloat16().requires_grad_()
    x = torch.zeros(rows, classes, dtype=BF16, device=device)
    x[places] = few.detach()
    x.requires_grad_()
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    target[places] = torch.arange(len(places), device=device) * 5 % classes
    alone = fusedops.cross_entropy(few, target[places], reduction="none", backend=backend)
    losses = fusedops.cross_entropy(x, target, reduction="none", backend=backend)
    # Rows that begin elsewhere in memory are added up in another order.
    torch.testing.assert_close(losses[places], alone, rtol=1e-5, atol=1e-5)
    found, want = (torch.autograd.grad(loss.sum(), leaf)[0] for loss, leaf in ((losses, x), (alone, few)))
    torch.testing.assert_close(found[places], want, rtol=2**-7, atol=1e-6)
    del found
    total = math.log(classes) * (rows - len(places)) + float(alone.double().sum())
    with torch.no_grad():
        mean = fusedops.cross_entropy(x, target, backend=backend)
    assert float(mean) == pytest.approx(total / rows, rel=1e-5)


def test_logits_further_apart_than_32_bits_count(backend: str, device: str) -> None:
    target, found = torch.tensor([3, 60], device=device), []
    near = torch.randn(2, 64, device=device).bfloat16()
    far = torch.empty(2**31 + 64, dtype=BF16, device=device).as_strided((2, 64), (2**31, 1)).copy_(near)
    for x in (near.requires_grad_(), far.requires_grad_()):
        loss = fusedops.cross_entropy(x, target, backend=backend)
        found.append((loss, *torch.autograd.grad(loss, x)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


# ---------------------------------------------------------------- optimizers

COUNTS = [
    pytest.param(70_001, F32, id="small"),
    pytest.param(2**31 + 4096, F32, id="2^31 fp32", marks=needs(60)),
    pytest.param(2**32 + 4096, BF16, id="2^32 bf16", marks=needs(60)),
]


def windows(count: int) -> list[slice]:
    """Return stretches around each boundary, which do not overlap."""
    near = [place for place in boundaries(count) if place % 2**31 == 1] + [count - 32]
    return [slice(max(0, place - 32), min(count, place + 32)) for place in near]


def pieces(t: Tensor, places: list[slice]) -> Tensor:
    return torch.cat([t[place] for place in places])


@every_optimizer
@pytest.mark.parametrize(("count", "dtype"), COUNTS)
def test_a_parameter_of_more_elements_than_32_bits_count(
    spec: OptimSpec, count: int, dtype: torch.dtype, backend: str, device: str
) -> None:
    skip_slow(backend, device, large=count >= 2**31)
    there = windows(count)
    total = sum(place.stop - place.start for place in there)
    grads = [torch.randn(total, device=device).to(dtype) for _ in range(2)]
    found = []
    for size, places in ((count, there), (total, [slice(0, total)])):
        p = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        optimizer: Any = build(spec.optimizer, [p], backend, lr=0.1)  # type: ignore[arg-type]
        for grad in grads:
            p.grad = torch.ones_like(p)
            for place, part in zip(places, grad.split([place.stop - place.start for place in places]), strict=True):
                p.grad[place].copy_(part)
            optimizer.step()
        found.append(pieces(p.detach(), places))
        assert p[size // 3] != 1, "an element between did not move"
        del p, optimizer
    torch.testing.assert_close(*found, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(("count", "dtype"), COUNTS)
def test_clipping_more_elements_than_32_bits_count(count: int, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_slow(backend, device, large=count >= 2**31)
    p = torch.nn.Parameter(torch.empty(count, dtype=dtype, device=device))
    p.grad = torch.full_like(p, 0.5)
    with fusedops.use_backend(backend):
        norm = fusedops.clip_grad_norm_([p], max_norm=1.0)
    truth = 0.5 * math.sqrt(count)
    assert float(norm) == pytest.approx(truth, rel=1e-6)
    got = pieces(p.grad, windows(count)).float()
    torch.testing.assert_close(got, torch.full_like(got, 0.5 / truth), rtol=4 * torch.finfo(dtype).eps, atol=0)
