"""Who serves a call: rows, limits, explicit choices, fallbacks, the environment, compiled code."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from dispatch_helpers import ALL, CALL, fake_backend
from torch._dynamo.testing import CompileCounter

import fusedops
from fusedops import FallbackWarning, UnsupportedError, config, dispatch, dispatch_table
from fusedops.backends import apex
from fusedops.dispatch import Call, Limits
from fusedops.dispatch_table import Row

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


# ---------------------------------------------------------------- select


def test_first_backend_of_the_row_that_can_serves(fake: Callable[..., None]) -> None:
    fake(native=fake_backend(limits=ALL))
    assert dispatch.select(CALL).backend == "native"
    fake(native=fake_backend("not built"))
    with pytest.warns(FallbackWarning):
        assert dispatch.select(CALL).backend == "reference"


@pytest.mark.parametrize("reason", ["not built", "its limits"])
def test_explicit_choice_is_refused_with_its_reason(reason: str, fake: Callable[..., None]) -> None:
    limits = Limits(
        frozenset({F64}), max_hidden=512, max_elements=1000, traceable=False, extra=lambda call: "on Sunday"
    )
    fake(native=fake_backend(reason) if reason == "not built" else fake_backend(limits=limits))
    with pytest.raises(UnsupportedError) as error:
        dispatch.select(CALL, "native")
    message = str(error.value)
    assert isinstance(error.value, NotImplementedError)
    assert "layer_norm" in message
    assert "'native'" in message
    parts = ["not built"] if reason == "not built" else [
        "input is torch.float32", "weight is torch.bfloat16", "output is torch.float32", "float64",
        "hidden is 768; at most 512", "at most 1000 are addressed", "on Sunday",
    ]  # fmt: skip
    for part in parts:
        assert part in message


def test_explicit_choice_is_obeyed(fake: Callable[..., None]) -> None:
    fake(apex=fake_backend(limits=ALL), native=fake_backend(limits=ALL))
    assert dispatch.select(CALL, "apex").backend == "apex"
    x = torch.randn(2, 8)
    assert fusedops.layer_norm(x, 8, backend="apex") == "served"
    assert isinstance(fusedops.layer_norm(x, 8, backend="reference"), torch.Tensor)


def test_backend_without_the_op_says_so(fake: Callable[..., None]) -> None:
    fake(apex=fake_backend())
    with pytest.raises(UnsupportedError, match="it has no layer_norm"):
        dispatch.select(CALL, "apex")


@pytest.mark.parametrize("call", [lambda **k: fusedops.layer_norm(torch.ones(2, 4), 4, **k), fusedops.use_backend])
def test_unknown_backend(call: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="expected one of native, triton, apex, reference, got 'cuda'"):
        call(**{"backend" if call is not fusedops.use_backend else "name": "cuda"})


def test_when_nothing_can_serve_every_reason_is_given(
    fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(native=fake_backend("not built"), triton=fake_backend("not installed"))
    monkeypatch.setattr(dispatch, "_rows", (Row((), None, ("native", "triton"), "test"),))
    with pytest.raises(UnsupportedError, match=r"native: not built; triton: not installed"):
        dispatch.select(CALL)


@pytest.mark.parametrize("hidden", [3, 8, 100])
@pytest.mark.parametrize("order", [1, -1])
def test_calls_are_served_as_explain_says_in_any_order(
    hidden: int, order: int, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(native=fake_backend(limits=ALL))
    row = Row((), None, ("reference",), "test", rows=(4, 2**63))
    monkeypatch.setattr(dispatch, "_rows", (row, *dispatch_table.SHIPPED))
    seen = set()
    for rows in range(1, 20)[::order]:
        x = torch.ones(rows, hidden)
        served = fusedops.layer_norm(x, hidden)
        backend = fusedops.explain("layer_norm", x, hidden).chosen
        assert backend == ("native" if isinstance(served, str) else "reference")
        seen.add(backend)
    assert seen == {"native", "reference"}


def test_limits_while_compiling_do_not_need_sizes() -> None:
    limits = Limits(frozenset({F32, BF16}), max_hidden=8, max_elements=8)
    assert limits.refuse(Call("layer_norm", "cpu", -1, CALL.dtypes, compiling=True)) == []
    traced = Limits(frozenset({F32, BF16}), traceable=False)
    assert traced.refuse(Call("layer_norm", "cpu", -1, CALL.dtypes, compiling=True)) == [
        "it can't be traced by torch.compile"
    ]


# ---------------------------------------------------------------- fallback


def test_fallback_to_plain_torch_warns_once_per_reason(fake: Callable[..., None]) -> None:
    fake(native=fake_backend("not built"))
    x = torch.randn(2, 8)
    with pytest.warns(FallbackWarning, match="layer_norm runs in plain PyTorch: native: not built"):
        fusedops.layer_norm(x, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusedops.layer_norm(torch.randn(3, 16), 16)
    with pytest.warns(FallbackWarning, match="rms_norm"):
        fusedops.rms_norm(x, 8)


def test_choosing_plain_torch_does_not_warn(fake: Callable[..., None]) -> None:
    fake(native=fake_backend("not built"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusedops.layer_norm(torch.randn(2, 8), 8, backend="reference")
        with fusedops.use_backend("reference"):
            fusedops.rms_norm(torch.randn(2, 8), 8)


def test_hollow_package_named_apex_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another project owns that bare name."""
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setattr(apex, "_installed", lambda name: False)
    apex.extension.cache_clear()
    assert fusedops.backends("cpu")["apex"] is not None
    assert fusedops.backends("cuda")["apex"] is not None
    apex.extension.cache_clear()


