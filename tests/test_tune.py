"""The tuner: what it chooses, what it keeps, what it makes of others' files, and that a model is left as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from file_helpers import HOSTILE, finish, kill_everywhere, leaves, mutations, on_a_full_disk, replaced, start
from torch import nn

import fusedops
from fusedops import UnsupportedError, _files, config, dispatch, dispatch_table, machine
from fusedops.cli import main
from fusedops.dispatch import Call
from fusedops.tuning import measure
from fusedops.tuning import model as tuned_model
from fusedops.tuning.table import Measured, Store, make_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RUN = ["tune", "--device", "cpu", "--op", "layer_norm", "--dtype", "fp32", "--shapes", "8x16,64x16"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    dispatch_table.tuned.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replace the measurement: each backend takes the microseconds given. Returns what is measured."""

    def replace_by(seconds: float = 0.0, **times: float | str) -> list[str]:
        now, seen = [0.0], []

        def run(cell: Any, device: torch.device, backends: Sequence[str]) -> Iterator[dict[str, Any]]:
            seen.append(f"{cell.call.op} {cell.dtypes} {cell.size}")
            now[0] += seconds
            for name in backends:
                took = times.get(name, 100.0)
                told = {"status": "FAIL", "reason": took} if isinstance(took, str) else {
                    "status": "ok", "median_us": took, "host_us": 1.0
                }  # fmt: skip
                yield {"backend": name, **told}

        monkeypatch.setattr(measure, "_run", run)
        monkeypatch.setattr(measure, "clock", lambda: now[0])
        return seen

    return replace_by


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


# ---------------------------------------------------------------- what is chosen


@pytest.mark.parametrize(
    ("native", "reference", "order"),
    [
        ((50, 1), (80, 1), ("native", "reference")),
        ((80, 1), (50, 1), ("reference", "native")),
        ((100, 1), (97.5, 1), ("native", "reference")),  # within the margin
        ((100, 1), (96.5, 1), ("reference", "native")),
        ((10, 90), (50, 60), ("reference", "native")),  # the host decides
        ((10, 10), (10, 10), ("native", "reference")),
    ],
)
def test_another_backend_has_to_win_by_the_margin(native: Any, reference: Any, order: tuple[str, ...]) -> None:
    assert a_cell(times={"native": native, "reference": reference}).order() == order


def test_apex_and_what_is_wrong_have_no_place_in_a_row() -> None:
    times = {"native": (90.0, 1.0), "triton": (50.0, 1.0), "reference": (80.0, 1.0), "apex": (1.0, 1.0)}
    assert a_cell(times=times).order() == ("reference", "native")  # triton only interprets there
    swapped = {"reference": (81.0, 1.0), "native": (80.0, 1.0)}  # of a shipped row with plain PyTorch first
    assert a_cell(times=swapped).order() == ("reference", "native")
    gpu = replace(a_cell(times=times), device="cuda")
    assert gpu.order() == ("triton", "native", "reference")
    del times["triton"]
    assert gpu.order() == ("reference", "native")
    assert replace(gpu, times={"apex": (1.0, 1.0)}).order() == ()
    assert make_rows([replace(gpu, times={"apex": (1.0, 1.0)})]) == []


def test_rows_go_to_the_nearer_measurement_and_not_far_beyond() -> None:
    rows = make_rows([a_cell(rows=n) for n in (100, 6400, 400)] + [a_cell(rows=100, hidden=128)])
    assert [(row["hidden"], row["rows"]) for row in rows] == [
        ([64, 64], [25, 200]),
        ([64, 64], [201, 1600]),
        ([64, 64], [1601, 25600]),
        ([128, 128], [25, 400]),
    ]


def test_a_row_matches_the_dtypes_that_were_measured_alone() -> None:
    row = dispatch_table.make_row(make_rows([a_cell()])[0], "", "")
    assert row.matches(call())
    bare = {"input": "float32", "output": "float32"}
    assert not dispatch_table.make_row(make_rows([replace(a_cell(), arguments=bare)])[0], "", "").matches(call())
    for other in (
        call(rows=1023 * 5), call(rows=200), call(hidden=65), call(dtype=BF16), call(weight=BF16),
        replace(call(), dtypes=call().dtypes[:2] + call().dtypes[3:]), replace(call(), op="rms_norm"),
        replace(call(), hidden=None, rows=None, compiling=True),
    ):  # fmt: skip
        assert not row.matches(other)


