"""The command `fusedops parity`."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from fusedops import dispatch, testing
from fusedops.backends import reference
from fusedops.cli import main
from fusedops.registry import OPS


def test_sound_backend_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--backend", "reference", "--op", "rms_norm", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for part in ("rms_norm", "bf16 (fp32 parameters)", "reference", "of the bound", "ok"):
        assert part in out
    assert "layer_norm" not in out
    assert "FAIL" not in out


def test_wrong_and_crashing_cells_exit_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = OPS["rms_norm"].reference

    def wrong(input, shape, weight, eps, offset, dtype):  # type: ignore[no-untyped-def]
        if input.shape == (4, 7):
            raise RuntimeError("planted crash")
        return right(input, shape, weight, eps, offset, dtype) * 1.01

    monkeypatch.setattr(reference, "implementation", lambda call: wrong)
    dispatch.cache.clear()
    assert main(["parity", "--backend", "reference", "--op", "rms_norm", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    for part in ("FAIL rms_norm on reference (cpu), case 9x768-bf16-weight_bf16, seed 0", "planted crash"):
        assert part in out
    (tried,) = re.findall(r"\n[1-9]\d* of (\d+) cells are wrong", out)
    assert int(tried) == len([*OPS["rms_norm"].cases("quick")])


def test_absent_backend_that_was_asked_for_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--backend", "apex", "--op", "rms_norm", "--device", "cpu"]) == 1
    assert "apex does not run here: its kernels are for CUDA devices, not for cpu" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--op", "norm"], ["--backend", "cuda"]])
def test_unknown_names(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["parity", *wrong])
    assert error.value.code == 2
    assert "expected any of" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_no_cases(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["parity", f"--fuzz={number}"])
    assert error.value.code == 2
    assert f"expected a number of cases from 1 on, got '{number}'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["parity"], ["bench", "norm"]])
@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "expected a device"), ("meta", "expected a device that"), ("cuda:99", "CUDA devices, got")],
)
def test_absent_devices(command: list[str], device: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main([*command, "--device", device])
    assert error.value.code == 2
    found = capsys.readouterr().err
    assert "argument --device: " in found
    assert message in found


def test_without_rich_it_prints_plain_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["parity", "--backend", "reference", "--op", "rms_norm", "--device", "cpu"]) == 0
    assert "gradient ULP" in capsys.readouterr().out


def test_poisoned_restores() -> None:
    with testing.poisoned():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
