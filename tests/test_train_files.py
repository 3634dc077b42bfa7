"""Checkpoints and a run's folder outlast two processes, a full disk, a kill in mid-write and hostile content."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from file_helpers import (
    HOSTILE,
    assert_same,
    finish,
    kill_everywhere,
    leaves,
    mutations,
    on_a_full_disk,
    replaced,
    start,
)
from torch import nn

from fusedops import _files, optim

pytest.importorskip("safetensors.torch", reason="the train extra is not installed")

from safetensors.torch import load_file

from fusedops.train import checkpoint, session
from fusedops.train.checkpoint import CheckpointError
from fusedops.train.config import TrainConfig
from fusedops.train.data import load_corpus

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

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


def used_parts() -> Parts:
    """The same in the midst of a run: the scaler holds tensors by now."""
    own = parts()
    own[2].scale(torch.ones(1))
    return own


def snapshot(all_parts: Parts) -> Any:
    return copy.deepcopy([part.state_dict() for part in all_parts]), torch.get_rng_state()


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


def test_any_byte_may_be_another(tmp_path):
    """Of the tensors, whose checksum is made to fit, and of the description: all is loaded, as it is there, or none."""
    path = checkpoint.save(tmp_path, 1, *parts(), IDENTITY)
    tensors, description = path / "tensors.safetensors", path / "checkpoint.json"
    sound, meta = tensors.read_bytes(), description.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    begin, end = json.loads(sound[8:header])["rng.cpu"]["data_offsets"]
    chance = random.Random(0)
    random_state = [header + begin + at for at in (*range(32), *chance.choices(range(end - begin), k=100))]
    places = [(tensors, at) for at in random_state + chance.choices(range(len(sound)), k=200)]
    places += [(description, at) for at in chance.choices(range(len(meta)), k=200)]
    old = json.loads(meta)["tensors_sha256"].encode()
    own = used_parts()
    before, refused = snapshot(own), set()
    for file, at in places:
        content = bytearray(sound if file is tensors else meta)
        content[at] ^= 1 << chance.randrange(8)
        tensors.write_bytes(content if file is tensors else sound)
        digest = checkpoint._sha256(tensors).encode()
        description.write_bytes(content if file is description else meta.replace(old, digest))
        if load_or_refuse(path, own, before):
            refused.add((file, at))
            continue
        found = load_file(tensors)
        for name, value in own[0].state_dict().items():
            assert_same(value.view(torch.uint8), found[f"model.{name}"].view(torch.uint8))
        assert_same(torch.get_rng_state(), torch.Generator().set_state(found["rng.cpu"]).get_state())
        own = used_parts()
        before = snapshot(own)
    assert {(tensors, at) for at in random_state} & refused, "no random state was refused"
    assert 100 < len(refused) < len(places) - 100


@pytest.mark.parametrize("name", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
@pytest.mark.parametrize("value", [-1, 2.5, 10**30, pytest.param(10**400, id="1e400"), 1e308, math.nan, math.inf])
def test_numbers_that_no_scaler_can_hold_are_refused_before_anything_is_loaded(tmp_path, name, value):
    path = checkpoint.save(tmp_path, 1, *parts(), IDENTITY)
    meta = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(replaced(meta, ("scaler", name), value)))
    own = used_parts()
    if name in ("scale", "growth_factor", "backoff_factor") and value in (2.5, 10**30):
        assert not load_or_refuse(path, own)
    else:
        assert load_or_refuse(path, own, snapshot(own))


def test_state_that_is_told_twice_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, *parts(), IDENTITY)
    meta = json.loads((path / "checkpoint.json").read_text())
    own = used_parts()
    for scalars in ({"0": {"step": 1}}, {"0": {"extra": None}}, {"0": {"extra": True}}, {"x": {}}):
        text = json.dumps(replaced(meta, ("optimizer", "scalars"), scalars))
        (path / "checkpoint.json").write_text(text)
        assert load_or_refuse(path, own, snapshot(own))


def test_tensors_that_never_end_are_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, *parts(), IDENTITY)
    file = path / "tensors.safetensors"
    for make in (os.mkfifo, lambda at: at.symlink_to("/dev/zero"), Path.mkdir):
        file.unlink()
        make(file)
        own = parts()
        assert load_or_refuse(path, own, snapshot(own))
        if file.is_dir():
            break


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


def test_where_a_link_leads_nothing_is_deleted(tmp_path):
    """Another run's folder, say: what is saved lands there, but nothing of what was there goes, and a warning says so.

    Python shows a warning of the same words once.
    """
    other, link = tmp_path / "other", tmp_path / "link"
    link.symlink_to(other)
    other.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = checkpoint.save(link, 1, *parts(), IDENTITY)  # there is nothing older
    (other / "tmp-7-01234567").mkdir()
    for _ in "ab":
        with pytest.warns(UserWarning, match="is a link: what is there is kept, older checkpoints too"):
            checkpoint.save(link, 2, *parts(), IDENTITY)
    with pytest.warns(UserWarning, match=f"^{link} is a link"):
        checkpoint.remove_all(link)
    assert sorted(path.name for path in other.iterdir()) == [first.name, "step-00000002", "tmp-7-01234567"]
    checkpoint.save(other, 3, *parts(), IDENTITY)
    assert [path.name for path in other.iterdir()] == ["step-00000003"]
    checkpoint.remove_all(other)
    assert not list(other.iterdir())


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


def test_records_are_on_the_disk_before_the_result_of_their_run(plan, monkeypatch):
    made, corpus = plan
    done = []
    fsync, write_text = os.fsync, session.write_text
    monkeypatch.setattr(os, "fsync", lambda fd: done.append((os.fstat(fd).st_ino, os.fstat(fd).st_size)) or fsync(fd))
    monkeypatch.setattr(session, "write_text", lambda path, text: done.append(path.name) or write_text(path, text))
    session.run_variant(made, "plain", corpus)
    log = (made.out / "metrics.jsonl").stat()
    assert (log.st_ino, log.st_size) in done[: done.index("result.json")]


@pytest.mark.parametrize("kept", [[], [0, 1], [0, 2], [1, 2], [0, 1, 1], [0, 2, 1], [0, 1, 2, 2], None], ids=str)
def test_a_finished_run_without_all_its_records_is_refused(plan, kept):
    made, corpus = plan
    records, result = session.run_variant(made, "plain", corpus)
    file = made.out / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    if kept is not None:
        file.write_text("".join(lines[step] for step in kept))
    words = (
        rf"{file}: expected the 3 steps of plain .*, got {len(kept or [])} records, \d of them in .*; "
        f"to begin the plain run again, delete {made.out / 'plain'}"
    )
    with pytest.raises(CheckpointError, match=words):
        session.run_variant(made, "plain", corpus)
    shutil.rmtree(made.out / "plain")  # as it says
    again = session.run_variant(made, "plain", corpus)
    assert [r["loss"] for r in again[0]] == [r["loss"] for r in records]
    assert again[1]["validation_loss"] == result["validation_loss"]


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


def test_a_checkpoint_of_more_steps_than_there_are_is_refused(plan):
    made, corpus = plan
    steps = iter((False, True))
    session.run_variant(made, "plain", corpus, stop=lambda: next(steps))
    file = checkpoint.latest(made.out / "plain") / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "step": 10**30}))
    with pytest.raises(CheckpointError, match=rf"expected the {10**30} steps of plain .*, got 2 records, 2 of them"):
        session.run_variant(made, "plain", corpus)


def test_the_end_of_a_run_deletes_its_checkpoints_alone(plan):
    made, corpus = plan
    steps = iter((False, True))
    session.run_variant(made, "plain", corpus, stop=lambda: next(steps))
    folder, outside = made.out / "plain", made.out.parent / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (folder / "step-00000099").symlink_to(outside)
    (folder / "step-by-step").mkdir()
    (folder / "step-00000098").touch()
    assert session.run_variant(made, "plain", corpus)[1]
    left = {path.name for path in folder.iterdir()}
    assert left == {"result.json", "step-00000099", "step-by-step", "step-00000098"}
    assert (outside / "file").exists()