def test_amp_and_16_bits_throughout_are_told_apart() -> None:
    amp = {"input": "bfloat16", "weight": "float32", "bias": "float32", "output": "bfloat16"}
    row = dispatch_table.make_row(make_rows([replace(a_cell(), arguments=amp)])[0], "", "")
    assert row.matches(call(dtype=BF16))
    assert not row.matches(call(dtype=BF16, weight=BF16))


@pytest.mark.parametrize("bad", [{"input": "float"}, {"inputs": "float32"}, {"input": 3}, [["input", "float32"]], "x"])
def test_arguments_that_no_call_has_are_refused(bad: object) -> None:
    row = {**make_rows([a_cell()])[0], "arguments": bad}
    with pytest.raises(ValueError, match=r"here: arguments: expected torch's dtypes by argument, of .*input.*, got"):
        dispatch_table.make_row(row, "here", "")


# ---------------------------------------------------------------- the command


def test_the_command_measures_and_is_obeyed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN[:3], "--dtype", "fp32,amp", "--shapes", "8x16", "--op", "layer_norm,add_rms_norm,adamw"]) == 0
    shown = capsys.readouterr().out
    for op, dtypes, size in (
        ("layer_norm", "fp32", "8x16"), ("layer_norm", "amp", "8x16"), ("add_rms_norm", "fp32", "8x16"),
        ("add_rms_norm", "amp", "8x16"), ("adamw", "fp32", "1000x1024"),
    ):  # fmt: skip
        line = next(line for line in shown.splitlines() if line.split()[:3] == [op, dtypes, size])
        assert float(line.split()[4]) > 0
    assert f"used from now on: {tuned_file()}" in shown
    text = str(fusedops.explain("layer_norm", torch.ones(8, 16), 16, torch.ones(16), torch.ones(16)))
    assert f"(tuned: {tuned_file()})" in text
    assert "at 8x16 fp32: larger of device and host time in µs" in text
    assert "default" in str(fusedops.explain("layer_norm", torch.ones(8, 17), 17))
    assert f"(tuned: {tuned_file()})" in str(fusedops.explain("adamw", [nn.Parameter(torch.ones(3))]))
    assert main(["report", "--json"]) == 0
    assert str(tuned_file()) in capsys.readouterr().out


def test_what_wins_serves_at_once(home: Path, clock: Callable[..., list[str]]) -> None:
    clock(native=100.0, reference=20.0)
    x, w = torch.ones(8, 16), torch.ones(16)
    before = fusedops.explain("layer_norm", x, 16, w, w).chosen
    assert main(RUN) == 0
    dispatch.forget_tuned()  # another process
    assert fusedops.explain("layer_norm", x, 16, w, w).chosen == "reference"
    assert fusedops.explain("layer_norm", x, 16, w).chosen == before  # not measured


def test_a_wrong_backend_is_named_and_left_out(
    home: Path, clock: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    clock(native="output is off", reference=20.0)
    assert main(RUN) == 1
    shown = capsys.readouterr().out
    assert "native FAIL: output is off" in shown
    assert [row["backends"] for row in json.loads(tuned_file().read_text())["rows"]] == [["reference"]] * 2


def test_parity_is_judged_before_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops.backends import reference

    right = reference.implementation
    monkeypatch.setattr(reference, "implementation", lambda call: lambda *args: right(call)(*args) * 1.001)
    dispatch.cache.clear()
    assert main(RUN) == 1
    rows = json.loads(tuned_file().read_text())["rows"]
    assert not any("reference" in row["backends"] for row in rows)


def test_out_names_the_file_and_how_to_use_it(
    tmp_path: Path, clock: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    clock(reference=20.0)
    path = tmp_path / "folder" / "rows.json"
    assert main([*RUN, "--out", str(path)]) == 0
    assert f"FUSEDOPS_TABLE={path}" in capsys.readouterr().out
    rows = dispatch_table.load(str(path))[:2]
    assert [row.backends[0] for row in rows] == ["reference"] * 2
    assert rows[0].source == str(path)


def test_a_table_that_somebody_wrote_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    for text in ('{"rows": []}', "notes"):
        path.write_text(text)
        assert main([*RUN, "--out", str(path)]) == 2
        assert "expected a table that fusedops tune wrote" in capsys.readouterr().err
        assert path.read_text() == text
    assert main([*RUN, "--out", str(path / "below")]) == 2
    assert "cannot keep the results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--shapes", "8", "expected ROWSxHIDDEN"), ("--shapes", "8x0", "expected ROWSxHIDDEN"),
        ("--shapes", "8x16,", "expected ROWSxHIDDEN"), ("--shapes", "2x3x4", "expected ROWSxHIDDEN"),
        ("--budget", "0", "expected seconds > 0"), ("--budget", "nan", "expected seconds > 0"),
        ("--budget", "soon", "expected seconds > 0"), ("--op", "norm", "expected any of layer_norm"),
        ("--dtype", "fp8", "expected any of bf16"),
    ],
)  # fmt: skip
def test_bad_options_are_named(option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*RUN, option, value])
    assert expected in capsys.readouterr().err


