"""The statistics of benchmarks/loss_agreement.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")


@pytest.fixture(scope="module")
def judge():
    file = Path(__file__).parent.parent / "benchmarks" / "loss_agreement.py"
    spec = importlib.util.spec_from_file_location("loss_agreement", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.judge


def make_losses(fused, control, planted):
    plain = [2.0, 2.3, 1.9]
    arms = {"plain": [0, 0, 0], "fused": fused, "control": control, "planted": planted}
    return {arm: [p + d for p, d in zip(plain, values, strict=True)] for arm, values in arms.items()}


def test_noise_agrees_and_a_shift_is_told_apart(judge):
    verdict = judge(make_losses([0.001, -0.002, 0.002], [0.002, -0.001, -0.001], [-0.02, -0.025, -0.018]))
    assert verdict["standard_error"] == pytest.approx(((8.6667e-6 + 6e-6) / 5 / 3) ** 0.5, rel=1e-3)
    assert verdict["arms"]["fused"]["agrees"]
    assert not verdict["arms"]["planted"]["agrees"]
    assert verdict["passed"]


def test_a_small_steady_shift_of_fused_fails(judge):
    assert not judge(make_losses([0.006, 0.005, 0.007], [0.002, -0.001, -0.001], [0.02, 0.02, 0.02]))["passed"]


def test_a_test_that_cannot_see_the_planted_shift_fails(judge):
    assert not judge(make_losses([0.02, -0.03, 0.01], [0.02, -0.03, 0.01], [0.01, 0.012, 0.011]))["passed"]
