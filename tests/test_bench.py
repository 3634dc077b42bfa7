"""`fusedops bench`: parity before time, valid records, charts."""

import json
from functools import partial

import pytest
import torch

import fusedops
from fusedops import dispatch
from fusedops.backends import reference
from fusedops.bench import ops, optimizers, peers, records, report, timing
from fusedops.cli import main
from fusedops.registry import OPS, Case, OpSpec

NORM = ["bench", "norm", "--device", "cpu", "--shape", "64x32", "--repeat", "3", "--backend", "reference"]
ADAM = ["bench", "adam", "--device", "cpu", "--model", "3x40", "--repeat", "3", "--backend", "reference"]
TIMES = {"median_us", "q1_us", "q3_us", "gbps", "percent_of_copy", "copy_us", "host_us", "bytes", "timer"}
FACTS = {"gpu", "commit", "dirty", "driver", "torch", "triton", "cuda", "date", "version", "threads"}
CPU = torch.device("cpu")


def read(folder):
    return [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]


@pytest.fixture
def plant(monkeypatch):
    """Return a function that puts a wrong implementation in the place of the reference backend's."""
    right = reference.implementation

    def plant(op, wrong):
        monkeypatch.setattr(
            reference, "implementation", lambda call: partial(wrong, right(call)) if call.op == op else right(call)
        )
        dispatch.cache.clear()

    yield plant
    dispatch.cache.clear()


def test_norm_times_every_cell_beside_torch(tmp_path, capsys):
    assert main([*NORM, "--vs", "torch,liger", "--out", str(tmp_path)]) == 0
    found = read(tmp_path)
    measured = [r for r in found if r["backend"] != "liger"]
    assert len(measured) == 4 * 3 * 2 * 2  # ops, dtypes, contenders, directions
    assert all(r["status"] == "ok" and r.keys() >= TIMES | FACTS and r["timer"] == "wall" for r in measured)
    assert {r["dtype"] for r in measured} == {"bf16", "amp", "fp32"}
    shown = capsys.readouterr().out
    assert "n/a: layer_norm bf16 liger" in shown
    assert shown.splitlines()[-1] == str(tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"{spec.name}.png" for spec in OPS.values() if spec.family == "norm"
    }


def test_adam_times_every_config_beside_torch(tmp_path):
    assert main([*ADAM, "--clip", "--vs", "torch,foreach", "--out", str(tmp_path)]) == 0
    found = read(tmp_path)
    by_cell = {(r["dtype"], r["backend"]): r for r in found}
    assert by_cell["bf16-master", "torch"]["status"] == "n/a"
    assert by_cell["fp32", "reference"]["bytes"] == 3 * 40 * 32
    assert all(r.keys() >= TIMES | FACTS | {"wall_us"} for r in found if r["status"] == "ok")


def test_all_is_every_family_in_one_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ops, "default_shapes", lambda device, quick, sizes: [(64, 32)])
    monkeypatch.setitem(optimizers.MODELS, "1000x1024", lambda: [(40,)] * 3)
    run = ["bench", "all", "--device", "cpu", "--repeat", "3", "--backend", "reference", "--commit", "abc"]
    assert main([*run, "--out", str(tmp_path / "a"), "--append", str(tmp_path / "all.jsonl")]) == 0
    found = read(tmp_path / "a")
    assert {(r["op"], r["direction"]) for r in found} == {
        *((name, direction) for name in OPS for direction in ops.DIRECTIONS), ("adamw", "step"), ("adamw", "clip+step"),
    }  # fmt: skip
    assert {r["backend"] for r in found if r["status"] == "ok"} == {"reference", "torch", "foreach"}
    assert (tmp_path / "all.jsonl").read_text() == (tmp_path / "a" / "bench.jsonl").read_text()
    assert {path.stem for path in (tmp_path / "a").glob("*.png")} == {*OPS, "adamw"}
    shown = capsys.readouterr().out
    titles = [line for line in shown.splitlines() if "median, % of the copy" in line]
    assert [title.partition(":")[0] for title in titles[-6:]] == [
        f"adamw {direction}, {dtype}"
        for direction in ("step", "norm + clip + step")
        for dtype in ("fp32", "bf16, fp32 state and masters", "bf16")
    ]
    assert shown.splitlines()[-1] == str(tmp_path / "a")


