"""Who serves a call: rows, limits, explicit choices, fallbacks, the environment, tables from files."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fusedops
from fusedops import FallbackWarning, UnsupportedError, backends, config, dispatch, dispatch_table
from fusedops.backends import apex
from fusedops.dispatch import Call, Limits
from fusedops.dispatch_table import Row
from fusedops.registry import OPS

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
CALL = Call("layer_norm", "cpu", -1, (("input", F32), ("weight", BF16), ("output", F32)), 768, 1023)


def fake_backend(reason: str | None = None, limits: Limits | None = None, op: str = "layer_norm") -> ModuleType:
    """A backend that serves an op within limits, or can't run at all."""
    module = ModuleType("fake")
    module.unavailable = lambda device_type: reason
    module.LIMITS = {} if limits is None else {op: limits}
    module.implementation = lambda call: lambda *args: "served"
    return module


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replace backends by fakes."""

    def replace(**modules: ModuleType) -> None:
        for name, module in modules.items():
            monkeypatch.setitem(backends._modules, name, module)
        dispatch.cache.clear()

    yield replace
    dispatch.cache.clear()


ALL = Limits(frozenset({F32, BF16}))


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


# ---------------------------------------------------------------- tables


def table_file(folder: Path, *rows: object) -> str:
    path = folder / "table.json"
    path.write_text(json.dumps({"rows": rows}))
    return str(path)


def test_rows_of_a_file_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table_file(
        tmp_path,
        {"ops": ["layer_norm"], "device": "cpu", "backends": ["reference"], "why": "measured here", "hidden": [0, 8],
         "dtypes": ["float32"]},
    )  # fmt: skip
    rows = dispatch_table.load(path)
    assert rows[1:] == dispatch_table.SHIPPED
    monkeypatch.setattr(dispatch, "_rows", rows)
    assert dispatch.match_row(Call("layer_norm", "cpu", -1, CALL.dtypes, 8, 1)) is rows[0]
    for other in (
        Call("rms_norm", "cpu", -1, CALL.dtypes, 8, 1),
        Call("layer_norm", "mps", 0, CALL.dtypes, 8, 1),
        Call("layer_norm", "cpu", -1, CALL.dtypes, 9, 1),
        Call("layer_norm", "cpu", -1, (("input", BF16),), 8, 1),
        Call("layer_norm", "cpu", -1, CALL.dtypes, compiling=True),  # its size is unknown
    ):
        assert dispatch.match_row(other) is not rows[0]
    text = str(fusedops.explain("layer_norm", torch.randn(1, 8), 8))
    assert "measured here" in text
    assert path in text


GOOD = {"ops": [], "device": "cpu", "backends": ["reference"], "why": "test"}


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_not_json_is_ignored_with_one_warning(text: str, tmp_path: Path) -> None:
    assert "not valid JSON" in ignored(text, tmp_path)


def ignored(text: str, folder: Path) -> str:
    """Return the one warning that a table costs, without its beginning, which names the file."""
    path = folder / "table.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert dispatch_table.load(str(path)) == dispatch_table.SHIPPED
    assert len(caught) == 1
    begin, _, rest = str(caught[0].message).partition(" is ignored: ")
    assert begin == f"fusedops: the dispatch table {path}"
    return rest


@pytest.mark.parametrize(
    "data",
    [[], [1, 2, 3], [GOOD], 3, None, {}, {"rows": 3}, {"rows": {}}, {"rows": {"a": 1}}, {"rows": [GOOD], "version": 1}],
    ids=str,
)
def test_a_table_that_is_no_list_of_rows_is_ignored(data: object, tmp_path: Path) -> None:
    got = re.escape(repr(data)[:80])
    assert re.fullmatch(f"rows: expected .*, got {got}", ignored(json.dumps(data), tmp_path))


@pytest.mark.parametrize("row", [3, None, ["ops"], "ops"], ids=str)
def test_a_row_that_is_none_is_named(row: object, tmp_path: Path) -> None:
    found = ignored(json.dumps({"rows": [GOOD, row]}), tmp_path)
    assert found == f"rows[1]: expected an object, got {row!r}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backends", ["cuda"]), ("backends", []), ("backends", "native"), ("backends", {"native": 1}),
        ("backends", ["native", 1]), ("colour", "red"), ("source", "mine"), ("hidden", [9, 1]), ("hidden", ["a", "b"]),
        ("hidden", 5), ("hidden", [5]), ("hidden", [1, 2, 3]), ("hidden", [True, 5]), ("hidden", [0.0, 1.5]),
        ("hidden", [-5, -1]), ("hidden", None), ("rows", [1, 2, 3]), ("rows", {}), ("capability", 90),
        ("capability", [80, 90]), ("ops", "layer_norm"), ("ops", [1]), ("ops", ["layernorm"]), ("ops", None),
        ("device", ["cpu"]), ("device", "cpuu"), ("device", "cuda:0"), ("device", ""), ("device", 0),
        ("dtypes", "float32"), ("dtypes", ["fp32"]), ("dtypes", ["float"]), ("dtypes", ["torch.float32"]),
        ("dtypes", ["nn"]), ("dtypes", [[]]), ("why", None), ("why", 3),
    ],
)  # fmt: skip
def test_a_row_that_can_match_nothing_is_named(key: str, value: object, tmp_path: Path) -> None:
    found = ignored(json.dumps({"rows": [GOOD, {**GOOD, key: value}]}), tmp_path)
    assert re.match(rf"rows\[1\]: {key}: expected .+, got ", found), found


@pytest.mark.parametrize("key", GOOD)
def test_a_row_without_a_key_is_named(key: str, tmp_path: Path) -> None:
    row = {other: value for other, value in GOOD.items() if other != key}
    found = ignored(json.dumps({"rows": [row]}), tmp_path)
    assert re.fullmatch(rf"rows\[0\]: {key}: expected .+, got a row without it", found), found


@pytest.mark.parametrize(
    "change",
    [
        {"device": None}, {"device": "cuda", "capability": [80, 90]}, {"device": None, "capability": [80, 90]},
        {"device": "xpu"}, {"device": "mps"}, {"device": "privateuseone"}, {"ops": ["adamw", "add_rms_norm"]},
        {"dtypes": ["float32", "bfloat16", "float8_e4m3fn"]}, {"hidden": [0, 0]}, {"rows": [1, 2**70]},
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_any_op_and_device_are_taken(change: dict[str, object], tmp_path: Path) -> None:
    rows = dispatch_table.load(table_file(tmp_path, {**GOOD, **change}))
    assert len(rows) == 1 + len(dispatch_table.SHIPPED)


def test_a_table_may_name_an_op_that_somebody_else_has_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table_file(tmp_path, {**GOOD, "ops": ["theirs"]})
    with pytest.warns(UserWarning, match="ops: expected a list of ops"):
        dispatch_table.load(path)
    monkeypatch.setitem(OPS, "theirs", OPS["layer_norm"])
    assert dispatch_table.load(path)[0].ops == ("theirs",)


def test_the_environments_table_is_read_when_all_ops_are_known(tmp_path: Path) -> None:
    row = {**GOOD, "ops": ["add_rms_norm", "adamw"]}
    code = "import fusedops.dispatch as d; print(d._rows[0].ops, len(d._rows))"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "FUSEDOPS_TABLE": table_file(tmp_path, row)},
    )  # fmt: skip
    assert done.stdout.strip() == f"('add_rms_norm', 'adamw') {1 + len(dispatch_table.SHIPPED)}"


def test_table_that_is_not_text_or_not_there(tmp_path: Path) -> None:
    binary = tmp_path / "table.pickle"
    binary.write_bytes(b"\x80\x04\xff\xfe")
    for path in (binary, tmp_path, tmp_path / "absent.json"):
        with pytest.warns(UserWarning, match="is ignored"):
            assert dispatch_table.load(str(path)) == dispatch_table.SHIPPED


def test_every_shipped_call_ends_in_plain_torch() -> None:
    """The last row matches everything, and reference stands last in every shipped row."""
    assert all(row.backends[-1] == "reference" and row.why for row in dispatch_table.SHIPPED)
    assert dispatch_table.SHIPPED[-1].matches(Call("anything", "privateuseone", 0, (("input", torch.int8),)))


def test_apex_serves_only_who_asks_for_it() -> None:
    """Its LayerNorm may be off by several times our bound."""
    assert not any("apex" in row.backends for row in dispatch_table.SHIPPED)


# ---------------------------------------------------------------- explain


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


@pytest.mark.parametrize("op", OPS)
def test_explain_says_what_select_does(op: str) -> None:
    rows = ["input", *OPS[op].like_input]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        explanation = fusedops.explain(op, *(torch.randn(2, 8) for _ in rows), 8)
        assert dispatch.select(explanation.call).backend == explanation.chosen


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
