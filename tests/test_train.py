"""`fusedops train`: data, loop, checkpoints, interruption, and the whole command on a tiny run."""
# ruff: noqa: E402 - the imports wait for the extras, without which this file is skipped

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
safetensors_torch = pytest.importorskip("safetensors.torch")

from fusedops import _files
from fusedops.cli import main
from fusedops.train import checkpoint, loop
from fusedops.train import config as train_config
from fusedops.train.checkpoint import CheckpointError
from fusedops.train.config import AMP_DTYPES, TrainConfig, check_batch, default_config, least_bytes
from fusedops.train.data import DataError, load_corpus, training_batch, validation_batches
from fusedops.train.loop import VARIANTS, learning_rate, prepare
from fusedops.train.meter import Clock, EnergyMeter
from fusedops.train.model import GPT, MODELS
from fusedops.train.session import Plan, run_variant

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
WORDS = "the quick brown fox jumps over the lazy dog and finds nothing there but autumn leaves. "


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{i} {WORDS}" for i in range(500)))
    return file


def make_config(text, **changes):
    values = {"model": "nano", "steps": 8, "batch": 2, "seq": 32, "lr": 1e-3, "seed": 3, "amp": "off", "compile": False}
    return TrainConfig(**{**values, "device": "cpu", "data": str(text), **changes})


def make_plan(out, text, **changes):
    config = make_config(text, **changes)
    corpus = load_corpus(config.data, config.seq)
    plan = Plan(out, config, VARIANTS, corpus.sha256)
    plan.write()
    return plan, corpus


def losses(records):
    return [record["loss"] for record in records]


class TestData:
    def test_the_default_is_the_standard_library_always_the_same(self):
        first, second = load_corpus(None, 128), load_corpus(None, 128)
        assert len(first.train) > 1_000_000
        assert first.sha256 == second.sha256
        assert 0.04 < len(first.validation) / len(first.train) < 0.06

    def test_the_tail_of_every_file_is_validation(self, tmp_path):
        for name, byte in (("a", b"a"), ("b", b"b")):
            (tmp_path / name).write_bytes(byte * 95 + byte.upper() * 5)
        (tmp_path / "binary").write_bytes(b"\0" * 100)
        (tmp_path / ".hidden").write_bytes(b"h" * 100)
        corpus = load_corpus(tmp_path, 4)
        assert bytes(corpus.train.tolist()) == b"a" * 95 + b"b" * 95
        assert bytes(corpus.validation.tolist()) == b"AAAAABBBBB"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "does not exist"),
            (b"", "no text in"),
            (b"x" * 100, "validation split .* has 5 bytes, expected at least 33"),
        ],
    )
    def test_errors_name_the_path_and_what_is_wrong(self, tmp_path, content, message):
        file = tmp_path / "some.txt"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(DataError, match=message) as error:
            load_corpus(file, 32)
        assert str(file) in str(error.value)

    def test_batches_depend_on_seed_and_step_alone(self, text):
        corpus = load_corpus(text, 32)
        first = training_batch(corpus, 1, 5, 4, 32)
        torch.rand(3)
        assert torch.equal(first, training_batch(corpus, 1, 5, 4, 32))
        assert first.shape == (4, 33)
        assert not torch.equal(first, training_batch(corpus, 1, 6, 4, 32))
        assert not torch.equal(first, training_batch(corpus, 2, 5, 4, 32))

    def test_the_last_window_fits_exactly(self, tmp_path):
        file = tmp_path / "t"
        file.write_bytes(bytes(range(1, 101)) * 7)
        corpus = load_corpus(file, 34)  # 35 bytes of validation: one window
        (only,) = validation_batches(corpus, 20, 4, 34)
        assert torch.equal(only[0], corpus.validation)

    def test_validation_batches_are_all_of_one_size(self, text):
        batches = list(validation_batches(load_corpus(text, 32), 20, 5, 32))
        assert {batch.shape for batch in batches} == {(5, 33)}
        assert len(batches) == 14


