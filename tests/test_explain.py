"""What ``explain`` says of a call, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from dispatch_helpers import fake_backend

import fusedops
from fusedops import FallbackWarning, UnsupportedError, dispatch
from fusedops.dispatch import Limits
from fusedops.registry import OPS

F32, BF16 = torch.float32, torch.bfloat16


def test_explain_prints_row_verdicts_and_origin(fake: Callable[..., None]) -> None:
    fake(native=fake_backend("not built"))
    x, w = torch.randn(6, 768, dtype=BF16), torch.randn(768)
    text = str(fusedops.explain("layer_norm", x, 768, w))
    for part in (
        "layer_norm on cpu: input bfloat16, weight float32, output bfloat16, hidden 768",
        "runs on   reference   (dispatch table)",
        "native > reference",
        "native    no: not built",
        "reference can run",
        "default",
    ):
        assert part in text, text
    assert str(fusedops.explain(fusedops.layer_norm, x, 768, w)) == text
    assert "backend= argument" in str(fusedops.explain("layer_norm", x, 768, backend="reference"))
    with fusedops.use_backend("native"):
        text = str(fusedops.explain("layer_norm", x, 768))
        assert "use_backend" in text
        assert "nothing: native was asked for and can't serve it" in text


def test_explain_runs_nothing_and_refuses_unknown_ops() -> None:
    with pytest.raises(ValueError, match=r"expected one of layer_norm, rms_norm, .*got 'norm'"):
        fusedops.explain("norm", torch.randn(2, 2), 2)


@pytest.mark.parametrize("backend", ["nope", "memory", "philox", "schemas", 3])
@pytest.mark.parametrize("op", ["layer_norm", "adamw"])
def test_explain_refuses_what_is_no_backend(op: str, backend: object) -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=rf"{op}: backend: expected one of native, .*, got {backend!r}"):
        fusedops.explain(op, *((x, 8) if op == "layer_norm" else ([x],)), backend=backend)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_explain_refuses_what_is_no_tensor(op: str) -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=f"{op}: input: expected a tensor, got int"):
        fusedops.explain(op, 3, *([x] if "add" in op else []), 8)


@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("first", ["served", "refused"])
def test_a_second_results_dtype_is_part_of_the_choice(
    op: str, compiling: bool, first: str, fake: Callable[..., None]
) -> None:
    """Calls that differ in it alone, either seen first: a backend that refuses it never serves it."""
    fake(native=fake_backend(limits=Limits(frozenset({F32})), op=op))
    function, x = getattr(fusedops, op), torch.ones(2, 8)
    calls: dict[str, Callable[..., object]] = {
        "served": lambda x, **k: function(x, x, 8, **k),
        "refused": lambda x, **k: function(x, x, 8, residual_dtype=BF16, **k),
    }
    assert (
        "residual_out is torch.bfloat16"
        in dict(fusedops.explain(op, x, x, 8, residual_dtype=BF16).verdicts)["native"][0]
    )
    if compiling:
        calls = {name: torch.compile(call, backend="eager", fullgraph=True) for name, call in calls.items()}
    for name in (first, *calls):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            result = calls[name](x)
        assert (result == "served") is (name == "served")
        assert name == "served" or result[1].dtype is BF16
    for name, call in calls.items():
        if name == "refused" and not compiling:
            with pytest.raises(UnsupportedError, match=r"residual_out is torch\.bfloat16"):
                call(x, backend="native")


@pytest.mark.parametrize("op", [name for name, spec in OPS.items() if spec.takes("normalized_shape")])
def test_explain_says_what_select_does(op: str) -> None:
    rows = ["input", *OPS[op].like_input]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        explanation = fusedops.explain(op, *(torch.randn(2, 8) for _ in rows), 8)
        assert dispatch.select(explanation.call).backend == explanation.chosen
