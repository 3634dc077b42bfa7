"""Files outlast two processes at once, a full disk, a kill in mid-write, strangers and hostile content.

A forked child does what is tested: an audit hook kills it at the n-th file operation, or a limit on file sizes stands
for the full disk. What is left on the disk is then read by the parent.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fusedops
from fusedops import FallbackWarning, _build, _files, dispatch, dispatch_table, optim
from fusedops.bench import report
from fusedops.dispatch_table import Row

resource = pytest.importorskip("resource", reason="no POSIX system")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

HOSTILE: list[Any] = [None, True, -1, 10**30, 1e308, float("nan"), "", "x", "../../x", [], [[]], {}, {"a": 1}]
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "fcntl.flock", "shutil.rmtree")


def start(work: Callable[[], object]) -> int:
    """Do work in a child; its exit status is 0, or 1 after an OSError."""
    if child := os.fork():
        return child
    status = 2
    try:
        work()
        status = 0
    except OSError:
        status = 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def finish(child: int) -> int:
    """Return a child's exit status, the negative signal where one killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(work: Callable[[], object]) -> Iterator[int]:
    """Kill work at its first file operation, then at its second, and so on until it is done; yield each time."""
    for number in range(1, 500):

        def doomed(number: int = number) -> None:
            seen = 0

            def hook(event: str, _: object) -> None:
                nonlocal seen
                seen += event in FILE_EVENTS
                if seen == number:
                    signal.raise_signal(signal.SIGKILL)

            sys.addaudithook(hook)
            work()

        status = finish(start(doomed))
        assert status in (0, -signal.SIGKILL)
        yield number
        if status == 0:
            assert number > 2, "nothing was interrupted"
            return
    pytest.fail("the work never came to an end")


def on_a_full_disk(work: Callable[[], object], room: int) -> int:
    """Do work where no file may grow beyond so many bytes."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        work()

    return finish(start(limited))


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
       "rows": [0, 99], "capability": [0, 90], "dtypes": ["float32"]}  # fmt: skip


def mutations(text: str, count: int) -> Iterator[bytes]:
    """Texts with a byte changed, a part lost or doubled; always the same."""
    chance = random.Random(0)
    data = text.encode()
    for _ in range(count):
        at, to = sorted(chance.choices(range(len(data)), k=2))
        yield chance.choice(
            [
                data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
                data[:at],
                data[:at] + data[to:],
                data[:to] + data[at:],
            ]
        )


def test_a_broken_table_costs_one_warning(tmp_path):
    file = tmp_path / "table.json"
    ignored = 0
    for content in mutations(json.dumps({"rows": [ROW, ROW]}), 500):
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


# ---------------------------------------------------------------- checkpoints

safetensors_torch = pytest.importorskip("safetensors.torch", reason="the train extra is not installed")

from fusedops.train import checkpoint, session  # noqa: E402
from fusedops.train.checkpoint import CheckpointError  # noqa: E402
from fusedops.train.config import TrainConfig  # noqa: E402
from fusedops.train.data import load_corpus  # noqa: E402

IDENTITY = {"seed": 3}
Parts = tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]


def parts(cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Parts:
    """A small model whose optimizer has stepped once, and a scaler that is in use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "weight_decay": 0.0}]
    optimizer = cls(groups, lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0)


def snapshot(all_parts: Parts) -> Any:
    return copy.deepcopy([part.state_dict() for part in all_parts]), torch.get_rng_state()


def assert_same(now: Any, before: Any) -> None:
    assert type(now) is type(before)
    if isinstance(now, torch.Tensor):
        assert now.dtype == before.dtype
        assert torch.equal(now, before)
    elif isinstance(now, dict | list | tuple):
        assert len(now) == len(before)
        for key in now if isinstance(now, dict) else range(len(now)):
            assert_same(now[key], before[key])
    else:
        assert now == before


