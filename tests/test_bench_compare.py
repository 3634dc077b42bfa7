"""`fusedops bench` beside an earlier run: what counts as slower, and what cannot be compared."""

import json

import pytest
import torch

from fusedops import machine
from fusedops.bench import compare, records, report, timing
from fusedops.cli import main

RECORD = {"op": "layer_norm", "direction": "fwd", "dtype": "bf16", "backend": "native", "shape": [8192, 4096],
          "ours": True, "status": "ok", "median_us": 100.0, "q1_us": 99.0, "q3_us": 101.0, "copy_us": 90.0,
          "percent_of_copy": 90.0, "gpu": "G", "cpu": "C", "threads": 4, "commit": "0123456789abcdef",
          "dirty": False, "torch": "2.13.0"}  # fmt: skip
NORM = ["bench", "norm", "--device", "cpu", "--shape", "64x32", "--repeat", "3", "--backend", "reference",
        "--op", "rms_norm", "--dtype", "fp32", "--vs", "torch"]  # fmt: skip


def record(time=1.0, copy=1.0, spread=0.02, **other):
    """A record whose time and copy are so many times those of RECORD, its quartiles that far apart."""
    median = 100.0 * time
    return {**RECORD, "median_us": median, "q1_us": median * (1 - spread / 2), "q3_us": median * (1 + spread / 2),
            "copy_us": 90.0 * copy, "percent_of_copy": 90.0 * copy / time, **other}  # fmt: skip


def write(path, *records):
    report.write_jsonl(records, path)
    return str(path)


@pytest.mark.parametrize(
    ("new", "verdict", "ratio"),
    [
        (record(), "same", 1.0),
        (record(1.035), "same", 1.035),  # below 4 %
        (record(1.06), "slower", 1.06),
        (record(1 / 1.06), "faster", 1 / 1.06),
        (record(1 / 1.035), "same", 1 / 1.035),
        (record(1.06, spread=0.07), "same", 1.06),  # a noisy run
        (record(1.08, spread=0.07), "slower", 1.08),
        (record(1.2, 1.2), "same", 1.0),  # the whole machine is slower
        (record(1.2, 1.1), "slower", 1.2 / 1.1),
        (record(1.0, 0.8), "same", 1.0),  # the copy is another, not the kernel
        (record(1.3, 1.4), "same", 1.0),  # slower by the clock, faster by the copy
        (record(0.8, 0.9), "faster", 0.8 / 0.9),
        (record(status="FAIL", reason="wrong"), "lost", None),
        (record(status="n/a", reason="no memory"), "lost", None),
    ],
)
def test_slower_is_by_more_than_noise_in_time_and_in_percent_of_the_copy(new, verdict, ratio):
    [change] = compare.compare([new], [record()])
    assert change.verdict == verdict
    if ratio is not None:
        assert change.ratio == pytest.approx(ratio)


def test_a_backend_that_is_gone_has_lost_its_cells(tmp_path, capsys):
    base = [
        record(),
        record(backend="triton"),
        record(backend="triton", dtype="fp32"),
        record(backend="torch", ours=False),
    ]
    new = [record(backend="triton")]
    assert [(c.base["backend"], c.base["dtype"], c.verdict) for c in compare.compare(new, base)] == [
        ("native", "bf16", "lost"),
        ("triton", "bf16", "same"),
    ]
    assert [c.verdict for c in compare.compare(new, base, ["triton"])] == ["same"]  # native was not asked for
    assert main(["bench", "compare", write(tmp_path / "new.jsonl", *new), write(tmp_path / "base.jsonl", *base)]) == 1
    shown = capsys.readouterr().out
    assert "layer_norm fwd bf16 native 8192x4096: not measured: the backend is not there" in shown
    assert "2 cells of ours, 1 lost" in shown


def test_the_noisier_of_the_two_runs_counts():
    [change] = compare.compare([record(1.06)], [record(spread=0.07)])
    assert (change.verdict, change.noise) == ("same", pytest.approx(0.07))


def test_a_cpu_is_noisier_than_a_gpu():
    here = {"gpu": None}
    verdicts = [compare.compare([record(time, **here)], [record(**here)])[0].verdict for time in (1.2, 1.3)]
    assert verdicts == ["same", "slower"]