class TestModelAndConfig:
    def test_sizes_are_gpt2s(self):
        with torch.device("meta"):
            count = sum(p.numel() for p in GPT(MODELS["124M"]).parameters())
        assert count == 124_439_808 + 47 * 768  # GPT-2 small's own count, its vocabulary padded by 47

    def test_the_model_is_causal(self):
        torch.manual_seed(0)
        model = GPT(MODELS["nano"])
        tokens = torch.randint(256, (1, 16))
        changed = tokens.clone()
        changed[0, 9] += 1
        same = torch.isclose(model(tokens), model(changed), atol=1e-6).all(-1)[0]
        assert same.tolist() == [True] * 9 + [False] * 7

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("model", "9B"),
            ("amp", "fp8"),
            ("steps", 0),
            ("steps", 1_000_001),
            ("steps", "8"),
            ("batch", -1),
            ("batch", 2.5),
            ("batch", 2**63),
            ("seq", 257),
            ("seq", True),
            ("lr", 0.0),
            ("lr", float("nan")),
            ("seed", -1),
            ("seed", 2**64),
        ],
    )
    def test_bad_values_are_named(self, text, field, value):
        with pytest.raises(ValueError, match=f"{field}: "):
            make_config(text, **{field: value})

    def test_a_batch_that_cannot_be_is_refused(self, text, monkeypatch):
        config = make_config(text, batch=10)
        check_batch(config, 10 * 32)
        with pytest.raises(ValueError, match=r"batch: expected at most 9, the windows of 32 bytes .* holds, got 10"):
            check_batch(config, 10 * 32 - 1)
        monkeypatch.setattr(train_config, "_memory", lambda device: 3 * least_bytes(config) + 1)
        with pytest.raises(ValueError, match="batch: expected at most 3, the sequences that memory holds, got 10"):
            check_batch(config, 10**9)

    @pytest.mark.parametrize("amp", ["bf16", "off"])
    def test_memory_is_not_overestimated(self, text, amp):
        """Autograd keeps more for backward, weights aside, than a batch is said to need at least; but not far more."""
        config = make_config(text, amp=amp, batch=8)
        job, kept = prepare(config, "fused"), {}
        weights = sum(p.nbytes for p in job.model.parameters())
        tokens = torch.randint(256, (config.batch, config.seq))

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", AMP_DTYPES[amp], enabled=amp != "off"),
        ):
            loss = job.forward(tokens, tokens)
        found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        assert loss.requires_grad
        assert config.batch * least_bytes(config) < found < 4 * config.batch * least_bytes(config) + weights

    def test_learning_rate_warms_up_and_decays(self, text):
        config = make_config(text, steps=100, lr=1.0)
        rates = [learning_rate(config, step) for step in range(100)]
        assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[-1] == pytest.approx(0.1, abs=1e-3)


class TestLoop:
    def test_both_runs_start_from_equal_weights(self, text):
        plain, fused = (prepare(make_config(text), variant) for variant in VARIANTS)
        for p, q in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
            assert torch.equal(p, q)

    @pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
    def test_both_runs_learn_the_same(self, tmp_path, text, amp):
        plan, corpus = make_plan(tmp_path / "out", text, steps=12, amp=amp)
        curves = []
        for variant in VARIANTS:
            records, result = run_variant(plan, variant, corpus)
            assert result["validation_loss"] < 4.6 < records[0]["loss"]
            curves.append(torch.tensor(losses(records)))
        torch.testing.assert_close(*curves, rtol=0, atol=1e-4 if amp == "off" else 0.05)

    def test_a_loss_that_is_not_finite_is_recorded_as_none(self, text):
        config = make_config(text, steps=1)
        job = prepare(config, "plain")
        with torch.no_grad():
            job.model.norm.weight.fill_(float("nan"))
        records = []
        loop.train(job, config, load_corpus(text, 32), EnergyMeter(CPU), records.append)
        assert records[0]["loss"] is None
        assert json.loads(json.dumps(records, allow_nan=False))

    def test_figures_are_medians_after_the_warm_up(self, text):
        config = make_config(text, steps=5, batch=2, seq=32)
        ms = [1000, 1, 2, 9, 3]
        records = [
            {"timed": i > 0, "loss": 1.0, "forward_ms": m, "backward_ms": m, "optimizer_ms": m}
            for i, m in enumerate(ms)
        ]
        result = loop.summarise(config, records, [1.0, 2.0], None, None)
        assert result["ms"] == {"forward": 2.5, "backward": 2.5, "optimizer": 2.5, "step": 7.5}
        assert result["tokens_per_s"] == pytest.approx(64 / 7.5e-3)
        assert result["validation_loss"] == 1.5
        assert (result["steps"], result["timed_steps"]) == (5, 4)

    def test_nothing_is_measured_that_cannot_be(self):
        energy = EnergyMeter(CPU)
        energy.start()
        energy.stop(5)
        assert energy.joules_per_step() is None
        clock = Clock(CPU)
        begin = clock.now()
        time.sleep(0.02)
        assert clock.milliseconds(begin, clock.now()) >= 20

    def test_energy_is_summed_over_windows_of_two_seconds_at_least(self, monkeypatch):
        energy = EnergyMeter(CPU)
        readings = iter([(10.0, 0.0), (310.0, 1.0), (400.0, 5.0), (700.0, 6.5)])
        monkeypatch.setattr(energy, "_counter", lambda: 0)
        monkeypatch.setattr(energy, "_read", lambda: next(readings))
        energy.start()
        energy.stop(10)
        assert energy.joules_per_step() is None
        energy.start()
        energy.stop(20)
        assert energy.joules_per_step() == pytest.approx(600 / 30)


