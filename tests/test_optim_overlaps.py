"""Parameters that share memory are refused; those that only lie near each other are not."""

from __future__ import annotations

import timeit

import pytest
import torch
from optim_helpers import PLACES, build, ones

from fusedops import optim
from fusedops.optim import overlaps
from fusedops.optim.overlaps import check_overlaps


def views_that_meet() -> dict[str, list[torch.Tensor]]:
    flat, matrix, block = torch.zeros(10), torch.zeros(6, 8), torch.zeros(4, 6, 8)
    return {
        "neighbours": [flat[:6], flat[5:]],
        "whole and part": [flat, flat[2:4]],
        "part and whole": [flat[2:4], flat],
        "the same": [flat, flat[:]],
        "reshaped": [flat, flat.view(2, 5)],
        "other dtype": [flat, flat.view(torch.float16)[7:9]],
        "over itself": [flat[:1].expand(4)],
        "a window that slides by one": [matrix.as_strided((4, 4), (1, 1))],
        "a window that slides by part of its length": [matrix.as_strided((3, 4), (2, 1))],
        "three axes, two of which meet": [block.as_strided((2, 3, 4), (7, 4, 2))],
        "whole and columns": [matrix, matrix[:, 4:]],
        "whole and transposed rows": [matrix.t(), matrix[2:3]],
        "columns": [matrix[:, :5], matrix[:, 4:]],
        "columns, later ones first": [matrix[:, 4:], matrix[:, :5]],
        "every other column": [matrix[:, ::2], matrix[:, 2::2]],
        "corners": [matrix[:4, :5], matrix[3:, 4:]],
        "blocks": [block[:3, :4, :5], block[2:, 3:, 4:]],
    }


def views_that_do_not() -> dict[str, list[torch.Tensor]]:
    flat, matrix, block = torch.zeros(10), torch.zeros(6, 8), torch.zeros(4, 6, 8)
    return {
        "shards of one buffer": [*flat.split([3, 0, 4, 3])],
        "experts of one stack": [*block.unbind()],
        "rows": [matrix[:2], matrix[2:]],
        "transposed": [matrix[:2].t(), matrix[2:].t()],
        "two dtypes in one buffer": [flat[:4].view(torch.float16), flat[4:]],
        "columns": [matrix[:, :5], matrix[:, 5:]],
        "single columns": [*matrix.unbind(1)],
        "every other column": [matrix[:, ::2], matrix[:, 1::2]],
        "every other element": [flat[::2], flat[1::2]],
        "a head of each row": [matrix[:, :2], matrix[:, 2:4], matrix[:, 4:6], matrix[:, 6:]],
        "corners": [matrix[:3, :5], matrix[3:, 4:], matrix[3:, :4], matrix[:3, 5:]],
        "blocks": [block[:2, :, :5], block[2:, :, 4:], block[2:, :, :4]],
        "no axis clears the others, yet no element meets another": [matrix.as_strided((2, 3), (3, 2))],
        "nothing": [flat[5:5], flat, flat[5:5]],
    }


