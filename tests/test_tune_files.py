"""The tuner: what it keeps, and what it makes of others' files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from file_helpers import HOSTILE, finish, kill_everywhere, leaves, mutations, on_a_full_disk, replaced, start
from tune_helpers import CPU, a_cell, call, tuned_file

import fusedops
from fusedops import _files, dispatch, dispatch_table, machine
from fusedops.cli import main
from fusedops.tuning.store import Store
from fusedops.tuning.table import Measured, make_rows, order

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def test_nothing_is_read_or_initialised_at_import(tmp_path: Path) -> None:
    code = (
        "import fusedops, torch; from fusedops.dispatch_table import tuned; before = tuned.cache_info().currsize; "
        "fusedops.layer_norm(torch.ones(2, 4), 4); "
        "print(before, tuned.cache_info().currsize, torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == "0 1 False"


def test_the_default_file_is_the_users_and_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = machine.facts(CPU)
    path = machine.tuned_file(here)
    assert path is not None
    assert path.parent == tmp_path / "fusedops"
    for key in here:
        assert machine.tuned_file({**here, key: "other"}) != path
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert machine.cache_folder() == tmp_path / "home" / ".cache" / "fusedops"


def test_what_is_measured_holds_for_the_cpu_and_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine.facts(CPU)
    assert here == machine.facts(CPU)
    assert (here["name"], here["threads"]) == (machine.cpu_name(), str(torch.get_num_threads()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1234)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO CPU")
    assert machine.facts(CPU) == {**here, "threads": "1234", "instructions": "NO CPU"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(machine, "_driver", lambda: "580.82.07")
    gpu = machine.facts(torch.device("cuda", 0))
    assert (gpu["name"], gpu["cpu"], gpu["driver"]) == ("NVIDIA H200", machine.cpu_name(), "580.82.07")
    assert "threads" not in gpu


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC 12.3.0", "580.82.07"),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  1000.1  x", "1000.1"),
    ],
)
def test_the_driver_is_read_without_a_process(text: str, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert machine._driver() == driver


def stored(*cells: Measured) -> Store:
    store = Store(tuned_file(), machine.facts(CPU))
    for cell in cells:
        store.add(cell)
    dispatch.forget_tuned()
    return store


def ignored(match: str) -> None:
    """Calls are served by the shipped table, after one warning."""
    x = torch.ones(8, 64)
    dispatch.forget_tuned()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            fusedops.layer_norm(x, 64, torch.ones(64), torch.ones(64))
            dispatch.cache.clear()
    (message,) = (str(one.message) for one in caught if "ignored" in str(one.message))
    assert match in message
    assert fusedops.explain("layer_norm", x, 64).row in dispatch_table.SHIPPED


def test_a_tuned_row_stands_behind_the_environments_and_before_the_shipped(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(a_cell())
    assert dispatch.match_row(call()).source == f"tuned: {tuned_file()}"
    assert dispatch.match_row(call(hidden=65)).source == "shipped"
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"rows": [{"ops": [], "device": None, "backends": ["reference"], "why": "mine"}]}))
    monkeypatch.setattr(dispatch, "_rows", dispatch_table.load(str(own)))
    assert dispatch.match_row(call()).source == str(own)


@pytest.mark.parametrize("key", ["name", "threads", "torch", "fusedops", "native", "device"])
def test_another_machines_table_is_ignored(home: Path, key: str) -> None:
    stored(a_cell())
    data = json.loads(tuned_file().read_text())
    data["machine"][key] = "other"
    tuned_file().write_text(json.dumps(data))
    ignored("machine: expected")


def test_another_users_table_is_ignored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(a_cell())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    ignored("expected a file of user 12345")


@pytest.mark.parametrize("backends", [["apex"], ["triton", "native"], ["native", "apex"]])
def test_a_table_with_backends_that_serve_who_asks_alone_is_ignored(home: Path, backends: list[str]) -> None:
    stored(a_cell())
    data = json.loads(tuned_file().read_text())
    data["rows"][0]["backends"] = backends
    tuned_file().write_text(json.dumps(data))
    ignored("expected native, reference on cpu, got")


@pytest.mark.parametrize("device", ["cuda", None])
def test_a_table_with_rows_for_another_device_is_ignored(home: Path, device: str | None) -> None:
    stored(a_cell())
    data = json.loads(tuned_file().read_text())
    data["rows"][0]["device"] = device
    tuned_file().write_text(json.dumps(data))
    ignored("expected native, reference on cpu, got")


def test_broken_and_hostile_tables_are_ignored(home: Path) -> None:
    stored(a_cell(), a_cell(rows=100))
    text = tuned_file().read_text()
    data = json.loads(text)
    made = [*mutations(text, 150)]
    made += [json.dumps(replaced(data, at, bad)).encode() for at in leaves(data) for bad in HOSTILE[:6]]
    outcomes = set()
    for content in made:
        tuned_file().write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = dispatch_table.load_tuned(tuned_file(), machine.facts(CPU))
        outcomes.add((len(rows) > 0, len(caught)))
        assert len(caught) == (0 if rows else 1) or json.loads(content)["rows"] == []
    assert outcomes >= {(True, 0), (False, 1)}


def test_what_is_no_file_is_ignored(home: Path) -> None:
    tuned_file().parent.mkdir(parents=True)
    os.mkfifo(tuned_file())
    ignored("expected a regular file")


def test_a_large_file_is_not_read(home: Path) -> None:
    tuned_file().parent.mkdir(parents=True)
    tuned_file().write_bytes(b" " * (5 * _files.MIB))
    ignored("expected at most")


def test_cells_that_are_none_are_passed_over(home: Path) -> None:
    store = stored(a_cell())
    record = json.loads(store.cells.read_text())
    for at in leaves(record):
        for bad in HOSTILE:
            line = json.dumps(replaced(record, at, bad)) + "\n"
            store.cells.write_text(line)
            known = store.known()
            for one in known.values():
                for row in make_rows([one]):
                    dispatch_table.make_row(row, "", "")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                again = Store(store.table, machine.facts(CPU))
            assert len(caught) == (0 if known or (at == ("machine",) and isinstance(bad, str)) else 1)
            again.write()
            assert store.cells.read_text() == line
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                dispatch_table.load_tuned(store.table, machine.facts(CPU))


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe\n", b"{\n", b"\0\0\n", b"[" * 100_000 + b"\n", b"{}\n", b"notes\n\n", b'{"machine": 3}\n']
)
def test_bad_lines_of_cells_cost_one_warning_and_nothing_else(home: Path, bad: bytes) -> None:
    store = stored(a_cell(), a_cell(rows=100))
    first, second = store.cells.read_bytes().splitlines(keepends=True)
    other = first.replace(machine.digest(machine.facts(CPU)).encode(), b"another")
    content = first + bad + other + bad + second
    store.cells.write_bytes(content)
    count = 2 * bad.count(b"\n")
    told = rf"lines that hold no measurement are ignored \({count}\), the first: .*cells.jsonl:2: "
    with pytest.warns(UserWarning, match=told) as caught:
        again = Store(store.table, machine.facts(CPU))
    assert len(caught) == 1
    assert sorted(one.rows for one in again.known().values()) == [100, 1023]
    again.add(a_cell(rows=7))
    assert store.cells.read_bytes().startswith(content)
    assert len(dispatch_table.load_tuned(store.table, machine.facts(CPU))) == 3


def test_half_a_character_in_a_cell_is_written_as_it_was_read(home: Path) -> None:
    store = stored(a_cell())
    store.cells.write_text(store.cells.read_text().replace("2026-01-01", r"\ud800"))
    Store(store.table, machine.facts(CPU)).write()
    assert len(dispatch_table.load_tuned(store.table, machine.facts(CPU))) == 1


@pytest.mark.parametrize("content", [b"notes", b"\xff\xfe", b'{"mine": 3}', b"a\nb"])
def test_a_file_beside_the_table_that_is_no_cells_is_not_cut(home: Path, content: bytes) -> None:
    store = stored()
    store.cells.write_bytes(content)
    with pytest.raises(ValueError, match="expected cells that fusedops tune wrote, or no file, got"):
        Store(store.table, machine.facts(CPU))
    assert store.cells.read_bytes() == content


@pytest.mark.parametrize("left", [1, 5, 14, 100])
def test_a_cell_that_a_killed_run_left_unfinished_is_cut(home: Path, left: int) -> None:
    store = stored(a_cell())
    line = store.cells.read_bytes()
    store.cells.write_bytes(line + line[:left])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Store(store.table, machine.facts(CPU)).add(a_cell(rows=7))
    assert [json.loads(line)["rows"] for line in store.cells.read_text().splitlines()] == [1023, 7]


def test_another_users_files_are_not_touched(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under ``sudo -E``."""
    store = stored(a_cell())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    files = {path: (path.read_bytes(), path.stat().st_ino) for path in tuned_file().parent.iterdir()}
    run = ["tune", "--device", "cpu", "--op", "layer_norm", "--dtype", "fp32", "--shapes", "8x16"]
    for path in (store.table, store.cells):
        assert main(run) == 2
        assert "expected a file of user 12345" in capsys.readouterr().err
        with pytest.raises(ValueError, match="expected a file of user 12345"):
            Store(store.table, machine.facts(CPU))
        assert {path: (path.read_bytes(), path.stat().st_ino) for path in tuned_file().parent.iterdir()} == files
        path.unlink()
        del files[path]


