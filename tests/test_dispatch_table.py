"""Tables of rows: those of a file, which is checked row by row, and the shipped ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dispatch_helpers import CALL

import fusedops
from fusedops import dispatch, dispatch_table
from fusedops.dispatch import Call
from fusedops.registry import OPS

BF16 = torch.bfloat16


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