# ---------------------------------------------------------------- use_backend


def chosen(op: str = "layer_norm") -> str:
    args = (torch.randn(2, 8), 8)
    return fusedops.explain(op, *args).chosen


def test_use_backend_nests_and_restores(fake: Callable[..., None]) -> None:
    fake(native=fake_backend(limits=ALL))
    before = chosen()
    with fusedops.use_backend("reference"):
        assert chosen() == "reference"
        with fusedops.use_backend("native", ops=["layer_norm"]):
            assert chosen() == "native"
            assert chosen("rms_norm") == "reference"
            with fusedops.use_backend(None):
                assert chosen() == before
            assert chosen() == "native"
        assert chosen() == "reference"
    assert chosen() == before


def test_use_backend_as_a_plain_call_stays() -> None:
    fusedops.use_backend("reference")
    assert chosen() == "reference"
    fusedops.use_backend(None)
    assert not dispatch._forced


def test_use_backend_restores_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="mine"), fusedops.use_backend("reference"):
        raise RuntimeError("mine")
    assert not dispatch._forced


def test_use_backend_reaches_calls_seen_before(fake: Callable[..., None]) -> None:
    x = torch.randn(2, 8)
    with fusedops.use_backend("reference"):
        assert isinstance(fusedops.layer_norm(x, 8), torch.Tensor)
    fake(native=fake_backend(limits=ALL))
    with fusedops.use_backend("native"):
        assert fusedops.layer_norm(x, 8) == "served"


def test_argument_beats_use_backend(fake: Callable[..., None]) -> None:
    fake(native=fake_backend("not built"))
    with fusedops.use_backend("native"):
        assert isinstance(fusedops.layer_norm(torch.randn(2, 8), 8, backend="reference"), torch.Tensor)
        with pytest.raises(UnsupportedError):
            fusedops.layer_norm(torch.randn(2, 8), 8)


@pytest.mark.parametrize("ops", [["norm"], "layer_norm", [["layer_norm"]], [None], 3], ids=str)
def test_use_backend_refuses_unknown_ops(ops: object) -> None:
    with pytest.raises(ValueError, match=rf"ops: expected any of layer_norm, rms_norm.*got {re.escape(repr(ops))}"):
        fusedops.use_backend("native", ops=ops)
    assert not dispatch._forced


def test_backward_stays_with_the_backend_of_forward(fake: Callable[..., None]) -> None:
    """The choice may change between forward and backward, which runs in another thread on GPUs."""
    served = []
    module = ModuleType("pair")
    module.unavailable = lambda device_type: None
    module.LIMITS = {"rms_norm": ALL}
    module.rms_norm_fwd = lambda x, weight, eps, offset, dtype: (x.clone(), x.new_ones(len(x)))
    module.rms_norm_bwd = lambda dy, *rest: (served.append("pair"), (dy.clone(), None))[1]
    fake(triton=module)
    x = torch.randn(2, 8, requires_grad=True)
    y = fusedops.rms_norm(x, 8, backend="triton")
    with fusedops.use_backend("reference"):
        y.sum().backward()
    assert served == ["pair"]


# ---------------------------------------------------------------- environment