def test_a_killed_save_leaves_a_checkpoint(tmp_path):
    own = parts()
    checkpoint.save(tmp_path, 1, *own, IDENTITY)
    found = set()
    for _ in kill_everywhere(lambda: checkpoint.save(tmp_path, 2, *own, IDENTITY)):
        found.add(checkpoint.load(checkpoint.latest(tmp_path), *parts(), IDENTITY))
        if found == {1, 2}:
            break
        checkpoint.save(tmp_path, 1, *own, IDENTITY)
    assert found == {1, 2}
    assert checkpoint.save(tmp_path, 3, *own, IDENTITY) == checkpoint.latest(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"], "leavings of killed processes stay"


def test_a_save_on_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    own = parts()
    path = checkpoint.save(tmp_path, 1, *own, IDENTITY)
    largest = max(file.stat().st_size for file in path.iterdir())
    for room in range(0, largest, largest // 12):
        assert on_a_full_disk(lambda: checkpoint.save(tmp_path, 2, *own, IDENTITY), room) == 1
        assert list(tmp_path.iterdir()) == [path]
        assert checkpoint.load(path, *parts(), IDENTITY) == 1


def load_or_refuse(path: Path, own: Parts, before: Any = None) -> bool:
    """Load; returns whether that was refused, by an error that names the file, and then nothing has changed."""
    try:
        checkpoint.load(path, *own, IDENTITY)
    except CheckpointError as error:
        refusal = str(error)
    else:
        return False
    assert str(path) in refusal
    assert_same(snapshot(own), before)
    return True


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON value are."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*at, key))


def replaced(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    """A copy with one value replaced."""
    if not at:
        return by
    made = copy.copy(value)
    made[at[0]] = replaced(value[at[0]], at[1:], by)
    return made


@pytest.mark.parametrize("cls", [torch.optim.AdamW, optim.AdamW])
def test_a_hostile_description_is_refused_or_harmless(tmp_path, cls):
    path = checkpoint.save(tmp_path, 1, *parts(cls), IDENTITY)
    meta = json.loads((path / "checkpoint.json").read_text())
    own = parts(cls)
    before, refused = snapshot(own), 0
    for at in leaves(meta):
        for value in HOSTILE:
            (path / "checkpoint.json").write_text(json.dumps(replaced(meta, at, value)))
            if load_or_refuse(path, own, before):
                refused += 1
            else:
                own = parts(cls)
                before = snapshot(own)
    assert refused > 300


def test_a_mutilated_description_is_refused_or_harmless(tmp_path):
    path = checkpoint.save(tmp_path, 1, *parts(), IDENTITY)
    own = parts()
    before, refused = snapshot(own), 0
    for content in mutations((path / "checkpoint.json").read_text(), 300):
        (path / "checkpoint.json").write_bytes(content)
        if load_or_refuse(path, own, before):
            refused += 1
        else:
            own = parts()
            before = snapshot(own)
    assert refused > 200


def test_hostile_tensors_are_refused_or_harmless(tmp_path):
    """Also where the checksum fits: who can write the tensors can write the description."""
    path = checkpoint.save(tmp_path, 1, *parts(), IDENTITY)
    file, description = path / "tensors.safetensors", path / "checkpoint.json"
    sound, meta = file.read_bytes(), json.loads(description.read_text())
    header = int.from_bytes(sound[:8], "little")
    chance = random.Random(0)
    contents = [b"", sound[:4], sound[:-1], sound + b"x", b"\xff" * 8 + sound[8:], (2**40).to_bytes(8, "little")]
    contents += [sound[: chance.randrange(len(sound))] for _ in range(20)]
    for _ in range(300):
        at = chance.randrange(8 + header)
        contents.append(sound[:at] + bytes([chance.randrange(256)]) + sound[at + 1 :])
    own = parts()
    before, refused = snapshot(own), 0
    for content in contents:
        file.write_bytes(content)
        description.write_text(json.dumps({**meta, "tensors_sha256": checkpoint._sha256(file)}))
        if load_or_refuse(path, own, before):
            refused += 1
        else:
            own = parts()
            before = snapshot(own)
    assert refused > 250


def test_what_only_looks_like_a_checkpoint_is_left_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "step-00000099").symlink_to(outside)
    (folder / "step-zzz").mkdir()
    (folder / "step-00000098").touch()
    assert checkpoint.latest(folder) is None
    path = checkpoint.save(folder, 1, *parts(), IDENTITY)
    assert checkpoint.latest(folder) == path
    assert checkpoint.save(folder, 2, *parts(), IDENTITY) == checkpoint.latest(folder)
    assert (outside / "file").exists()


# ---------------------------------------------------------------- a run's folder


@pytest.fixture
def plan(tmp_path):
    """A plan that is written, and its text."""
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question:\n" * 200)
    config = TrainConfig("nano", 3, 2, 16, 1e-3, 3, "off", False, "cpu", str(text))
    corpus = load_corpus(text, 16)
    made = session.Plan(tmp_path / "out", config, ("plain",), corpus.sha256)
    made.write()
    return made, corpus


def test_a_second_process_is_kept_out(plan):
    made, corpus = plan
    with _files.locked(made.out / session.LOCK, wait=False) as held:
        assert held
        with pytest.raises(ValueError, match="another process trains in"):
            session.run_variant(made, "plain", corpus)
    assert session.run_variant(made, "plain", corpus)[1]


def test_of_two_processes_that_begin_a_run_one_is_refused(tmp_path, plan):
    made = session.Plan(tmp_path / "new", plan[0].config, ("plain",), "0")

    def write() -> None:
        try:
            made.write()
        except ValueError:
            os._exit(7)

    children = [start(write) for _ in range(4)]
    assert sorted(finish(child) for child in children) == [0, 7, 7, 7]


def test_records_are_on_the_disk_before_the_checkpoint_that_needs_them(plan, monkeypatch):
    made, corpus = plan
    done = []
    fsync, save = os.fsync, checkpoint.save
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.fstat(fd).st_ino) or fsync(fd))
    monkeypatch.setattr(checkpoint, "save", lambda *args: done.append("save") or save(*args))
    session.run_variant(made, "plain", corpus, save_every=2)
    log = (made.out / "metrics.jsonl").stat().st_ino
    assert log in done[: done.index("save")][-1:], "the log is the last thing flushed before"


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "plain/result.json"])
def test_a_damaged_run_is_refused_by_name(plan, name):
    made, corpus = plan
    session.run_variant(made, "plain", corpus)
    file = made.out / name
    text = file.read_text()
    refusals = []

    def attempt(content: bytes) -> None:
        file.write_bytes(content)
        try:
            session.run_variant(session.Plan.read(made.out), "plain", corpus)
        except CheckpointError as error:
            refusals.append(str(error))

    for content in mutations(text, 100):
        attempt(content)
    first = json.loads(text.splitlines()[0] if name.endswith("jsonl") else text)
    for at in leaves(first):
        for value in (None, "x", [], {}, [[]], -1, "../../x"):
            attempt((json.dumps(replaced(first, at, value)) + "\n").encode())
    assert len(refusals) > 60
    assert all(str(file) in refusal for refusal in refusals)
    for other in (made.out, Path("/dev/zero")):
        file.unlink()
        file.symlink_to(other)
        with pytest.raises(CheckpointError, match="expected a regular file"):
            session.run_variant(session.Plan.read(made.out), "plain", corpus)


