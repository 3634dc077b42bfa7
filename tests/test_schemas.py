"""The ops as torch.ops.fusedops: the same with and without the extension."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedops
from fusedops.backends import native, schemas

ROOT = Path(__file__).resolve().parent.parent


def parsed(schema: str) -> str:
    return str(torch._C.parse_schema(schema))


def test_python_and_cpp_define_the_same() -> None:
    text = (ROOT / "csrc" / "bindings.cpp").read_text("utf-8")
    body = text[text.index("TORCH_LIBRARY(") : text.index("\n}\n", text.index("TORCH_LIBRARY("))]
    cpp = [
        "".join(re.findall(r'"(.*?)"', call, re.DOTALL)) for call in re.findall(r"m\.def\((.*?)\);", body, re.DOTALL)
    ]
    assert sorted(map(parsed, cpp)) == sorted(map(parsed, schemas.SCHEMAS))


@pytest.mark.skipif(native._C is None, reason="needs the extension")
def test_without_the_extension_an_exported_graph_runs(tmp_path: Path) -> None:
    module = torch.nn.Sequential(fusedops.nn.LayerNorm(8), fusedops.nn.RMSNorm(8)).eval()
    x = torch.randn(3, 8)
    path = tmp_path / "graph.pt2"
    program = torch.export.export(module, (x,))
    assert "fusedops.layer_norm" in str(program.graph)
    torch.export.save(program, path)
    torch.save((x, module(x)), tmp_path / "sample.pt")
    code = (
        "import sys, torch; sys.modules['fusedops._C'] = None; import fusedops; from fusedops.backends import native\n"
        f"assert native._C is None; x, y = torch.load({str(tmp_path / 'sample.pt')!r})\n"
        f"torch.testing.assert_close(torch.export.load({str(path)!r}).module()(x), y)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mixed", [False, True])
def test_both_halves_in_plain_torch(mixed: bool) -> None:
    x, dy = (torch.randn(2, 3, 8, dtype=torch.bfloat16 if mixed else torch.float32) for _ in "xd")
    w, b = torch.rand(8), torch.rand(8)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = fusedops.layer_norm(leaves[0], 8, *leaves[1:], backend="reference")
    want = torch.autograd.grad(y, leaves, dy)
    got, mean, rstd = schemas._layer_norm_fwd(x, (8,), w, b, 1e-5, None)
    torch.testing.assert_close(got, y)
    torch.testing.assert_close(schemas._layer_norm_bwd(dy, x, (8,), w, mean, rstd, (True,) * 3, b.dtype), want)
    y = fusedops.rms_norm(leaves[0], 8, leaves[1], 1e-6, weight_offset=1.0, backend="reference")
    want = torch.autograd.grad(y, leaves[:2], dy)
    got, rstd = schemas._rms_norm_fwd(x, (8,), w, 1e-6, 1.0, None)
    torch.testing.assert_close(got, y)
    torch.testing.assert_close(schemas._rms_norm_bwd(dy, x, (8,), w, rstd, 1.0, (True, True)), want)