def test_vs_all_is_every_peer(tmp_path):
    assert main([*ADAM, "--dtype", "fp32", "--vs", "all", "--out", str(tmp_path)]) == 0
    assert {r["backend"] for r in read(tmp_path)} == {"reference", *peers.OPTIMIZERS}


@pytest.mark.parametrize("after", [0, 3])
def test_an_interrupted_run_keeps_its_records(tmp_path, capsys, monkeypatch, after):
    real, times = timing.measure, []

    def measure(*args, **kwargs):
        if len(times) == after:
            raise KeyboardInterrupt
        times.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(timing, "copy_time", lambda *args: 1.0)  # it measures too
    monkeypatch.setattr(timing, "measure", measure)
    results = tmp_path / "results.jsonl"
    assert main([*NORM, "--vs", "torch", "--out", str(tmp_path / "a"), "--append", str(results)]) == 130
    told = capsys.readouterr().err.splitlines()
    if after == 0:
        assert told == ["interrupted"]
        assert list(tmp_path.iterdir()) == []
        return
    # Both directions of a contender are timed before its records are written.
    assert told == [f"interrupted, 2 records are in {tmp_path / 'a' / 'bench.jsonl'}"]
    assert [r["direction"] for r in read(tmp_path / "a")] == ["fwd", "bwd"]
    assert results.read_text() == (tmp_path / "a" / "bench.jsonl").read_text()


def test_too_little_memory_for_a_cell_is_told_and_the_run_goes_on(tmp_path, capsys):
    """Shapes that no address space holds: the norm's inputs, which all contenders share, and an optimizer's."""
    fp32 = ["--dtype", "fp32", "--vs", "torch", "--out", str(tmp_path)]
    assert main([*NORM, "--op", "rms_norm", "--shape", "100000000000000x8", "--shape", "8x8", *fp32]) == 1
    assert main([*ADAM, "--model", "1x100000000000000", "--model", "2x8", *fp32]) == 1
    lacking = [(r["op"], r.get("model", r.get("shape"))) for r in read(tmp_path) if r["status"] == "n/a"]
    huge = [100000000000000, 8]
    assert lacking == [("rms_norm", huge)] * 4 + [("adamw", "1x100000000000000")] * 2
    assert sum(r["status"] == "ok" for r in read(tmp_path)) == 2 * 4 + 2 * 2
    shown = capsys.readouterr().out
    for cell in ("rms_norm fp32 reference bwd 100000000000000x8", "adamw fp32 torch step 1x100000000000000"):
        assert f"n/a: {cell}: out of memory: RuntimeError: " in shown