def pieces(views: list[torch.Tensor], device: str) -> list[torch.nn.Parameter]:
    """Return parameters that lie on the device as the views do, with a gradient each."""
    storage = views[0].untyped_storage()
    base = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=device)
    params = []
    for view in views:
        there = torch.empty(0, dtype=view.dtype, device=device)
        there.set_(base.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        params.append(torch.nn.Parameter(there))
        params[-1].grad = torch.ones_like(there, memory_format=torch.contiguous_format)
    return params


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("views", views_that_meet())
def test_parameters_that_share_memory(views, backend, device, need_backend):
    """Refused when they are given, whichever way, and when they come to lie so later; nothing is written."""
    need_backend(backend)
    params = pieces(views_that_meet()[views], device)
    words = r"^AdamW: params: parameter \d: expected memory"
    with pytest.raises(ValueError, match=words):
        build(optim.AdamW, params, backend)
    with pytest.raises(ValueError, match=words):
        build(optim.AdamW, [{"params": [p]} for p in params], backend)
    optimizer = build(optim.AdamW, [ones(2, device=device)], backend)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1
    apart = [torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in params]
    optimizer = build(optim.AdamW, apart, backend)
    for p, q in zip(apart, params, strict=True):
        p.data, p.grad = q.data, q.grad
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert not optimizer.state
    assert not any(p.detach().float().any() for p in params)


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("views", views_that_do_not())
def test_parameters_side_by_side(views, backend, device, need_backend):
    need_backend(backend)
    params = pieces(views_that_do_not()[views], device)
    optimizer = build(optim.AdamW, params[:1], backend, lr=1.0, weight_decay=0.0)
    for p in params[1:]:
        optimizer.add_param_group({"params": [p]})
    optimizer.step()
    for p in params:
        torch.testing.assert_close(p.detach().float(), torch.full(p.shape, -1.0, device=device))
    build(optim.AdamW, params, backend).step()


def test_many_parameters_are_compared_in_little_time():
    """In the order of their starts, each with the next: ten times as many take not a hundred times as long."""

    def seconds(count: int) -> float:
        params = [*torch.zeros(count, 4).unbind()]
        return min(timeit.repeat(lambda: check_overlaps("AdamW", params), number=1, repeat=5))

    seconds(10)
    assert seconds(20_000) < 40 * seconds(2_000)


def test_a_group_is_compared_with_its_neighbours_only(monkeypatch):
    """However many there are; else groups that are added one by one would take the square of their number."""
    compared, whole = [], []
    shared = overlaps._shared
    monkeypatch.setattr(overlaps, "_shared", lambda places: compared.append(len(places)) or shared(places))
    monkeypatch.setattr(overlaps, "check_overlaps", lambda *args: whole.append(args) or check_overlaps(*args))
    rows = [torch.nn.Parameter(row) for row in torch.zeros(50, 4).unbind()]
    optimizer = optim.AdamW(rows[:1])
    for row in rows[:0:-1]:
        optimizer.add_param_group({"params": [row]})
    assert len(whole) == 1  # with the first, as nothing was known before
    assert max(compared) <= 3
    optimizer.add_param_group({"params": [ones(2)]})
    with pytest.raises(ValueError, match="parameter 51: expected memory of its own, got memory of parameter"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(rows[7].detach()[2:])]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [rows[7]]})
    rows[7].data = torch.zeros(4)  # its place is free for another now
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))]})
    assert len(optimizer.param_groups) == 52


def test_a_parameter_that_moves_between_two_groups_is_found_where_it_is():
    first, second, third = torch.zeros(3, 4).unbind()
    p = torch.nn.Parameter(first)
    optimizer = optim.AdamW([p])
    optimizer.add_param_group({"params": [torch.nn.Parameter(second)]})
    p.data = third
    optimizer.add_param_group({"params": [torch.nn.Parameter(first)]})
    with pytest.raises(ValueError, match="parameter 3: expected memory of its own, got memory of parameter 0"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(third[:2])]})


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_frozen_parameters_may_lie_where_others_do(backend, device, need_backend):
    """They are not written; one that is to be written after all is refused then."""
    need_backend(backend)
    whole = torch.nn.Parameter(torch.zeros(8, 4, device=device), requires_grad=False)
    part = torch.nn.Parameter(whole.detach()[2:4])
    part.grad = torch.ones_like(part)
    optimizer = build(optim.AdamW, [whole, part], backend, lr=1.0, weight_decay=0.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(whole.detach()[3:], requires_grad=False)]})
    optimizer.step()
    torch.testing.assert_close(whole.sum(1), torch.tensor([0.0, 0, -4, -4, 0, 0, 0, 0], device=device))
    whole.grad = torch.ones_like(whole)
    with pytest.raises(ValueError, match="parameter 1: expected memory of its own, got memory of parameter 0"):
        optimizer.step()
    assert list(optimizer.state) == [part]


def test_freed_parameters_are_no_neighbours():
    """A view into freed memory still has its offset, and those of two have the same."""
    params = [torch.nn.Parameter(torch.zeros(8)[4:]) for _ in range(3)]
    for p in params[:2]:
        p.untyped_storage().resize_(0)
    optim.AdamW(params)
    twice = torch.nn.Parameter(params[2].detach())
    with pytest.raises(ValueError, match="parameter 3: expected memory of its own, got memory of parameter 2"):
        optim.AdamW([*params, twice])


def test_parameters_that_are_not_there_yet():
    lazy = torch.nn.LazyLinear(3)
    optimizer = optim.AdamW(lazy.parameters(), lr=0.1)
    lazy(torch.ones(2, 4)).sum().backward()
    before = [p.detach().clone() for p in lazy.parameters()]
    optimizer.step()
    assert all((p.detach() < q).all() for p, q in zip(lazy.parameters(), before, strict=True))
