"""Files outlast two processes at once, a full disk, a kill in mid-write, strangers and hostile content."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from file_helpers import HOSTILE, assert_same, finish, kill_everywhere, mutations, on_a_full_disk, start
from torch import nn

import fusedops
from fusedops import FallbackWarning, _build, _files, dispatch, dispatch_table, optim
from fusedops.bench import report
from fusedops.dispatch_table import Row

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


# ---------------------------------------------------------------- the helpers


def test_a_kill_leaves_the_old_content_or_the_new(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    for _ in kill_everywhere(lambda: _files.write_text(file, "new")):
        assert file.read_text() in ("old", "new")
    assert file.read_text() == "new"


@pytest.mark.parametrize("room", [0, 1, 4096, 8191])
def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path, room):
    file = tmp_path / "file"
    file.write_text("old")
    assert on_a_full_disk(lambda: _files.write_text(file, "x" * 8192), room) == 1
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_reader_never_sees_a_part(tmp_path):
    file = tmp_path / "file"
    texts = {letter: letter * 100_000 for letter in "abc"}
    file.write_text(texts["a"])

    def write(letter: str) -> None:
        for _ in range(20):
            _files.write_text(file, texts[letter])

    children = [start(lambda letter=letter: write(letter)) for letter in texts]
    for _ in range(200):
        assert _files.read_text(file) in texts.values()
    assert [finish(child) for child in children] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_is_replaced_not_followed(tmp_path):
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_text("not ours")
    link.symlink_to(other)
    _files.write_text(link, "new")
    assert other.read_text() == "not ours"
    assert link.read_text() == "new"
    assert not link.is_symlink()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755, 0o777, 0o444])
def test_a_file_keeps_its_permissions(tmp_path, mode):
    """Also those that the umask would take."""
    file = tmp_path / "file"
    file.touch()
    file.chmod(mode)
    _files.write_text(file, "new")
    assert file.stat().st_mode & 0o7777 == mode
    assert file.read_text() == "new"


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_a_new_file_has_what_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for name in ("file", "link"):
            _files.write_text(tmp_path / name, "new")
            assert (tmp_path / name).lstat().st_mode & 0o7777 == 0o666 & ~umask
    finally:
        os.umask(before)


def test_a_private_file_is_at_no_time_open_to_others(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o600)
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(os.fstat(fd).st_mode & 0o777) or fsync(fd))
    _files.write_text(file, "new")
    assert seen[0] == 0o600


def test_what_is_no_file_is_not_replaced(tmp_path):
    for make in (os.mkfifo, os.mkdir):
        there = tmp_path / make.__name__
        make(there)
        with pytest.raises(OSError, match="expected a regular file"):
            _files.write_text(there, "new")
        assert there.exists()
        assert not there.is_file()
    assert len(list(tmp_path.iterdir())) == 2


def test_links_are_removed_not_followed(tmp_path):
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    (kept / "inner").mkdir(parents=True)
    (kept / "inner" / "file").touch()
    folder.mkdir()
    (folder / "link").symlink_to(kept)
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "link", "dangling", "nothing"):
        _files.remove(tmp_path / name)
        assert not os.path.lexists(tmp_path / name)
    assert (kept / "inner" / "file").exists()


def test_a_new_folder_takes_the_place_of_a_link_and_leaves_strangers_alone(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    names = ["tmp-mine", "tmp-1", "tmp-1-0123456789", "tmp-7-01234567"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "tmp-8-01234567").symlink_to(elsewhere)
    for target in (elsewhere, tmp_path / "nowhere"):
        (tmp_path / "target").symlink_to(target)
        with _files.new_folder(tmp_path / "target") as folder:
            (folder / "new").touch()
        assert not (tmp_path / "target").is_symlink()
        assert [path.name for path in (tmp_path / "target").iterdir()] == ["new"]
        _files.remove(tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["elsewhere", *names[:3]])
    assert (elsewhere / "file").exists()


def test_processes_append_side_by_side(tmp_path):
    file = tmp_path / "lines"

    def append(who: int) -> None:
        for i in range(50):
            _files.append_records(file, [{"who": who, "i": i, "text": "x" * 200}])

    assert [finish(child) for child in [start(lambda who=who: append(who)) for who in range(4)]] == [0] * 4
    found = [record for _, record in _files.read_records(file)]
    for who in range(4):
        assert [record["i"] for record in found if record["who"] == who] == list(range(50))


def test_a_killed_append_costs_its_own_lines_alone(tmp_path):
    file = tmp_path / "lines"
    _files.append_records(file, [{"i": 0}])
    chance = random.Random(0)

    def append_for_ever() -> None:
        while True:
            _files.append_records(file, [{"i": i, "text": "x" * 100_000} for i in (1, 2, 3)])

    for _ in range(10):
        child = start(append_for_ever)
        time.sleep(chance.uniform(0.005, 0.05))
        os.kill(child, signal.SIGKILL)
        finish(child)
        _files.append_records(file, [{"i": 4}])
        found = [record["i"] for _, record in _files.read_records(file)]
        assert found[0] == 0
        assert found[-1] == 4
    assert 1 in found


@pytest.mark.parametrize("room", [0, 9, 20, 40])
def test_a_full_disk_keeps_the_lines_there_are(tmp_path, room):
    file = tmp_path / "lines"
    _files.append_records(file, [{"i": 0}])
    before = file.read_bytes()
    assert on_a_full_disk(lambda: _files.append_records(file, [{"i": i} for i in range(1, 9)]), room) == 1
    assert file.read_bytes() == before


def test_an_unfinished_line_is_cut_and_a_finished_one_kept(tmp_path):
    file = tmp_path / "lines"
    file.write_text('{"i": 0}\n{"i": ')
    assert [record for _, record in _files.read_records(file)] == [{"i": 0}]
    _files.append_records(file, [{"i": 1}])
    assert file.read_text() == '{"i": 0}\n{"i": 1}\n'
    file.write_text('{"i": 0}\n{"i": 1}')  # by an editor
    assert [record for _, record in _files.read_records(file)] == [{"i": 0}, {"i": 1}]
    _files.append_records(file, [{"i": 2}])
    assert [record["i"] for _, record in _files.read_records(file)] == [0, 1, 2]
    file.write_text("x" * 10_000)
    _files.append_records(file, [{"i": 3}])
    assert [record["i"] for _, record in _files.read_records(file)] == [3]
    file.write_text('{"i": 0}\n{"i": \n{"i": 2}\n')
    with pytest.raises(ValueError, match=r"lines:2: not valid JSON"):
        list(_files.read_records(file))


def test_what_is_no_sound_file_is_refused_at_once(tmp_path):
    pipe, large, binary, deep = (tmp_path / name for name in ("pipe", "large", "binary", "deep"))
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(2 * _files.MIB)
    binary.write_bytes(b"\x80\x04\x95\xff")
    deep.write_text("[" * 200_000)
    for path, message in (
        (pipe, "expected a regular file"),
        (Path("/dev/zero"), "expected a regular file"),
        (tmp_path, "expected a regular file"),
        (large, "at most 1,048,576 bytes, got 2,097,152"),
        (binary, "not UTF-8"),
        (deep, "nested too deeply"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            _files.read_json(path, most=_files.MIB)
        assert str(path) in str(error.value)


def test_a_lock_is_had_by_one_and_ends_with_its_process(tmp_path):
    with _files.locked(tmp_path / "lock", wait=False) as first, _files.locked(tmp_path / "lock", wait=False) as second:
        assert (first, second) == (True, False)

    def hold() -> None:
        with _files.locked(tmp_path / "lock", wait=True):
            (tmp_path / "held").touch()
            time.sleep(60)

    child = start(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with _files.locked(tmp_path / "lock", wait=False) as held:
        assert not held
    os.kill(child, signal.SIGKILL)
    finish(child)
    with _files.locked(tmp_path / "lock", wait=False) as held:
        assert held


# ---------------------------------------------------------------- dispatch tables

ROW = {"ops": ["layer_norm"], "device": "cpu", "backends": ["reference"], "why": "measured", "hidden": [0, 8],
       "rows": [0, 99], "dtypes": ["float32"]}  # fmt: skip


def test_a_broken_table_costs_one_warning(tmp_path):
    file = tmp_path / "table.json"
    ignored = 0
    for content in mutations(json.dumps({"rows": [ROW, {**ROW, "device": None, "capability": [0, 90]}]}), 500):
        file.write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = dispatch_table.load(str(file))
        assert rows[-len(dispatch_table.SHIPPED) :] == dispatch_table.SHIPPED
        if caught:
            assert rows == dispatch_table.SHIPPED
            assert len(caught) == 1
            assert str(file) in str(caught[0].message)
            ignored += 1
        for row in rows:  # what was taken can be asked
            row.matches(dispatch.Call("layer_norm", "cpu", -1, (("input", torch.float32),), 8, 1))
    assert 300 < ignored < 500


@pytest.mark.parametrize("key", ROW)
@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_table_of_another_kind_is_taken_or_ignored(tmp_path, key, value):
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"rows": [{**ROW, key: value}]}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = dispatch_table.load(str(file))
    for row in rows:
        row.matches(dispatch.Call("layer_norm", "cpu", -1, (("input", torch.float32),), 8, 1))


def test_a_table_that_never_ends_or_may_not_be_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.warns(UserWarning, match=f"{path} is ignored: .*expected a regular file"):
            assert dispatch_table.load(str(path)) == dispatch_table.SHIPPED

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="is ignored: .*Permission denied"):
        assert dispatch_table.load("table.json") == dispatch_table.SHIPPED


def test_a_row_of_backends_that_are_not_here_is_passed_by(monkeypatch):
    row = Row((), "cpu", ("apex",), "of another machine", source="table.json")
    monkeypatch.setattr(dispatch, "_rows", (row, *dispatch_table.SHIPPED))
    dispatch.cache.clear()
    x = torch.randn(2, 8)
    with pytest.warns(FallbackWarning, match=r"layer_norm: the row apex \(table.json\) is passed by: apex: ") as caught:
        y = fusedops.layer_norm(x, 8)
    assert len([w for w in caught if "passed by" in str(w.message)]) == 1
    torch.testing.assert_close(y, nn.functional.layer_norm(x, (8,)))
    assert fusedops.explain("layer_norm", x, 8).row in dispatch_table.SHIPPED


# ---------------------------------------------------------------- results, stamps, state dicts


RECORD = {"op": "layer_norm", "direction": "fwd", "dtype": "fp32", "backend": "native", "shape": [1, 2], "ours": True,
          "status": "ok", "percent_of_copy": 90.0, "copy_us": 9.0, "median_us": 10.0, "q1_us": 9.9, "q3_us": 10.2,
          "gpu": None, "cpu": "C", "threads": 1, "commit": None, "dirty": None, "torch": "2.13.0"}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("op", "backend", "status", "torch") for value in (None, 3, [], {})]
    + [("percent_of_copy", None), ("percent_of_copy", "fast"), ("shape", None), ("shape", "1x2"), ("commit", 3)]
    + [("median_us", 0), ("copy_us", None), ("q1_us", float("nan")), ("q3_us", "10")],
)
def test_foreign_results_are_refused_by_line(tmp_path, key, value):
    file = tmp_path / "results.jsonl"
    report.write_jsonl([RECORD], file)
    assert report.read_jsonl(file) == [RECORD]
    report.write_jsonl([{**RECORD, key: value}], file)
    with pytest.raises(ValueError, match=r"results.jsonl:2: expected a record"):
        report.read_jsonl(file)


def _draw(what: str, folder: Path) -> Path:
    """Draw a picture as the commands do; return its file."""
    if what == "speeds":
        return report.draw([RECORD], folder)[0]
    from fusedops.train import plots

    result = {"validation_loss": 1.0, "ms": {**dict.fromkeys(plots.PHASES, 1.0), "step": 3.0}}
    if what == "loss":
        plots.plot_loss({"fused": [{"step": 0, "loss": 1.0}]}, {"fused": result}, "title", folder / "loss.png")
    else:
        plots.plot_steps({"fused": result}, "title", folder / "steps.png")
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("what", ["speeds", "loss", "steps"])
def test_a_picture_on_a_full_disk_leaves_the_one_there_was(tmp_path, what):
    pytest.importorskip("matplotlib", reason="the cli extra is not installed")
    file = _draw(what, tmp_path)
    before = file.read_bytes()
    assert before.startswith(b"\x89PNG")
    assert before.endswith(b"IEND\xaeB`\x82")
    assert on_a_full_disk(lambda: _draw(what, tmp_path), len(before) // 2) == 1
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("stamp", [None, [], "x", {}, {"torch": 5, "archs": "90", "cuda": None}, {"torch": ["2"]}])
def test_a_foreign_stamp_breaks_nothing(monkeypatch, stamp):
    module = ModuleType("fusedops._build_info")
    module.STAMP = stamp
    monkeypatch.setitem(sys.modules, "fusedops._build_info", module)
    found = _build.read_stamp()
    assert found == (_build.new_stamp() if isinstance(stamp, dict) else None)
    if found is not None:
        assert _build.misfit(found, "2.13.0", found["python"])


OPTIONS = [
    {},
    {"amsgrad": True},
    {"master_weights": True},
    {"state_dtype": torch.float32, "max_grad_norm": 1.0},
    {"bf16_stochastic_round": True, "seed": 7},
    {"kahan_sum": True},
]


@pytest.mark.filterwarnings("ignore:.*round.* away")
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_state_dicts_need_no_pickled_code(tmp_path, cls, options):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 5).bfloat16()
        return model, cls(model.parameters(), lr=0.1, **options)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    scaler = fusedops.amp.GradScaler("cpu")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(saved, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    other, resumed = make()
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    fusedops.amp.GradScaler("cpu").load_state_dict(loaded["scaler"])
    step(model, optimizer)
    step(other, resumed)
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
