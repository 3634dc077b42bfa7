"""Ctrl-C while the tuner runs a model: at whatever moment, the model is as it was."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from tune_helpers import everything, same

import fusedops
from fusedops.tuning import preserve


class Stopped(nn.Linear):
    """Ctrl-C comes each time that it is put back."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" and value is False and self.__dict__.get("armed"):
            signal.raise_signal(signal.SIGINT)
        super().__setattr__(name, value)


@pytest.mark.parametrize("function", [fusedops.warmup, fusedops.tune])
@pytest.mark.parametrize("wrong", [False, True], ids=["as it should", "with an error"])
def test_an_interrupt_waits_until_all_is_as_it_was(home: Path, wrong: bool, function: Callable[..., object]) -> None:
    model = nn.Sequential(Stopped(3, 3), fusedops.nn.LayerNorm(3), Stopped(3, 3)).eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    model[0].armed = model[2].armed = True
    if wrong:
        model[2].register_forward_hook(lambda *_: 1 / 0)
    x, before = torch.randn(2, 3), everything(model)
    with pytest.raises(KeyboardInterrupt) as caught:
        function(model, x)
    assert same(before, everything(model))
    assert isinstance(caught.value.__context__, ZeroDivisionError) == wrong
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_stops_a_step_at_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    model[0].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    model[1].register_forward_pre_hook(lambda *_: pytest.fail("went on"))
    x, before = torch.randn(2, 3), everything(model)
    with pytest.raises(KeyboardInterrupt):
        fusedops.warmup(model, x)
    assert same(before, everything(model))


def test_a_handler_of_the_models_own_keeps_what_it_calls() -> None:
    """It may call the one that was there before, which was the tuner's, for good."""

    def chain(*_: object) -> None:
        there = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda number, frame: there(number, frame))  # type: ignore[operator]

    model = nn.Linear(3, 3)
    model.register_forward_hook(chain)
    before = signal.getsignal(signal.SIGINT)
    try:
        fusedops.warmup(model, torch.randn(2, 3))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_line_is_a_bad_moment_for_an_interrupt() -> None:
    """Ctrl-C at any line of what puts the model back, but those where Python does not look for signals."""
    quiet = ("try:", "interrupts.wait = True")

    def interrupted_at(number: int) -> bool:
        """Interrupt at a line; False once there are no more of them."""
        model, lines = nn.Linear(2, 2).eval(), [0]
        p = model.weight
        p.grad = torch.full_like(p, 7.0)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if frame.f_code.co_filename != preserve.__file__ and "contextlib" not in frame.f_code.co_filename:
                return None
            if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() not in quiet:
                lines[0] += 1
                if lines[0] == number:
                    signal.raise_signal(signal.SIGINT)
            return trace

        before, random, own = everything(model), torch.get_rng_state(), sys.gettrace()
        sys.settrace(trace)
        try:
            fusedops.warmup(model, torch.ones(1, 2))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(own)
        assert same(before, everything(model)), number
        assert torch.equal(random, torch.get_rng_state()), number
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, number
        return lines[0] >= number

    number = 1
    while interrupted_at(number):
        number += 1
    assert number > 40