@pytest.mark.parametrize(
    "other",
    [{"op": "rms_norm"}, {"direction": "bwd"}, {"dtype": "amp"}, {"backend": "triton"}, {"shape": [8192, 1024]},
     {"model": "8192x4096x2"}, {"ours": False}, {"status": "FAIL", "reason": ""}],
)  # fmt: skip
def test_a_cell_is_compared_with_the_same_cell_alone(other):
    base = record(0.5, **other)
    with pytest.raises(ValueError, match="base: expected a time of one of these cells of ours at least, got none"):
        compare.compare([record()], [base], ["native"])
    [change] = compare.compare([record(), record(backend="apex")], [base, record()], ["native"])
    assert (change.base, change.verdict) == (record(), "same")


def test_peers_are_not_compared():
    changes = compare.compare([record(), record(2.0, backend="torch", ours=False)],
                              [record(), record(backend="torch", ours=False)])  # fmt: skip
    assert [change.new["backend"] for change in changes] == ["native"]


def test_two_files_are_compared(tmp_path, capsys):
    back = {"direction": "bwd"}
    lost = record(dtype="fp32", status="n/a", reason="no memory")
    others = [record(dtype="amp", **back), record(dtype="fp32"), record(dtype="fp16")]
    before = [record(9.0), record(), record(**back), *others]  # of one cell the later stands
    now = [record(1.1), record(0.5, **back), record(dtype="amp"), record(dtype="amp", **back), lost]
    base, new = write(tmp_path / "base.jsonl", *before), write(tmp_path / "new.jsonl", *now)
    assert main(["bench", "compare", new, base]) == 1
    shown = capsys.readouterr().out
    table = [line.replace("│", " ").split() for line in shown.splitlines() if "layer_norm" in line and "8192" in line]
    assert [(row[0], " ".join(row[1:6])) for row in table] == [
        ("lost", "layer_norm fwd fp32 native 8192x4096"),
        ("slower", "layer_norm fwd bf16 native 8192x4096"),
        ("faster", "layer_norm bwd bf16 native 8192x4096"),
    ]
    assert table[1][-2:] == ["+10.0%", "4.0%"]
    assert "n/a: layer_norm fp32 native: no memory" in shown
    assert shown.splitlines()[-1] == (
        "Beside commit 0123456789ab: 4 cells of ours, 1 lost, 1 slower, 1 faster, 1 same."
    )


def test_nothing_slower_is_no_error(tmp_path, capsys):
    base = write(tmp_path / "base.jsonl", record(), record(direction="bwd"))
    new = write(tmp_path / "new.jsonl", record(1.03), record(0.5, direction="bwd"))
    assert main(["bench", "compare", new, base]) == 0
    assert "2 cells of ours, 0 lost, 0 slower, 1 faster, 1 same" in capsys.readouterr().out


def test_runs_of_two_machines_are_refused_in_one_line(tmp_path, capsys):
    base = write(tmp_path / "base.jsonl", record(), record(gpu=None, dtype="fp32"))
    assert main(["bench", "compare", write(tmp_path / "new.jsonl", record(gpu="H")), base]) == 2
    message = "fusedops bench: base: expected records of H, got C, 4 threads and G\n"
    assert capsys.readouterr().err == message


OTHERS = [{"gpu": "H"}, {"gpu": None}, {"gpu": None, "cpu": "D"}, {"gpu": None, "threads": 8}]


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_of_several_machines_is_compared_with_the_same_one_alone(tmp_path, capsys, other):
    base = write(tmp_path / "base.jsonl", record(), record(9.0, **other))
    assert report.read_jsonl(tmp_path / "base.jsonl") == [record(), record(9.0, **other)]
    assert main(["bench", "compare", write(tmp_path / "new.jsonl", record(1.1)), base]) == 1
    assert "1 cells of ours, 0 lost, 1 slower, 0 faster, 0 same" in capsys.readouterr().out


@pytest.mark.parametrize("other", OTHERS)
def test_a_chart_is_of_one_machine(tmp_path, capsys, monkeypatch, other):
    drawn = []
    monkeypatch.setattr(report, "draw", lambda records, folder: drawn.append(records) or [])
    file, name = write(tmp_path / "both.jsonl", record(), record(2.0, **other)), report.machine({**RECORD, **other})
    assert main(["bench", "plot", file]) == 2
    assert main(["bench", "plot", file, "--machine", "another"]) == 2
    names = " and ".join(sorted(["G", name]))
    message = f"fusedops bench: {file}: expected records of one machine, which --machine may name, got {names}\n"
    assert capsys.readouterr().err == 2 * message
    assert main(["bench", "plot", file, "--machine", name]) == 0
    assert drawn == [[record(2.0, **other)]]