def test_a_damaged_checkpoint_says_how_to_begin_again(plan):
    made, corpus = plan
    steps = iter((False, True))
    session.run_variant(made, "plain", corpus, stop=lambda: next(steps))
    path = checkpoint.latest(made.out / "plain")
    (path / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"to begin the plain run again, delete {path.parent}"):
        session.run_variant(made, "plain", corpus)


# ---------------------------------------------------------------- results, stamps, state dicts


RECORD = {"op": "layer_norm", "direction": "fwd", "dtype": "fp32", "backend": "native", "shape": [1, 2], "ours": True,
          "status": "ok", "percent_of_copy": 90.0, "gpu": None, "threads": 1, "commit": None, "dirty": None,
          "torch": "2.13.0"}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("op", "backend", "status", "torch") for value in (None, 3, [], {})]
    + [("percent_of_copy", None), ("percent_of_copy", "fast"), ("shape", None), ("shape", "1x2"), ("commit", 3)],
)
def test_foreign_results_are_refused_by_line(tmp_path, key, value):
    file = tmp_path / "results.jsonl"
    report.write_jsonl([RECORD], file)
    assert report.read_jsonl(file) == [RECORD]
    report.write_jsonl([{**RECORD, key: value}], file)
    with pytest.raises(ValueError, match=r"results.jsonl:2: expected a record"):
        report.read_jsonl(file)


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
