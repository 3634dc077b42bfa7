"""The tuner: what it chooses, and the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tune_helpers import BF16, CPU, F32, NEEDS_GPU, a_cell, call, tuned_file

import fusedops
from fusedops import UnsupportedError, config, dispatch, dispatch_table, machine
from fusedops.cli import main
from fusedops.tuning import model as tuned_model
from fusedops.tuning.store import Store
from fusedops.tuning.table import Measured, make_rows
from fusedops.tuning.table import order as best_first

RUN = ["tune", "--device", "cpu", "--op", "layer_norm", "--dtype", "fp32", "--shapes", "8x16,64x16"]


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
    assert best_first([a_cell(times={"native": native, "reference": reference})]) == order


def test_apex_and_what_is_wrong_have_no_place_in_a_row() -> None:
    times = {"native": (90.0, 1.0), "triton": (50.0, 1.0), "reference": (80.0, 1.0), "apex": (1.0, 1.0)}
    assert best_first([a_cell(times=times)]) == ("reference", "native")  # triton only interprets there
    swapped = {"reference": (81.0, 1.0), "native": (80.0, 1.0)}  # of a shipped row with plain PyTorch first
    assert best_first([a_cell(times=swapped)]) == ("reference", "native")
    gpu = replace(a_cell(times=times), device="cuda")
    assert best_first([gpu]) == ("triton", "native", "reference")
    del times["triton"]
    assert best_first([gpu]) == ("reference", "native")
    assert best_first([replace(gpu, times={"apex": (1.0, 1.0)})]) == ()
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


LARGE, SMALL = "16x1048576", "1000x1024"
ADAMW = ["tune", "--device", "cpu", "--op", "adamw", "--dtype", "fp32"]


@pytest.mark.parametrize(
    ("large", "small", "first"),
    [
        (50.0, 50.0, "reference"), (96.5, 96.5, "reference"), (50.0, 97.5, "native"), (97.5, 50.0, "native"),
        (50.0, 2000.0, "native"), (2000.0, 50.0, "native"),
    ],
)  # fmt: skip
def test_an_optimizers_other_backend_has_to_win_on_few_large_tensors_and_on_many_small_ones(
    large: float, small: float, first: str, home: Path, clock: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    seen = clock(native=100.0, reference={LARGE: large, SMALL: small})
    assert main(ADAMW) == 0
    assert seen == [f"adamw fp32 {LARGE}", f"adamw fp32 {SMALL}"]
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in shown if line[0] == "adamw"] == [first] * 2
    (row,) = json.loads(tuned_file().read_text())["rows"]
    assert row["backends"][0] == first
    assert f"at {LARGE} fp32: {first} " in row["why"]
    assert f"at {SMALL} fp32: {first} " in row["why"]


def test_of_several_that_win_on_both_lists_the_one_whose_worse_is_best_leads() -> None:
    def cell(size: str, **times: float) -> Measured:
        arguments = {"param": "float32", "state": "float32"}
        pairs = {name: (time, 1.0) for name, time in times.items()}
        return Measured("adamw", "cuda", 90, arguments, None, None, "fp32", size, "2026-01-01", pairs)

    together = [cell("a", native=100.0, triton=10.0, reference=60.0), cell("b", native=10.0, triton=9.0, reference=7.0)]
    assert best_first(together) == ("reference", "native", "triton")
    wrong = replace(together[1], times={"native": (10.0, 1.0), "triton": (9.0, 1.0)})
    assert best_first([together[0], wrong]) == ("triton", "native")


def test_one_list_of_tensors_makes_no_row(
    home: Path, clock: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = clock(seconds=10.0, native=100.0, reference=20.0)
    assert main([*ADAMW, "--budget", "15"]) == 0
    assert f"open: needs {LARGE} and {SMALL}" in capsys.readouterr().out
    assert json.loads(tuned_file().read_text())["rows"] == []
    assert main(ADAMW) == 0
    assert len(seen) == 2
    assert len(json.loads(tuned_file().read_text())["rows"]) == 1


@pytest.mark.parametrize(
    ("param", "options", "served"),
    [
        (F32, {}, True), (F32, {"master_weights": True}, True), (F32, {"weight_decay": 0.0}, True),
        (BF16, {"master_weights": True, "state_dtype": F32}, True), (BF16, {}, True),
        (F32, {"amsgrad": True}, False), (BF16, {"kahan_sum": True}, False),
        (BF16, {"bf16_stochastic_round": True}, False), (BF16, {"state_dtype": F32}, False),
        (BF16, {"master_weights": True, "state_dtype": BF16}, False), (torch.float16, {}, False),
    ],
)  # fmt: skip
def test_an_optimizers_row_serves_what_was_measured_alone(
    param: torch.dtype, options: dict[str, Any], served: bool, home: Path, clock: Callable[..., list[str]]
) -> None:
    clock(native=100.0, reference=20.0)
    assert main(ADAMW[:-2]) == 0
    dispatch.forget_tuned()
    p = nn.Parameter(torch.ones(3, dtype=param))
    explained = fusedops.explain("adamw", [p], **options)
    assert (explained.row.source == f"tuned: {tuned_file()}") == served
    optimizer, p.grad = fusedops.optim.AdamW([p], lr=0.1, **options), torch.ones_like(p)
    optimizer.step()
    assert optimizer._buckets[0].backend.__name__.endswith(explained.chosen)  # what is explained is what runs


def test_groups_that_keep_updates_in_two_ways_are_not_what_was_measured(
    home: Path, clock: Callable[..., list[str]]
) -> None:
    clock(native=100.0, reference=20.0)
    assert main(ADAMW[:-2]) == 0
    dispatch.forget_tuned()
    first, second = (nn.Parameter(torch.ones(3, dtype=BF16)) for _ in range(2))
    for keep, served in ((True, True), (False, False)):
        groups = [{"params": [first], "master_weights": True}, {"params": [second], "master_weights": keep}]
        row = fusedops.explain("adamw", groups, state_dtype=F32).row
        assert (row.source != "shipped") == served


GOOD = {"ops": ["adamw"], "device": "cpu", "backends": ["reference"], "why": "mine"}


def test_options_that_no_call_has_are_refused() -> None:
    for bad in ({"amsgrad": 0}, {"keep": "all"}, {"keep": ["kahan_sum"]}, {"largest": 3}, [], "x", None):
        with pytest.raises(ValueError, match=r'here: options: expected an optimizer\'s: "amsgrad", .*, got'):
            dispatch_table.make_row({**GOOD, "options": bad}, "here", "")
    for ops in ([], ["layer_norm"], ["adamw", "layer_norm"]):
        with pytest.raises(ValueError, match="here: options: expected none but for adam, adamw, got"):
            dispatch_table.make_row({**GOOD, "ops": ops, "options": {"amsgrad": True}}, "here", "")
    row = dispatch_table.make_row({**GOOD, "options": {"keep": "kahan_sum"}}, "", "")
    assert row.options == (("keep", "kahan_sum"),)


# ---------------------------------------------------------------- the command


def test_the_command_measures_and_is_obeyed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN[:3], "--dtype", "fp32,amp", "--shapes", "8x16", "--op", "layer_norm,add_rms_norm,adamw"]) == 0
    shown = capsys.readouterr().out
    for op, dtypes, size in (
        ("layer_norm", "fp32", "8x16"), ("layer_norm", "amp", "8x16"), ("add_rms_norm", "fp32", "8x16"),
        ("add_rms_norm", "amp", "8x16"), ("adamw", "fp32", "16x1048576"), ("adamw", "fp32", "1000x1024"),
    ):  # fmt: skip
        line = next(line for line in shown.splitlines() if line.split()[:3] == [op, dtypes, size])
        assert float(line.split()[4]) > 0
    assert f"used from now on: {tuned_file()}" in shown
    text = str(fusedops.explain("layer_norm", torch.ones(8, 16), 16, torch.ones(16), torch.ones(16)))
    assert f"(tuned: {tuned_file()})" in text
    assert "larger of device and host time in µs at 8x16 fp32: " in text
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


@pytest.mark.parametrize("options", [
    ("--op", ","), ("--dtype", ","), ("--op", "layer_norm", "--dtype", "bf16-master"),
    ("--op", "adamw", "--dtype", "amp"),
])  # fmt: skip
def test_nothing_to_measure_is_an_error(
    options: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--device", "cpu", *options]) == 2
    assert "nothing to measure" in capsys.readouterr().err
    assert not home.exists()


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


@NEEDS_GPU
def test_the_command_runs_on_a_gpu(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["tune", "--op", "rms_norm,adamw", "--dtype", "amp,fp32", "--shapes", "128x1024,4096x1024", "--budget", "120"]
    assert main(run) == 0, capsys.readouterr().out
    assert "used from now on" in capsys.readouterr().out
    x, w = torch.randn(4096, 1024, device="cuda", dtype=BF16), torch.ones(1024, device="cuda")
    assert fusedops.explain("rms_norm", x, 1024, w).row.source.startswith("tuned: ")