def test_a_machine_without_gpu_is_its_cpu_and_threads():
    found = report.machine(records.facts(torch.device("cpu")))
    assert found == f"{machine.cpu_name()}, {torch.get_num_threads()} threads"


@pytest.mark.parametrize("content", ["no JSON\n", '{"op": "layer_norm"}\n', None])
@pytest.mark.parametrize("command", [["norm", "--compare"], ["all", "--compare"], ["compare"]])
def test_a_base_that_is_no_results_file_is_refused(tmp_path, capsys, command, content):
    file = tmp_path / "base.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *command, str(file), *([str(file)] if command == ["compare"] else [])])
    expected = "No such file" if content is None else f"{file}:1: "
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_a_base_of_another_machine_is_refused_before_anything_is_measured(tmp_path, capsys):
    base, out = write(tmp_path / "base.jsonl", record()), tmp_path / "out"
    assert main([*NORM, "--out", str(out), "--compare", base]) == 2
    expected = f"base: expected records of {machine.cpu_name()}, {torch.get_num_threads()} threads, got G\n"
    assert capsys.readouterr().err.endswith(expected)
    assert not out.exists()


@pytest.mark.parametrize(
    ("factor", "status", "verdict"), [(0.5, 1, "2 slower"), (1.0, 0, "2 same"), (2.0, 0, "2 faster")]
)
def test_a_run_is_compared_with_an_earlier_one(tmp_path, capsys, monkeypatch, factor, status, verdict):
    """The clock is planted: a busy machine's would be anyone's guess."""
    monkeypatch.setattr(timing, "copy_time", lambda *args: 5.0)
    monkeypatch.setattr(timing, "measure", lambda *args: timing.Timing(10.0, 9.9, 10.2, 3))
    assert main([*NORM, "--out", str(tmp_path / "a")]) == 0
    earlier = [json.loads(line) for line in (tmp_path / "a" / "bench.jsonl").read_text().splitlines()]
    base = [{**r, **{key: r[key] * factor for key in ("median_us", "q1_us", "q3_us")}} for r in earlier]
    assert main([*NORM, "--out", str(tmp_path / "b"), "--compare", write(tmp_path / "base.jsonl", *base)]) == status
    shown = capsys.readouterr().out.splitlines()
    assert verdict in shown[-2]
    assert shown[-1] == str(tmp_path / "b")


HOSTILE = [
    {"op": "/tmp/evil"}, {"op": "../evil"}, {"op": "a\0b"}, {"op": "\ud800"}, {"backend": "\ud800"},
    {"commit": "\x1b[31m"}, {"shape": [None]}, {"shape": [{}]}, {"shape": [1.5, "x"]}, {"shape": [0]},
    *({name: 10**400} for name in ("median_us", "q1_us", "q3_us", "copy_us", "percent_of_copy")),
    {"percent_of_copy": 10**30},
]  # fmt: skip


@pytest.mark.parametrize("other", HOSTILE, ids=str)
def test_a_record_that_no_run_writes_is_refused(tmp_path, capsys, other):
    file = tmp_path / "hostile.jsonl"
    file.write_text(json.dumps({**RECORD, **other}) + "\n")
    assert main(["bench", "plot", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "hostile.jsonl:1: expected a record" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "compare", str(file), str(file)])
    assert "hostile.jsonl:1: expected a record" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.png"))


def test_names_may_hold_what_matplotlib_takes_for_a_formula(tmp_path):
    names = {"backend": "$x_$", "dtype": "$", "direction": "$a", "commit": "$x_$", "torch": "$_"}
    assert report.draw([record(**names)], tmp_path) == [tmp_path / "layer_norm.png"]


@pytest.mark.parametrize(
    "asked", [["norm", "--shape", "100000000000x100000000"], ["norm", "--shape", "9" * 26 + "x8"],
              ["adam", "--model", "9999999999x99999999"], ["adam", "--model", "1000001x1"]]
)  # fmt: skip
def test_sizes_that_no_machine_holds_are_refused(asked, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["bench", *asked, "--device", "cpu"])
    assert refused.value.code == 2
    assert "expected" in capsys.readouterr().err