def test_nothing_is_tuned_where_nothing_is_chosen(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusedops.cli import tune

    off = config.parse({"FUSEDOPS_DISABLE": "1"})
    for module in (tune, tuned_model):
        monkeypatch.setattr(module, "CONFIG", off)
    assert main(RUN) == 2
    assert "FUSEDOPS_DISABLE=1" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="FUSEDOPS_DISABLE=1"):
        fusedops.tune(nn.Linear(2, 2), torch.ones(2, 2))


# ---------------------------------------------------------------- budget, resuming, interruption


def test_a_second_run_measures_what_is_new_alone(home: Path, clock: Callable[..., list[str]]) -> None:
    seen = clock()
    assert main(RUN) == 0
    assert seen == ["layer_norm fp32 8x16", "layer_norm fp32 64x16"]
    assert main(RUN) == 0
    assert len(seen) == 2
    assert main([*RUN[:-1], "8x16,64x16,512x16"]) == 0
    assert seen[2:] == ["layer_norm fp32 512x16"]
    assert len(json.loads(tuned_file().read_text())["rows"]) == 3


def test_the_budget_is_kept_and_the_rest_is_named(
    home: Path, clock: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = clock(seconds=10.0)
    shapes = ",".join(f"{8 * 4**i}x16" for i in range(5))
    run = [*RUN[:-1], shapes, "--budget", "35"]
    assert main(run) == 0
    assert len(seen) == 3  # a fourth would end after 40 s
    shown = capsys.readouterr().out
    assert "The budget of 35 s is spent: 2 of 5 cells were not reached, the first layer_norm fp32 512x16" in shown
    assert len(json.loads(tuned_file().read_text())["rows"]) == 3
    assert main(run) == 0
    assert len(seen) == 5
    assert "not reached" not in capsys.readouterr().out


def test_a_table_that_a_killed_run_left_behind_its_cells_is_mended(
    home: Path, clock: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock()
    assert main(RUN) == 0
    tuned_file().unlink()
    assert main(RUN) == 0
    assert len(json.loads(tuned_file().read_text())["rows"]) == 2


def test_a_cell_that_outlasts_the_budget_is_not_kept(home: Path, clock: Callable[..., list[str]]) -> None:
    clock(seconds=100.0)
    assert main([*RUN, "--budget", "50"]) == 0
    assert not tuned_file().exists()
    assert Store(tuned_file(), machine.facts(CPU)).known() == {}


def test_interrupted_it_leaves_sound_files_and_goes_on(tmp_path: Path) -> None:
    shapes = ",".join(f"{2**i}x{width}" for width in (16, 24, 32, 40, 48) for i in range(2, 14))
    code = "import sys; from fusedops.cli import main; sys.exit(main(sys.argv[1:]))"
    out = tmp_path / "rows.json"
    command = [sys.executable, "-c", code, *RUN[:-1], shapes, "--out", str(out)]
    cells = tmp_path / "rows.json.cells.jsonl"
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while running.poll() is None and time.monotonic() < deadline:
        if cells.exists() and len(cells.read_text().splitlines()) >= 3:
            running.send_signal(signal.SIGINT)
            break
        time.sleep(0.01)
    shown, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors
    assert "Interrupted: " in shown
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = len(dispatch_table.load(str(out))) - len(dispatch_table.SHIPPED)
    known = Store(out, machine.facts(CPU)).known()
    assert 2 <= rows <= len(known) < 60


# ---------------------------------------------------------------- files


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


@pytest.mark.parametrize("key", ["name", "torch", "fusedops", "native", "device"])
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
        assert len(caught) == (0 if rows or content == b"" else 1) or json.loads(content)["rows"] == []
    assert outcomes >= {(True, 0), (False, 1)}


def test_what_is_no_file_is_ignored(home: Path) -> None:
    tuned_file().parent.mkdir(parents=True)
    os.mkfifo(tuned_file())
    ignored("expected a regular file")


def test_a_large_file_is_not_read(home: Path) -> None:
    tuned_file().parent.mkdir(parents=True)
    tuned_file().write_bytes(b" " * (5 * _files.MIB))
    ignored("expected at most")


def test_cells_that_are_none_are_measured_anew(home: Path) -> None:
    store = stored(a_cell())
    record = json.loads(store.cells.read_text())
    for at in leaves(record):
        for bad in HOSTILE:
            store.cells.write_text(json.dumps(replaced(record, at, bad)) + "\n")
            for one in store.known().values():
                for row in make_rows([one]):
                    dispatch_table.make_row(row, "", "")
    for content in (b"\xff\xfe\n", b"{\n{}\n", b"[" * 100_000 + b"\n"):
        store.cells.write_bytes(content)
        with pytest.warns(UserWarning, match="earlier measurements are ignored"):
            again = Store(store.table, machine.facts(CPU))
        again.add(a_cell())
        assert len(again.known()) == 1


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
    assert one.order() == ("reference", "native")
    assert asdict(one)["times"]["reference"] == (20.0, 1.0)


# ---------------------------------------------------------------- a model


class Net(nn.Module):
    """Norms of torch's, to be patched; what it keeps in buffers and writes to its parameters has to be undone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LayerNorm(16), nn.LayerNorm(16), nn.RMSNorm(24)
        self.linear, self.drop, self.batch = nn.Linear(16, 24), nn.Dropout(0.5), nn.BatchNorm1d(24)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.steps = self.steps + 1
        self.linear.bias.data.add_(1.0)
        y = self.linear(self.second(self.first(x)))
        y = self.batch(y.flatten(0, 1)).view_as(y)
        y = fusedops.layer_norm(self.drop(self.third(y)), 24, backend="reference")  # named: not the table's business
        return {"logits": y * scale, "ids": torch.arange(3), "more": [y.mean()]}


def everything(model: nn.Module) -> list[Any]:
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*state, *grads, torch.get_rng_state(), *(module.training for module in model.modules())]


def same(before: list[Any], after: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, after, strict=True))


@pytest.fixture
def net() -> Net:
    model = fusedops.patch(Net(), verbose=False)
    model.eval()
    model.drop.train()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    return model


def test_a_models_calls_are_measured_once_each_and_its_state_is_as_before(
    home: Path, net: Net, clock: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = clock(native=100.0, reference=20.0)
    x = torch.randn(4, 5, 16, requires_grad=True)
    grads, steps = [p.grad for p in net.parameters()], net.steps
    before = everything(net)
    report = fusedops.tune(net, x, budget=5)
    assert same(before, everything(net))
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert net.steps is steps
    assert x.grad is None
    assert seen == ["layer_norm fp32 20x16", "rms_norm fp32 20x24"]
    assert [(cell.op, cell.order()[0]) for cell in report.cells] == [
        ("layer_norm", "reference"),
        ("rms_norm", "reference"),
    ]
    assert report.not_reached == ()
    assert report.file == str(tuned_file())
    assert report.before_ms > 0
    assert report.after_ms > 0
    assert capsys.readouterr().out.strip() == str(report)
    assert ("ms saved" in str(report)) == (fusedops.backends("cpu")["native"] is None)  # else nothing changes
    assert fusedops.explain("layer_norm", x, 16, net.first.weight, net.first.bias).chosen == "reference"
    again = fusedops.tune(net, x)
    assert len(seen) == 2
    assert [cell.key for cell in again.cells] == [cell.key for cell in report.cells]
    assert again.before_ms == again.after_ms  # no choice has changed


def test_a_model_is_tuned_for_real(home: Path, net: Net) -> None:
    with torch.autocast("cpu", BF16), torch.no_grad():
        report = fusedops.tune(net, {"x": torch.randn(4, 5, 16), "scale": 2.0})
    assert [cell.op for cell in report.cells] == ["layer_norm", "layer_norm", "rms_norm"]  # the second reads bf16
    dtypes = [(cell.arguments["input"], cell.arguments["output"]) for cell in report.cells]
    assert dtypes == [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")]
    for cell in report.cells:
        assert not any(text.startswith("FAIL") for text in cell.problems.values())
        assert cell.times["reference"][0] > 0
    with torch.autocast("cpu", BF16):
        explained = fusedops.explain("layer_norm", torch.randn(4, 5, 16), 16, net.first.weight, net.first.bias)
    assert explained.row.source == f"tuned: {tuned_file()}"


@pytest.mark.parametrize("residual_dtype", [None, BF16])
def test_residuals_and_their_dtypes_are_recorded(home: Path, residual_dtype: torch.dtype | None) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = fusedops.nn.AddLayerNorm(32, dropout_p=0.1, bias=False, residual_dtype=residual_dtype)

        def forward(self, x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.norm(x, r)

    report = fusedops.tune(Block(), (torch.randn(6, 32), torch.randn(6, 32)))
    (cell,) = report.cells
    assert cell.arguments["residual_out"] == ("bfloat16" if residual_dtype else "float32")
    assert "bias" not in cell.arguments
    assert set(cell.times) == {"reference"} | ({"native"} if fusedops.backends("cpu")["native"] is None else set())


def test_a_budget_too_small_is_told(home: Path, net: Net, clock: Callable[..., list[str]]) -> None:
    clock(seconds=4.0)
    report = fusedops.tune(net, torch.randn(4, 5, 16), budget=5)
    assert [cell.op for cell in report.cells] == ["layer_norm"]
    assert report.not_reached == ("rms_norm fp32 20x24",)
    assert "not reached within the budget: rms_norm fp32 20x24" in str(report)


def test_a_model_without_calls_of_ours(home: Path) -> None:
    report = fusedops.tune(nn.Linear(3, 3), torch.ones(2, 3))
    assert (report.cells, report.file) == ((), None)
    assert "nothing to measure" in str(report)


def test_a_forced_backend_is_not_the_tables_business(home: Path, net: Net) -> None:
    with fusedops.use_backend("reference"):
        assert fusedops.tune(net, torch.randn(4, 5, 16)).cells == ()


class Loss(nn.Module):
    """As Hugging Face's models: an object with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = fusedops.nn.LayerNorm(8), []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        y.register_hook(lambda grad: self.seen.append(grad))
        return type("Output", (), {"loss": (3 * y).sum(), "logits": y})()


def test_a_models_own_loss_is_taken() -> None:
    model = Loss()
    fusedops.warmup(model, torch.randn(2, 8))
    assert torch.equal(model.seen[0], torch.full((2, 8), 3.0))


def test_backward_runs_outside_of_autocast() -> None:
    """As in training, where only forward is within."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Identity.apply(super().forward(x))

    seen: list[bool] = []
    with torch.autocast("cpu", BF16):
        fusedops.warmup(Model(2, 2), torch.ones(2, 2))
    assert seen == [True, False]


def test_warmup_leaves_all_as_it_was(net: Net) -> None:
    before = everything(net)
    for batch in (torch.randn(4, 5, 16), (torch.randn(4, 5, 16), 2.0), {"x": torch.randn(4, 5, 16)}):
        random = torch.get_rng_state()
        before[-1 - len(list(net.modules()))] = random
        assert fusedops.warmup(net, batch) is None
        assert same(before, everything(net))


def test_after_an_error_all_is_as_it_was(net: Net) -> None:
    before = everything(net)
    with pytest.raises(TypeError):
        fusedops.warmup(net, (torch.randn(4, 5, 16).fill_(0), "no number"))
    assert same(before[:-20], everything(net)[:-20])
    assert dispatch.recorder is None


@pytest.mark.parametrize("function", [fusedops.tune, fusedops.warmup], ids=["tune", "warmup"])
def test_bad_arguments_are_named(function: Callable[..., object], home: Path) -> None:
    with pytest.raises(ValueError, match=r"model: expected a module, got 3"):
        function(3, torch.ones(2))
    with pytest.raises(ValueError, match="model: expected a floating-point result with a gradient, got none"):
        function(nn.Identity(), torch.ones(2))
    if function is fusedops.tune:
        for bad in (0, -1, float("nan"), "soon", True):
            with pytest.raises(ValueError, match="tune: budget: expected a finite number > 0"):
                function(nn.Linear(2, 2), torch.ones(2, 2), budget=bad)


# ---------------------------------------------------------------- captures


@pytest.mark.parametrize("function", [fusedops.tune, fusedops.warmup], ids=["tune", "warmup"])
def test_within_a_capture_the_error_names_warmup(
    function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"captured.*fusedops\.warmup\(model, batch\)"):
        function(nn.Linear(2, 2), torch.ones(2, 2))


def test_a_kernel_is_not_compiled_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fusedops.backends.triton import adam_kernels, launch, norm_kernels

    if launch.INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for kernel in (norm_kernels.norm_fwd_kernel, adam_kernels.upload_kernel):
        with pytest.raises(RuntimeError, match=rf"{kernel.__name__} .*fusedops\.warmup\(model, batch\)"):
            kernel._do_compile()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with pytest.raises(TypeError):  # Triton's own, which wants arguments
            kernel._do_compile()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


CAPTURE = """
import torch, fusedops
model = fusedops.nn.LayerNorm(6352).cuda()
x = torch.randn(64, 6352, device="cuda", requires_grad=True)
for p in (*model.parameters(), x):
    p.grad = torch.zeros_like(p)
fusedops.use_backend("triton")

def capture(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph

def refused(work):
    try:
        capture(work)
    except RuntimeError as error:
        told = f"{error} {error.__context__}"  # the end of the capture may complain as well
        print("fusedops.warmup(model, batch)" in told)
    torch.cuda.synchronize()

fusedops.layer_norm(torch.ones(2, 64, device="cuda"), 64)  # Triton itself is loaded

refused(lambda: model(x))
refused(lambda: fusedops.tune(model, x))
fusedops.warmup(model, x)
graph = capture(lambda: model(x).sum().backward())
graph.replay()
torch.cuda.synchronize()
print(torch.equal(model.bias.grad, torch.full_like(model.bias, 64.0)))
"""


@NEEDS_GPU
def test_a_capture_compiles_nothing_and_says_what_does(need_backend: Callable[[str], None]) -> None:
    """In a process of its own, which has compiled nothing."""
    need_backend("triton")
    done = subprocess.run([sys.executable, "-c", CAPTURE], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 3), done.stderr


@NEEDS_GPU
def test_a_model_is_tuned_on_a_gpu(home: Path, need_backend: Callable[[str], None]) -> None:
    need_backend("native")
    model = nn.Sequential(fusedops.nn.LayerNorm(256), nn.Linear(256, 256), fusedops.nn.RMSNorm(256)).cuda()
    x = torch.randn(64, 128, 256, device="cuda")
    before, random = everything(model), torch.cuda.get_rng_state()
    with torch.autocast("cuda", BF16):
        report = fusedops.tune(model, x)
    assert same(before, everything(model))
    assert torch.equal(random, torch.cuda.get_rng_state())
    assert report.not_reached == ()
    for cell in report.cells:
        assert {"native", "triton", "reference"} <= cell.times.keys() | cell.problems.keys()
        assert not any(text.startswith("FAIL") for text in cell.problems.values()), cell.problems
        assert all(0 < device_us < 1e5 and 0 < host_us < 1e5 for device_us, host_us in cell.times.values())
    with torch.autocast("cuda", BF16):
        row = fusedops.explain("layer_norm", x, 256, model[0].weight, model[0].bias).row
    major, minor = torch.cuda.get_device_capability()
    assert row.source.startswith("tuned: ")
    assert row.capability == (10 * major + minor,) * 2


@NEEDS_GPU
def test_the_command_runs_on_a_gpu(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["tune", "--op", "rms_norm,adamw", "--dtype", "amp,fp32", "--shapes", "128x1024,4096x1024", "--budget", "120"]
    assert main(run) == 0, capsys.readouterr().out
    assert "used from now on" in capsys.readouterr().out
    x, w = torch.randn(4096, 1024, device="cuda", dtype=BF16), torch.ones(1024, device="cuda")
    assert fusedops.explain("rms_norm", x, 1024, w).row.source.startswith("tuned: ")