@pytest.mark.parametrize("time", [10**400, 1e13, 0, -1.0, float("inf"), True])
def test_times_that_are_none_are_measured_anew(home: Path, clock: Callable[..., list[str]], time: Any) -> None:
    seen = clock()
    run = ["tune", "--device", "cpu", "--op", "layer_norm", "--dtype", "fp32", "--shapes", "8x16"]
    assert main(run) == 0
    cells = tuned_file().with_name(f"{tuned_file().name}.cells.jsonl")
    record = json.loads(cells.read_text())
    record["times"]["reference"][0] = time
    cells.write_text(json.dumps(record) + "\n")
    with pytest.warns(UserWarning, match="times: expected pairs of microseconds by backend, got"):
        assert main(run) == 0
    assert len(seen) == 2


def test_cells_of_another_machine_are_left_alone(home: Path) -> None:
    store = stored(a_cell())
    other = Store(store.table, {**machine.facts(CPU), "torch": "9.9"})
    assert other.known() == {}
    other.add(a_cell(rows=7))
    assert len(store.cells.read_text().splitlines()) == 2
    assert [one.rows for one in store.known().values()] == [1023]


def test_killed_anywhere_it_leaves_sound_files(home: Path) -> None:
    store = stored(a_cell(rows=1))
    for number in kill_everywhere(lambda: store.add(a_cell(rows=1000 + len(store.known())))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = dispatch_table.load_tuned(tuned_file(), machine.facts(CPU))
            known = Store(tuned_file(), machine.facts(CPU)).known()
        assert 1 <= len(rows) <= len(known) <= 1 + number
    store.write()
    assert len(dispatch_table.load_tuned(tuned_file(), machine.facts(CPU))) == len(store.known())


@pytest.mark.parametrize("room", [0, 300, 700])
def test_on_a_full_disk_the_old_table_stays(home: Path, room: int) -> None:
    store = stored(a_cell(rows=1))
    before = tuned_file().read_text()
    assert on_a_full_disk(lambda: store.add(a_cell(rows=1000)), room) == 1
    assert tuned_file().read_text() == before
    assert {path.name for path in tuned_file().parent.iterdir()} == {store.table.name, store.cells.name}


def test_two_at_once_add_up(home: Path) -> None:
    def add(first: int) -> None:
        store = Store(tuned_file(), machine.facts(CPU))
        for i in range(12):
            store.add(a_cell(rows=first + i))

    children = [start(lambda first=first: add(first)) for first in (100, 200, 300)]
    assert [finish(child) for child in children] == [0, 0, 0]
    assert len(Store(tuned_file(), machine.facts(CPU)).known()) == 36
    assert len(dispatch_table.load_tuned(tuned_file(), machine.facts(CPU))) == 36


def test_a_table_is_of_all_cells_also_where_another_is_being_written(home: Path, tmp_path: Path) -> None:
    store, begun, write = stored(a_cell(rows=1)), tmp_path / "begun", _files.write_text

    def slowly(path: Path, text: str) -> None:
        begun.touch()
        time.sleep(0.5)
        write(path, text)

    def add() -> None:
        _files.write_text = slowly  # in the child alone
        store.add(a_cell(rows=100))

    child = start(add)
    while not begun.exists():
        time.sleep(0.01)
    store.add(a_cell(rows=200))
    assert finish(child) == 0
    assert len(dispatch_table.load_tuned(tuned_file(), machine.facts(CPU))) == 3


def test_of_two_measurements_of_a_cell_the_later_counts(home: Path) -> None:
    store = stored(a_cell(), a_cell(times={"native": (50.0, 1.0), "reference": (20.0, 1.0)}))
    (one,) = store.known().values()
    assert order([one]) == ("reference", "native")
    assert asdict(one)["times"]["reference"] == (20.0, 1.0)
