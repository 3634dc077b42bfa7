"""Steps of a model that leave it as it was, whatever they do to it and wherever they are interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


def preserving(model: nn.Module, devices: Sequence[torch.device], run: Callable[[], Result]) -> Result:
    """Call ``run`` in training mode; parameters, gradients, buffers, modes and random numbers are as before afterwards.

    So are which tensors are a module's parameters and buffers, which buffers persist, and which parameters are frozen.

    A model may write to its parameters in forward, behind PyTorch's back as well, so all are copied. Ctrl-C stops
    ``run`` at once, and is put off while the model is put back.

    Args:
        model: what ``run`` calls.
        devices: GPUs whose random numbers it draws.
        run: takes nothing. (A block would leave room for Ctrl-C between its end and the putting back.)

    Returns:
        What ``run`` returns.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    registered = [_Registered.of(module) for module in modules]
    tensors = list(dict.fromkeys((*model.parameters(), *model.buffers())))
    values = [(t, _version(t), t.detach().clone()) for t in tensors]
    grads = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    interrupts = _Interrupts()
    try:
        interrupts.take_over()
        with torch.random.fork_rng(devices):
            try:
                model.train()
                return run()
            finally:
                interrupts.wait = True
                torch.clear_autocast_cache()
                with ExitStack() as undo:  # does all, last one first, whatever one of them raises
                    for value in values:
                        undo.callback(_restore_value, *value)
                    for module, names in zip(modules, registered, strict=True):
                        undo.callback(names.restore, module)
                    for module, mode in zip(modules, modes, strict=True):
                        undo.callback(setattr, module, "training", mode)
                    for p, trained, grad in grads:
                        undo.callback(setattr, p, "grad", grad)
                        undo.callback(p.requires_grad_, trained)
    finally:
        interrupts.wait = True
        interrupts.hand_back()


class _Interrupts:
    """Handles Ctrl-C as the handler before it, but keeps what comes while ``wait`` is set until it hands back.

    Python runs handlers in the main thread alone, between two of its instructions: no other thread is interrupted.
    Setting an attribute leaves no room for one.
    """

    def __init__(self) -> None:
        self.wait = self.kept = False
        self.before = signal.getsignal(signal.SIGINT)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.wait:
            self.kept = True
        elif callable(self.before):
            self.before(number, frame)

    def take_over(self) -> None:
        # What is no function ignores Ctrl-C, ends the process at once, or is not Python's.
        if callable(self.before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self)

    def hand_back(self) -> None:
        current: object = signal.getsignal(signal.SIGINT)
        if current is self:
            signal.signal(signal.SIGINT, self.before)
        self.wait = False  # a handler that the model set meanwhile may go on to call this one
        if self.kept:
            signal.raise_signal(signal.SIGINT)


def _version(t: Tensor) -> int | None:
    """Count the changes that PyTorch has seen; None where it does not count."""
    return None if t.is_inference() else t._version


class _Registered(NamedTuple):
    """What a module has by name."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    not_persistent: set[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Registered:
        return cls(
            dict(module._parameters.items()), dict(module._buffers.items()), set(module._non_persistent_buffers_set)
        )

    def restore(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # has the same all its life
            return
        for there, names in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
            there.clear()
            there.update(names)  # type: ignore[arg-type]
        module._non_persistent_buffers_set = self.not_persistent


def _restore_value(t: Tensor, version: int | None, value: Tensor) -> None:
    """Write a value back, unseen by graphs that the caller keeps, where the tensor has another."""
    if t.shape != value.shape or t.dtype != value.dtype:
        t.data = value
        return
    try:
        same = torch.equal(t, value)
    except (RuntimeError, NotImplementedError):  # of sparse, nested and meta tensors, for example
        same = True
    if not same or version != _version(t):
        t.data.copy_(value)
