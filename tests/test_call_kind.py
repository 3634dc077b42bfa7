"""What dispatch tells calls apart by: the extension reads off tensors what the Python function does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusedops.ops._common import call_kind, python_call_kind

pytestmark = pytest.mark.skipif(call_kind is python_call_kind, reason="needs the extension")

X = torch.ones(2, 4)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.float8_e4m3fn)
SHAPES = ((), (0,), (1,), (3, 0), (7,), (8,), (2, 4), (2, 8), (1 << 40,))


class Subclass(torch.Tensor):
    pass


def calls() -> Iterator[tuple[Any, ...]]:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        yield torch.empty(shape, dtype=dtype, device="meta"), (), ()
    x = X
    yield x, (), ()
    yield x.transpose(0, 1), (), ()
    yield x.to_sparse(), (), ()
    others = (None, *(torch.ones(4, dtype=dtype) for dtype in DTYPES[:3]))
    for count in (1, 2, 3):
        yield from ((x, chosen, ()) for chosen in itertools.product(others, repeat=count))
    yield x, (), (torch.zeros(2, dtype=torch.int64), None)
    odd = (Subclass(), torch.nn.parameter.UninitializedParameter(), 1.0, "x", [x], x.numpy())
    yield from ((x, (None, t), ()) for t in odd)
    yield from ((x, (None,), (t,)) for t in odd)
    yield from ((t, (), ()) for t in odd[:2])
    yield from ((t, (t, None), (t,)) for t in (torch.nn.Parameter(x), torch.nn.Buffer(x)))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([x, x], layout=layout)
        yield nested, (), ()
        yield torch.nn.Parameter(nested), (), ()
    if torch.cuda.is_available():
        yield from ((torch.empty(shape, device="cuda"), (), ()) for shape in SHAPES[:-1])


def test_both_make_the_same_distinctions() -> None:
    pairs = [(call_kind(*call), python_call_kind(*call)) for call in calls()]
    assert all((ours is None) == (theirs is None) for ours, theirs in pairs)
    assert sum(ours is None for ours, _ in pairs) == 18
    assert len(set(pairs)) == len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs}) > 100


def test_within_a_transform_and_a_trace_there_is_none() -> None:
    x, seen = X, []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((call_kind(x, (), ()), python_call_kind(x, (), ())))
        return x * 2

    torch.func.vmap(look)(x)
    torch.func.grad(lambda x: look(x).sum())(x)
    torch.jit.trace(look, x, check_trace=False)
    assert seen == [(None, None)] * 3
    look(x)
    assert None not in seen[-1]


@pytest.mark.parametrize(
    "arguments",
    [(), (X,), (X, None, ()), (X, (), []), (X, (None,) * 6, ())],
    ids=["none", "one", "others None", "constants in a list", "too many"],
)
def test_arguments_it_can_not_take_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError), match="call_kind: "):
        call_kind(*arguments)
