"""The draws of fuzzing out of hypothesis, which makes a failing case as small as it can."""

from __future__ import annotations

from random import Random

import pytest

from fusedops import backends
from fusedops.fuzz import draw, run
from fusedops.registry import OPS

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

BACKENDS = [name for name in ("native", "reference") if backends.get(name).unavailable("cpu") is None]
SMALL = draw.Size(elements=2**12, rows=64, width=2**12)


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(random=st.randoms(use_true_random=False), data=st.data())
def test_search(name: str, random: Random, data: st.DataObject) -> None:
    """The same draws out of hypothesis, which makes a failing case as small as it can."""
    backend = data.draw(st.sampled_from(BACKENDS))
    input, output = data.draw(st.sampled_from(draw.MIXES))
    cell = draw.Cell(OPS[name], backend, input, output)
    variant = draw.draw_variant(random, cell, "cpu", SMALL, data.draw(st.booleans()))
    assert variant is not None
    found = run.run(cell, draw.draw(random, cell, variant, "cpu", SMALL), "cpu")
    assert found.problem is None, found.problem
