"""What the tests of the tuner share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fusedops import machine
from fusedops.dispatch import Call
from fusedops.tuning.table import Measured

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def a_cell(rows: int = 1023, hidden: int = 64, **values: Any) -> Measured:
    arguments = {"input": "float32", "weight": "float32", "bias": "float32", "output": "float32"}
    given = {"times": {"native": (50.0, 1.0), "reference": (80.0, 1.0)}, **values}
    return Measured("layer_norm", "cpu", None, arguments, hidden, rows, "fp32", "x", "2026-01-01", **given)


def tuned_file() -> Path:
    path = machine.tuned_file(machine.facts(CPU))
    assert path is not None
    return path


def call(rows: int = 1023, hidden: int = 64, dtype: torch.dtype = F32, weight: torch.dtype = F32) -> Call:
    dtypes = (("input", dtype), ("weight", weight), ("bias", weight), ("output", dtype))
    return Call("layer_norm", "cpu", -1, dtypes, hidden, rows)


def everything(model: torch.nn.Module) -> list[Any]:
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*state, *grads, torch.get_rng_state(), *(module.training for module in model.modules())]


def same(before: list[Any], after: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, after, strict=True))
