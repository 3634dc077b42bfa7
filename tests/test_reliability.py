"""docs/reliability.md shows what its results files hold."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def reliability() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reliability", ROOT / "benchmarks" / "reliability.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(reliability: ModuleType) -> None:
    page = reliability.PAGE.read_text()
    assert reliability.update(page) == page, "run python benchmarks/reliability.py"


def test_shards_are_added_up(reliability: ModuleType, tmp_path: Path) -> None:
    run = {"kind": "run", "gpu": "H", "driver": "5", "cpu": "c", "torch": "2", "triton": "3", "commit": "abc",
           "date": "2030-01-01T00:00Z", "seed": 0, "complete": True}  # fmt: skip
    cell = {"kind": "cell", "cell": "op/native/bf16-fp32", "forward": 10, "backward": 9, "irregular": 5, "large": 1,
            "worst": 0.5, "failures": []}  # fmt: skip
    other = {**cell, "worst": 0.75, "failures": ["op/native/bf16-fp32/0/3"]}
    step = {**cell, "cell": "adamw/triton/fp32-fp32", "backward": 0}
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (run, cell, run, other, step)))
    page = reliability.update("before\n<!-- tried: f.jsonl -->\nold\n<!-- end -->\nafter", tmp_path)
    for part in (
        "before\n",
        "\nafter",
        "**30 cases in 2 cells on one H, driver 5**",
        "50 % not contiguous",
        "1 failed",
        "| op | native | 1 | 20 | 20 | 18 | 75 % | 1 |",
        "| native | 20 · 18 |",
        "| triton | 10 |",
    ):
        assert part in page
    assert "old" not in page
    assert "Fewer" not in page
    assert reliability.update(page, tmp_path) == page


def test_what_is_missing_is_named(reliability: ModuleType, tmp_path: Path) -> None:
    """A cell that has fewer cases than its shards were to make, of processes that were stopped."""
    run = {"kind": "run", "gpu": None, "cpu": "c", "torch": "2", "triton": "3", "commit": "abc",
           "date": "2030-01-01T00:00Z", "seed": 0, "complete": False}  # fmt: skip
    cell = {"kind": "cell", "cell": "op/native/bf16-fp32", "share": 10, "forward": 10, "backward": 9, "irregular": 5,
            "large": 1, "worst": 0.5, "failures": []}  # fmt: skip
    lines = [run, cell, run, {**cell, "forward": 3}, {**cell, "cell": "op/triton/bf16-fp32"}]
    half = json.dumps(cell)[:40]  # of a line, as a killed process leaves it
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + half)
    page = reliability.update("<!-- tried: f.jsonl -->\n<!-- end -->", tmp_path)
    assert "**Not every process came to its end.** **Fewer cases than meant: op/native/bf16-fp32 (13 of 20).**" in page


def test_a_file_that_is_not_there_changes_nothing(reliability: ModuleType, tmp_path: Path) -> None:
    page = "<!-- tried: none.jsonl -->\nnot run yet\n<!-- end -->"
    assert reliability.update(page, tmp_path) == page