def test_environment_is_parsed() -> None:
    parsed = config.parse(
        {"FUSEDOPS_BACKEND": "native", "FUSEDOPS_LOGS": "dispatch, fallback", "FUSEDOPS_TABLE": "t.json", "HOME": "/x"}
    )
    assert parsed.forced == {"*": "native"}
    assert parsed.logs == {"dispatch", "fallback"}
    assert parsed.table == "t.json"
    assert not parsed.disabled
    assert set(parsed.given) == {"FUSEDOPS_BACKEND", "FUSEDOPS_LOGS", "FUSEDOPS_TABLE"}
    assert config.parse({"FUSEDOPS_BACKEND": "layer_norm=reference, adamw=triton"}).forced == {
        "layer_norm": "reference",
        "adamw": "triton",
    }
    assert config.parse({"FUSEDOPS_BACKEND": " layer_norm = native ,reference"}).forced == {
        "layer_norm": "native",
        "*": "reference",
    }
    assert config.parse({"FUSEDOPS_DISABLE": "1"}).disabled
    empty = config.parse({"FUSEDOPS_BACKEND": "", "FUSEDOPS_DISABLE": ""})
    assert (empty.forced, empty.disabled, empty.given) == ({}, False, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FUSEDOPS_DISABLE", "yes"), ("FUSEDOPS_BACKEND", "cuda"), ("FUSEDOPS_BACKEND", "layer_norm="),
        ("FUSEDOPS_BACKEND", "layer_norm=natve"), ("FUSEDOPS_BACKEND", "=native"), ("FUSEDOPS_LOGS", "everything"),
        ("FUSEDOPS_BACKEND", "layer_norm=native,layer_norm=reference"), ("FUSEDOPS_BACKEND", "native,triton"),
    ],
)  # fmt: skip
def test_bad_environment_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected .*, got "):
        config.parse({name: value})


def test_environment_names_ops_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.check_forced()
    monkeypatch.setitem(dispatch._forced, "layernorm", "reference")
    with pytest.raises(ValueError, match=r"FUSEDOPS_BACKEND: expected .*layer_norm.*, got layernorm"):
        dispatch.check_forced()


def test_disabled_is_plain_torch(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., None]) -> None:
    from fusedops.ops import _common, norm, norm_reference

    fake(native=fake_backend(limits=ALL))
    off = config.parse({"FUSEDOPS_DISABLE": "1"})
    for module in (dispatch, _common, norm, norm_reference, fusedops.amp):
        monkeypatch.setattr(module, "CONFIG", off)
    x = torch.randn(2, 8, dtype=BF16)
    assert torch.equal(fusedops.layer_norm(x, 8), torch.nn.functional.layer_norm(x, (8,)))
    with torch.autocast("cpu", BF16):
        assert fusedops.layer_norm(x, 8).dtype is F32
        assert fusedops.rms_norm(x, 8).dtype is torch.nn.functional.rms_norm(x, (8,)).dtype
    assert "FUSEDOPS_DISABLE" in str(fusedops.explain("layer_norm", x, 8))


def test_logs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dispatch, "CONFIG", config.parse({"FUSEDOPS_LOGS": "dispatch"}))
    with caplog.at_level(logging.INFO, "fusedops"):
        dispatch.select(CALL, "reference")
    assert "-> reference" in caplog.text


# ---------------------------------------------------------------- compile


def test_traced_calls_are_chosen_as_such(fake: Callable[..., None]) -> None:
    """A backend that can't be traced is passed over; the width is no part of the choice."""
    refusing = Limits(frozenset({F32}), traceable=False)
    fake(native=fake_backend(limits=refusing))
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        torch._dynamo.reset()
        compiled = torch.compile(lambda a: fusedops.layer_norm(a, 8), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), torch.nn.functional.layer_norm(x, (8,)))
    assert fusedops.layer_norm(x, 8) == "served"


def test_compiled_code_notices_use_backend() -> None:
    x = torch.randn(2, 8)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda a: fusedops.layer_norm(a, 8), backend=counter, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        with fusedops.use_backend("reference"):
            first = compiled(x)
            once = counter.frame_count
            compiled(x)
        assert counter.frame_count == once
        if fusedops.backends("cpu")["native"] is None:
            with fusedops.use_backend("native"):
                torch.testing.assert_close(compiled(x), first)
            assert counter.frame_count == once + 1


X = torch.ones(3, 8)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([1, 2], 2), "input: expected a tensor, got list"),
        ((X, 8.0), "normalized_shape: expected an integer or a sequence of them, got 8.0"),
        ((X, (8.0,)), "normalized_shape: expected integers"),
        ((X, None), "normalized_shape: expected an integer or a sequence of them, got None"),
        ((X, 7), "normalized_shape: expected the last dimensions of input"),
        ((X, 8, [1.0] * 8), "weight: expected a tensor or None, got list"),
        ((X, 8, torch.ones(7)), r"weight: expected shape \(8,\), got \(7,\)"),
        ((X, 8, None, 1.0), "bias: expected a tensor or None, got float"),
        ((X, 8, None, None, None), "eps: expected a finite number ≥ 0, got None"),
        ((X, 8, None, None, -1.0), "eps: expected a finite number ≥ 0, got -1.0"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[object, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fusedops.layer_norm(*arguments)


@pytest.mark.parametrize("shape", [8, [8], (8,), torch.Size([8]), torch.tensor(8), range(8, 9)])
def test_any_integers_are_a_shape(shape: object) -> None:
    assert torch.equal(fusedops.layer_norm(X, shape), fusedops.layer_norm(X, 8))