@pytest.mark.parametrize("where", ["_make", "_truth", "_contend"])
def test_a_gpus_lack_of_memory_is_told(tmp_path, capsys, monkeypatch, where):
    def lack(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 EiB")

    monkeypatch.setattr(ops, where, lack)
    run = [*NORM, "--op", "rms_norm", "--dtype", "fp32", "--vs", "torch", "--direction", "fwd"]
    assert main([*run, "--out", str(tmp_path)]) == 1
    assert [(r["backend"], r["status"]) for r in read(tmp_path)] == [("reference", "n/a"), ("torch", "n/a")]
    assert "torch fwd 64x32: out of memory: OutOfMemoryError: CUDA out of memory." in capsys.readouterr().out


def test_a_wrong_kernel_gets_fail_and_no_time(tmp_path, capsys, plant):
    plant("layer_norm", lambda right, *args: right(*args) * 1.001)
    assert main([*NORM, "--dtype", "fp32", "--vs", "torch", "--out", str(tmp_path)]) == 1
    wrong = [r for r in read(tmp_path) if (r["op"], r["backend"]) == ("layer_norm", "reference")]
    assert [r["status"] for r in wrong] == ["FAIL", "FAIL"]
    assert not any(r.keys() & TIMES for r in wrong)
    assert "FAIL: layer_norm fp32 reference fwd 64x32: output" in capsys.readouterr().out


def test_a_wrong_gradient_fails_backward_alone(tmp_path, plant):
    def wrong(right, x, shape, weight, *rest):
        return right(x, shape, weight.detach() + 0.5 * (weight - weight.detach()), *rest)

    plant("rms_norm", wrong)
    assert main([*NORM, "--op", "rms_norm", "--dtype", "fp32", "--vs", "torch", "--out", str(tmp_path)]) == 1
    statuses = {r["direction"]: r["status"] for r in read(tmp_path) if r["backend"] == "reference"}
    assert statuses == {"fwd": "ok", "bwd": "FAIL"}


@pytest.mark.parametrize("clip", [[], ["--clip"]], ids=["step", "clip+step"])
def test_every_optimizer_of_ours_is_right(tmp_path, clip):
    """Adam's gradient has the decay in it, which may cancel it: its error is judged by what was added up."""
    command = ["bench", "adam", *clip, "--op", "adam,adamw", "--model", "30x1000", "--device", "cpu", "--repeat", "3"]
    assert main([*command, "--vs", "torch", "--out", str(tmp_path)]) == 0
    assert {r["status"] for r in read(tmp_path) if r["ours"]} == {"ok"}


def test_rows_of_one_column_are_right(tmp_path):
    """Nearly nothing is left of dx there, so its error is judged by what was added up."""
    shapes = [text for rows in (1, 2, 8, 64) for text in ("--shape", f"{rows}x1")]
    command = ["bench", "norm", "--device", "cpu", *shapes, "--repeat", "3", "--vs", "torch", "--out", str(tmp_path)]
    assert main(command) == 0
    assert {r["status"] for r in read(tmp_path)} == {"ok"}


def test_a_wrong_dx_of_rows_of_one_column_fails(tmp_path, plant):
    plant("rms_norm", lambda right, x, *args: right(x, *args) + 0.01 * (x - x.detach()))
    command = [*NORM, "--op", "rms_norm", "--dtype", "fp32", "--shape", "4x1", "--vs", "torch", "--out", str(tmp_path)]
    assert main(command) == 1
    wrong = [r for r in read(tmp_path) if r["status"] == "FAIL" and r["shape"] == [4, 1]]
    assert [(r["backend"], r["direction"]) for r in wrong] == [("reference", "bwd")]
    assert wrong[0]["reason"].startswith("input is off by ")


def test_an_optimizer_that_does_nothing_fails(tmp_path, monkeypatch):
    real = fusedops.optim.AdamW.step
    calls = []

    def lazy(self, closure=None):
        calls.append(1)
        return real(self, closure) if len(calls) == 1 else None

    monkeypatch.setattr(fusedops.optim.AdamW, "step", lazy)
    assert main([*ADAM, "--dtype", "fp32", "--vs", "torch", "--out", str(tmp_path)]) == 1
    assert {r["backend"]: r["status"] for r in read(tmp_path)} == {"reference": "FAIL", "torch": "ok"}


def test_a_new_op_is_timed_from_its_record_alone(tmp_path, monkeypatch):
    def copy(input, *, backend=None):
        return input.clone()

    spec = OpSpec(
        name="copy",
        family="copy",
        function=copy,
        reference=copy,
        describe=lambda input: dispatch.Call("copy", "cpu", -1, (("input", input.dtype),)),
        wrap=lambda module: copy,
        grads=("input",),
        parameter_shape=lambda case: (),
        cases=lambda level: iter([Case((3, 4), 0, {"input": torch.float32})]),
        condition=lambda sample, dy: {"output": torch.zeros_like(dy), "input": torch.zeros_like(dy)},
        terms=lambda case: {"output": 1, "input": 1},
        bytes_moved=lambda sample, direction: 2 * sample.kwargs["input"].nbytes,
    )
    monkeypatch.setitem(OPS, "copy", spec)
    run = ["bench", "copy", "--device", "cpu", "--backend", "reference", "--shape", "8x16", "--repeat", "3"]
    assert main([*run, "--out", str(tmp_path)]) == 0
    assert {r["status"] for r in read(tmp_path)} == {"ok"}


def test_append_and_plot(tmp_path):
    results = tmp_path / "results" / "cpu.jsonl"
    results.parent.mkdir()
    run = [*NORM, "--op", "rms_norm", "--dtype", "fp32", "--vs", "torch", "--append", str(results), "--commit", "abc"]
    assert main([*run, "--out", str(tmp_path / "a")]) == 0
    assert main([*run, "--out", str(tmp_path / "b")]) == 0
    assert len(results.read_text().splitlines()) == 8
    found = report.read_jsonl(results)
    assert len(found) == 4
    assert {(r["commit"], r["dirty"]) for r in found} == {("abc", None)}
    assert main(["bench", "plot", str(results)]) == 0
    assert (results.parent / "rms_norm.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_cell_is_drawn_as_such(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    written, text = [], Axes.text
    monkeypatch.setattr(Axes, "text", lambda self, x, y, s, **kw: written.append((x, s)) or text(self, x, y, s, **kw))
    common = {"op": "adamw", "dtype": "fp32", "ours": True, "gpu": "G", "commit": "abc", "dirty": None, "torch": "2"}
    timed = {**common, "model": "a", "direction": "step", "backend": "native", "status": "ok", "percent_of_copy": 90.0}
    failed = {**common, "model": "b", "direction": "clip+step", "backend": "triton", "status": "FAIL", "reason": ""}
    report.draw([timed, {**timed, "backend": "triton"}, failed, {**timed, "dtype": "bf16"}], tmp_path)
    assert written == [(0.0, "FAIL")]  # in the middle of its panel, which has no other contender


def test_plot_refuses_a_foreign_file(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"op": "layer_norm"}\n')
    assert main(["bench", "plot", str(tmp_path / "x.jsonl")]) == 2
    assert "x.jsonl:1: expected a record" in capsys.readouterr().err


def test_a_loss_is_timed_at_the_vocabularies_of_models(tmp_path):
    sizes = OPS["cross_entropy"].sizes
    assert ops.default_shapes(torch.device("cuda"), False, sizes) == [(16384, 50257), (8192, 128256)]
    assert all(rows * classes <= 4 << 20 for rows, classes in ops.default_shapes(CPU, False, sizes))
    run = [
        "bench",
        "cross_entropy",
        "--device",
        "cpu",
        "--shape",
        "40x333",
        "--repeat",
        "3",
        "--vs",
        "torch,flash,liger",
    ]
    assert main([*run, "--out", str(tmp_path)]) == 0
    found = read(tmp_path)
    assert {r["backend"] for r in found if r["status"] == "ok"} >= {"reference", "torch"}
    assert not [r for r in found if r["status"] == "FAIL"]


def test_default_shapes_fill_the_gpu():
    shapes = ops.default_shapes(torch.device("cuda"), quick=False)
    assert (16384, 1024) in shapes
    assert all(64 << 20 <= 4 * rows * hidden < 128 << 20 for rows, hidden in shapes)


@pytest.mark.parametrize(
    ("model", "tensors", "millions"), [("gpt2-124M", 148, 124), ("gpt2-355M", 292, 355), ("llama-1.1B", 201, 1100)]
)
def test_models_have_their_sizes(model, tensors, millions):
    shapes = optimizers.model_shapes(model)
    assert len(shapes) == tensors
    assert sum(torch.Size(s).numel() for s in shapes) == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize("text", ["gpt5", "0x4", "3x", "x3"])
def test_unknown_models_are_refused(text):
    with pytest.raises(ValueError, match="expected one of gpt2-124M"):
        optimizers.model_shapes(text)


def test_the_truth_is_not_rounded_to_the_dtypes_that_results_are_wanted_in():
    spec = OPS["add_layer_norm"]
    dtypes = dict.fromkeys(spec.grads, torch.float32)
    case = Case((4, 8), 1, dtypes, torch.bfloat16, {"residual_dtype": torch.float16})
    bench = ops._make(spec, case, CPU)
    assert {t.dtype for t in ops._truth(bench).values()} == {torch.float64}
    options = ops.Options(CPU, (), (), ops.DIRECTIONS, ["reference"], (), 2, False)
    assert [record["status"] for record in ops.run_case(spec, case, "", options)] == ["ok", "ok"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_waits_for_the_device_is_not_captured():
    device = torch.device("cuda")
    x = torch.ones(8, device=device)
    with timing.side_stream(device):
        assert timing.prepare(lambda: x.sum().item(), device).timer == "events"
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        assert timing.prepare(lambda: x + 1, device).timer == "graph"
        big = torch.empty(1 << 26, device=device)
        del big
        torch.cuda.empty_cache()  # a capture that fails keeps the allocator from giving memory back
        assert torch.cuda.memory_reserved() < before + (1 << 26)


def test_timing_on_a_cpu():
    took = timing.measure(timing.prepare(lambda: torch.ones(8), CPU), 7)
    assert took.repeats == 7
    assert 0 < took.q1 <= took.median <= took.q3
    assert timing.peak_memory(lambda: None, CPU) is None
    assert timing.energy(timing.prepare(lambda: None, CPU)) is None


def test_raw_kernels_of_a_peer_become_differentiable():
    function = peers._raw(
        lambda eps, x, w: (x * w, x), lambda eps, dy, x, w, saved: (dy * w, (dy * saved).sum(0)), cast_parameters=True
    )
    x, w = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True), torch.randn(4, requires_grad=True)
    dx, dw = torch.autograd.grad(function(input=x, normalized_shape=(4,), weight=w), [x, w], torch.ones_like(x))
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(dx, w.to(torch.bfloat16).expand(3, 4))


def test_a_commit_is_found_or_told_but_never_made_up(monkeypatch):
    monkeypatch.delenv("FUSEDOPS_COMMIT", raising=False)
    monkeypatch.setattr(records, "_git", lambda: (None, None))
    assert records.facts(CPU)["commit"] is None
    monkeypatch.setenv("FUSEDOPS_COMMIT", "0123")
    assert records.facts(CPU)["commit"] == "0123"


@pytest.mark.parametrize("family", ["norm", "adam"])
@pytest.mark.parametrize("count", ["0", "-1", "1000001", "9" * 5000, "many"])
def test_repetitions_are_a_number_from_one_on(family, count, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", family, "--repeat", count])
    assert f"--repeat: expected a number from 1 to 1,000,000, got '{count}'" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["norm", "adam"])
@pytest.mark.parametrize("name", ["absent/results.jsonl", "file/results.jsonl", "."])
def test_results_are_appended_to_a_file_in_a_folder_that_exists(family, name, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["bench", family, "--append", str(tmp_path / name)])
    message = f"--append: expected a file in a folder that exists, got '{tmp_path / name}'"
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_results_that_cannot_be_written_are_told_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    argv = ["bench", "norm", "--quick", "--shape", "8x8", "--repeat", "2", "--vs", "torch", "--op", "rms_norm"]
    assert main([*argv, "--device", "cpu", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write the results: [Errno" in capsys.readouterr().err