def edit(path, change):
    """Change the JSON of a checkpoint."""
    meta = json.loads((path / "checkpoint.json").read_text())
    change(meta)
    (path / "checkpoint.json").write_text(json.dumps(meta))


def retensor(path, change):
    """Rewrite the tensor file, with a checksum that fits."""
    tensors = safetensors_torch.load_file(path / "tensors.safetensors")
    change(tensors)
    safetensors_torch.save_file(tensors, path / "tensors.safetensors")
    digest = checkpoint._sha256(path / "tensors.safetensors")
    edit(path, lambda meta: meta.update(tensors_sha256=digest))


def truncate(path, name):
    """Keep the first half of a file, as a full disk would."""
    os.truncate(path / name, (path / name).stat().st_size // 2)


# name → (how a checkpoint is damaged, what the refusal says)
DAMAGE = {
    "tensors truncated": (lambda p: truncate(p, "tensors.safetensors"), "truncated or changed"),
    "tensors missing": (lambda p: (p / "tensors.safetensors").unlink(), "cannot be read"),
    "json truncated": (lambda p: truncate(p, "checkpoint.json"), "not valid JSON"),
    "json missing": (lambda p: (p / "checkpoint.json").unlink(), "no checkpoint to be read"),
    "foreign json": (lambda p: (p / "checkpoint.json").write_text('{"a": 1}'), "not a checkpoint of"),
    "json list": (lambda p: (p / "checkpoint.json").write_text("[]"), "not a checkpoint of"),
    "newer version": (lambda p: edit(p, lambda m: m.update(version=2)), "version 2, expected 1"),
    "field missing": (lambda p: edit(p, lambda m: m.pop("scaler")), "scaler missing"),
    "step of another kind": (lambda p: edit(p, lambda m: m.update(step="3")), "damaged, step is not what"),
    "identity of another kind": (lambda p: edit(p, lambda m: m.update(identity=[])), "damaged, identity is not what"),
    "optimizer of another kind": (lambda p: edit(p, lambda m: m.update(optimizer={})), "damaged, optimizer is not"),
    "other run": (
        lambda p: edit(p, lambda m: m["identity"].update(seed=4)),
        "seed is 4, expected 3",
    ),
    "other groups": (
        lambda p: edit(p, lambda m: m["optimizer"]["param_groups"].pop()),
        "parameter groups",
    ),
    "tensor missing": (
        lambda p: retensor(p, lambda t: t.pop("model.norm.bias")),
        "norm.bias on one side",
    ),
    "tensor too many": (
        lambda p: retensor(p, lambda t: t.update(x=torch.ones(1))),
        "unexpected tensor",
    ),
    "other shape": (
        lambda p: retensor(p, lambda t: t.update({"model.norm.bias": torch.ones(7)})),
        r"norm.bias is \(7,\) torch.float32, expected \(128,\)",
    ),
    "other dtype": (
        lambda p: retensor(p, lambda t: t.update({"model.norm.bias": torch.ones(128).half()})),
        "float16",
    ),
    "state missing": (
        lambda p: retensor(p, lambda t: t.pop("optimizer.3.exp_avg")),
        "lacks exp_avg",
    ),
    "state of other shape": (
        lambda p: retensor(p, lambda t: t.update({"optimizer.3.exp_avg": torch.ones(5)})),
        "fits no parameter",
    ),
    "state of no parameter": (
        lambda p: retensor(p, lambda t: t.update({"optimizer.999.exp_avg": torch.ones(5)})),
        "fits no parameter",
    ),
}


class TestCheckpoint:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("amp", ["off", "fp16"])
    def test_resuming_continues_bitwise(self, tmp_path, text, variant, amp):
        whole, corpus = make_plan(tmp_path / "whole", text, amp=amp)
        expected, figures = run_variant(whole, variant, corpus)
        parts, _ = make_plan(tmp_path / "parts", text, amp=amp)
        steps_left = iter(range(5, -1, -1))
        records, result = run_variant(parts, variant, corpus, stop=lambda: next(steps_left) == 0)
        assert result is None
        assert len(records) == 6
        records, result = run_variant(parts, variant, corpus)
        assert losses(records) == losses(expected)
        assert [r["grad_norm"] for r in records] == [r["grad_norm"] for r in expected]
        assert result["validation_losses"] == figures["validation_losses"]
        assert not list((parts.out / variant).glob("step-*"))

    def test_steps_after_the_last_checkpoint_are_done_again(self, tmp_path, text):
        """As after a crash: the log is ahead of the checkpoint, its last line cut off."""
        plan, corpus = make_plan(tmp_path / "out", text)

        class Crash(Exception):
            pass

        def crash_at_seven(record):
            if record["step"] == 6:
                raise Crash

        with pytest.raises(Crash):
            run_variant(plan, "plain", corpus, save_every=4, on_record=crash_at_seven)
        with (plan.out / "metrics.jsonl").open("a") as log:
            log.write('{"variant": "pla')
        assert checkpoint.latest(plan.out / "plain").name == "step-00000004"
        records, _ = run_variant(plan, "plain", corpus)
        assert [record["step"] for record in records] == list(range(8))
        assert len((plan.out / "metrics.jsonl").read_text().splitlines()) == 8

    @pytest.fixture
    def saved(self, tmp_path, text):
        """A checkpoint after three steps, and a fresh job to load it into."""
        config = make_config(text, steps=3)
        job = prepare(config, "plain")
        loop.train(job, config, load_corpus(text, 32), EnergyMeter(CPU), lambda record: None)
        parts = (job.model, job.optimizer, job.scaler)
        return checkpoint.save(tmp_path / "run", 3, *parts, {"seed": 3}), prepare(config, "plain")

    def test_only_the_newest_is_kept_and_nothing_is_pickled(self, saved):
        path, job = saved
        (path.parent / "tmp-1-01234567").mkdir()
        newer = checkpoint.save(path.parent, 4, job.model, job.optimizer, job.scaler, {})
        assert list(path.parent.iterdir()) == [newer], "a folder of a killed process stays"
        assert {file.name for file in newer.iterdir()} == {"tensors.safetensors", "checkpoint.json"}

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_what_is_wrong_is_refused_and_nothing_is_loaded(self, saved, damage):
        path, job = saved
        inflict, message = DAMAGE[damage]
        inflict(path)
        before = [p.clone() for p in job.model.parameters()]
        rng = torch.get_rng_state()
        with pytest.raises(CheckpointError, match=message) as error:
            checkpoint.load(path, job.model, job.optimizer, job.scaler, {"seed": 3})
        assert str(path) in str(error.value)
        assert all(torch.equal(p, q) for p, q in zip(job.model.parameters(), before, strict=True))
        assert not job.optimizer.state
        assert torch.equal(torch.get_rng_state(), rng)

    def test_a_write_that_dies_leaves_the_older_checkpoint(self, saved, monkeypatch):
        path, job = saved

        def die(file):
            raise OSError("no space left on device")

        monkeypatch.setattr(_files, "flush", die)
        with pytest.raises(OSError, match="no space"):
            checkpoint.save(path.parent, 4, job.model, job.optimizer, job.scaler, {})
        assert checkpoint.latest(path.parent) == path
        assert checkpoint.load(path, job.model, job.optimizer, job.scaler, {"seed": 3}) == 3


class TestCommand:
    SMALL = ("--steps", "4", "--batch", "2", "--seq", "32", "--device", "cpu")

    def test_a_whole_run_writes_its_results_and_prints_where(self, tmp_path, text, capsys):
        out = tmp_path / "out"
        assert main(["train", *self.SMALL, "--data", str(text), "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        assert printed.splitlines()[-1] == f"Results: {out}"
        assert "validation losses are 0." in " ".join(printed.split())  # wrapped at the terminal's width
        assert printed.count("not measured") == 4
        assert {file.name for file in out.iterdir()} >= {"loss.png", "steps.png", "metrics.jsonl", "summary.json"}
        summary = json.loads((out / "summary.json").read_text())
        assert summary["config"]["seed"] == 0
        for variant in VARIANTS:
            result = summary["results"][variant]
            assert result["steps"] == 4
            assert len(result["validation_losses"]) == 20
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [(line["variant"], line["step"]) for line in lines] == [(v, s) for v in VARIANTS for s in range(4)]

    def test_only_one_run(self, tmp_path, text, capsys):
        out = tmp_path / "out"
        assert main(["train", *self.SMALL, "--data", str(text), "--out", str(out), "--only", "plain"]) == 0
        assert list(json.loads((out / "summary.json").read_text())["results"]) == ["plain"]

    def test_mistakes_are_told_in_one_line(self, tmp_path, text, capsys):
        out = tmp_path / "out"
        run = ["train", *self.SMALL, "--data", str(text), "--out", str(out), "--only", "plain"]
        assert main(run) == 0
        for argv, message in [
            (run, "holds another run"),
            (["train", "--resume", str(out), "--seed", "7"], "seed: the run in"),
            (["train", "--resume", str(tmp_path)], "no run in"),
            (["train", "--data", str(tmp_path / "absent")], "does not exist"),
            (["train", "--device", "mps"], "device: expected"),
            (["train", "--device", "gpu"], "device: expected"),
            (["train", "--device", "cuda:99"], "CUDA devices, got 'cuda:99'"),
            (["train", "--device", "cpu", "--seq", "9999"], "reads at most 256 tokens"),
            (["train", "--resume", str(out), "--save-every", "-1"], "save-every: expected at least 0, got -1"),
        ]:
            capsys.readouterr()
            assert main(argv) == 2
            assert message in capsys.readouterr().err
        for argv in (["--out", str(text)], ["--out", str(text / "below")]):
            assert main(["train", *self.SMALL, "--data", str(text), *argv]) == 2
            assert "cannot write the run: [Errno" in capsys.readouterr().err
        for file, content, message in [
            (out / "plain" / "result.json", "{", "result.json: not valid JSON"),
            (out / "plain" / "result.json", "[]", "result.json: not a result of"),
            (out / "metrics.jsonl", '{"step": 0}\n', "metrics.jsonl:1: expected a step's record"),
            (out / "metrics.jsonl", "x\n", "metrics.jsonl:1: not valid JSON"),
        ]:
            kept = file.read_text()
            file.write_text(content)
            assert main(["train", "--resume", str(out)]) == 2
            assert message in capsys.readouterr().err
            file.write_text(kept)
        text.write_text(text.read_text() + "more")
        assert main(["train", "--resume", str(out)]) == 2
        assert "has changed since" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("option", "value"),
        [("--batch", 10**12), ("--batch", 10**30), ("--steps", 10**12), ("--seq", 10**12), ("--seed", 10**23),
         ("--lr", "inf"), ("--save-every", -1)],
    )  # fmt: skip
    def test_an_option_out_of_range_is_named_before_anything_is_made(self, tmp_path, text, capsys, option, value):
        out = tmp_path / "out"
        assert main(["train", *self.SMALL, "--data", str(text), "--out", str(out), option, str(value)]) == 2
        assert f"fusedops train: {option[2:]}: " in capsys.readouterr().err
        assert not out.exists()

    def test_ctrl_c_leaves_a_run_that_resumes_bitwise(self, tmp_path, text):
        argv = ["train", "--steps", "40", *self.SMALL[2:], "--data", str(text)]
        out, whole = tmp_path / "out", tmp_path / "whole"
        path = os.pathsep.join([*sys.path, str(Path(__file__).parent.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        python = [sys.executable, "-m", "fusedops.cli"]
        process = subprocess.Popen(
            [*python, *argv, "--out", str(out)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert f"fusedops train --resume {out}" in printed
        assert checkpoint.latest(out / "plain") is not None
        for arguments in (["train", "--resume", str(out)], [*argv, "--out", str(whole)]):
            subprocess.run([*python, *arguments], env=environment, check=True, capture_output=True, timeout=120)
        resumed, expected = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (out, whole)
        )
        assert losses(resumed) == losses(expected)
        results = [json.loads((folder / "summary.json").read_text())["results"] for folder in (out, whole)]
        for variant in VARIANTS:
            assert results[0][variant]["validation_losses"] == results[1][variant]["validation_losses"]

    def test_the_note_on_a_cpu_quotes_what_was_measured(self, tmp_path, monkeypatch):
        from fusedops.cli import train as command

        results = {"plain": {"validation_loss": 2.0}, "fused": {"validation_loss": 2.001}}
        monkeypatch.setattr(command, "MEASURED", tmp_path / "absent.json")
        assert "losses are 0.0010 apart" in command._cpu_note(results)
        assert "Measured" not in command._cpu_note(results)
        measured = {"commit": "abc", "environment": {"device": "NVIDIA X"}, "results": {}}
        measured["config"] = dataclasses.asdict(default_config(CPU))
        for variant, ms in (("plain", 100.0), ("fused", 50.0)):
            measured["results"][variant] = {"ms": {"step": ms}, "validation_loss": 1.5}
        (tmp_path / "measured.json").write_text(json.dumps(measured))
        monkeypatch.setattr(command, "MEASURED", tmp_path / "measured.json")
        assert "Measured on an NVIDIA X (commit abc, nano" in command._cpu_note(results)
        assert "100.0 ms a step with plain PyTorch, 50.0 with fusedops" in command._cpu_note(results)

    @pytest.mark.parametrize(
        ("plain", "fused", "reported"),
        [
            (2.0, 2.001, False),
            (2.0, 2.5, False),
            (2.0, 4.0, False),
            (2.0, 4.1, True),
            (4.1, 2.0, True),
            (NAN, NAN, False),
            (NAN, 2.0, False),
            (2.0, NAN, True),
            (2.0, INF, True),
        ],
    )
    def test_what_one_pair_of_runs_is_evidence_of(self, plain, fused, reported):
        """Siblings of tiny runs end half a nat apart; several nats, or no number, is not rounding's work."""
        from fusedops.cli import train as command

        note = command._cpu_note({"plain": {"validation_loss": plain}, "fused": {"validation_loss": fused}})
        assert ("please report" in note) == reported
        assert "more than rounding explains" not in note


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestGpu:
    @pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
    def test_both_runs_learn_the_same(self, tmp_path, text, amp):
        plan, corpus = make_plan(tmp_path / "out", text, steps=20, amp=amp, device="cuda:0", batch=8, seq=128)
        results = [run_variant(plan, variant, corpus)[1] for variant in VARIANTS]
        assert results[0]["validation_loss"] == pytest.approx(results[1]["validation_loss"], abs=0.05)
        assert all(result["peak_memory_bytes"] > 0 for result in results)
        assert all(result["ms"]["step"] > 0 for result in results)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_resuming_goes_on_where_it_stopped(self, tmp_path, text, variant):
        """Not bitwise: attention's backward adds in no fixed order on a GPU."""
        changes = {"steps": 20, "amp": "fp16", "device": "cuda:0", "batch": 8, "seq": 128}
        whole, corpus = make_plan(tmp_path / "whole", text, **changes)
        expected, _ = run_variant(whole, variant, corpus)
        parts, _ = make_plan(tmp_path / "parts", text, **changes)
        steps_left = iter(range(9, -1, -1))
        assert run_variant(parts, variant, corpus, stop=lambda: next(steps_left) == 0)[1] is None
        records, _ = run_variant(parts, variant, corpus)
        torch.testing.assert_close(torch.tensor(losses(records)), torch.tensor(losses(expected)), rtol=0, atol=0.05)
