"""``fusedops.tune`` and ``fusedops.warmup``: one step of a model, run for what it calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import dispatch, machine
from .._options import number
from ..config import CONFIG
from ..dispatch import Call
from ..errors import UnsupportedError
from ..ops._common import wide
from .preserve import preserving

if TYPE_CHECKING:
    from .cells import Cell
    from .table import Measured


@dataclass(frozen=True)
class TuneReport:
    """What ``tune`` measured for a model; ``print`` it.

    Attributes:
        cells: each kind of call with its times by backend.
        not_reached: kinds of calls that the budget was too small for, in words.
        file: the dispatch table, which is used from now on; None where nothing was measured.
        before_ms: time of a step (forward and backward) with the choices so far.
        after_ms: and with those made now; ``before_ms`` where none has changed.
    """

    cells: tuple[Measured, ...]
    not_reached: tuple[str, ...]
    file: str | None
    before_ms: float
    after_ms: float

    def __str__(self) -> str:
        from .table import as_text

        lines = [as_text(self.cells)] if self.cells else ["No call of this step is chosen for: nothing to measure."]
        lines += [f"not reached within the budget: {text}" for text in self.not_reached]
        saved = self.before_ms - self.after_ms
        after = f"before, {self.after_ms:.3f} ms after: {saved:.3f} ms saved, {100 * saved / self.before_ms:.1f} %"
        same = "as before: no choice has changed"
        lines.append(f"forward and backward: {self.before_ms:.3f} ms {after if saved else same}")
        return "\n".join([*lines, *([f"used from now on: {self.file}"] if self.file else [])])


def tune(model: nn.Module, batch: Any, budget: float = 60) -> TuneReport:
    """Measure the backends for the calls that a training step of ``model`` makes, and use the best from now on.

    Runs the step, forward and backward in training mode, 13 times: once for what it calls, and six times each for its
    time before and after. Parameters, gradients, buffers, modes and PyTorch's random numbers are as before afterwards,
    also after an error or Ctrl-C (which takes memory for a copy of the parameters and buffers); what else the model's
    own code keeps is not. Each step has a copy of the batch's tensors, and the graph and the gradients behind them are
    left alone.

    Args:
        model: calls fusedops' ops, as after ``fusedops.patch``; where it and the batch are is where is measured.
        batch: what the model is called with: a tensor, a tuple or list of arguments, or a mapping of named ones, which
            may hold more of these and dataclasses; what is hidden in another object goes in as it is. The loss is the
            output's ``loss``, else the sum of all floating-point results.
        budget: seconds for measuring, beside the 13 steps; what was measured before is not measured again.

    Returns:
        Times by backend, the choices, and the step's time before and after; printed as well.

    Raises:
        ValueError: an argument of a wrong kind, results without a gradient, or files in the cache folder that are
            another user's or hold something else.
        OSError: the cache folder can't be written.
        RuntimeError: a CUDA graph is being captured, or ``torch.inference_mode`` is on.
        UnsupportedError: ``FUSEDOPS_DISABLE=1``.

    The rows go to a file in the user's cache folder and serve every process on this machine. Calls inside compiled
    code, and calls whose backend was named, don't ask the table for rows of a size and are not measured. Dispatch
    changes speed only.
    """
    from .cells import recorded_cell
    from .measure import tune_cells
    from .store import Store

    _check("tune", model)
    budget = number("tune", "budget", budget, "a finite number > 0", math.ulp(0.0))
    if CONFIG.disabled:
        raise UnsupportedError("tune: FUSEDOPS_DISABLE=1 is set: everything is plain PyTorch, and nothing is chosen")
    devices = _devices(model, batch)
    calls, before = preserving(model, devices, lambda: (_recorded(model, batch), _step_ms(model, batch)))
    recorded = [recorded_cell(*call) for call in calls]
    choices = [dispatch.select(cell.call).backend for cell in recorded]
    measured: list[Measured] = []
    not_reached: list[str] = []
    files: list[str] = []
    by_device: dict[torch.device, list[Cell]] = {}
    for cell in recorded:
        by_device.setdefault(_device(cell.call), []).append(cell)
    for device, cells in by_device.items():
        here = machine.facts(device)
        if (path := machine.tuned_file(here)) is None:
            raise ValueError("tune: expected a home folder or XDG_CACHE_HOME, to keep the table in")
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # samples are drawn at random
            found = tune_cells(cells, device, Store(path, here), budget / len(by_device))
        measured += found.measured
        not_reached += [str(cell) for cell in found.not_reached]
        files.append(str(path))
    dispatch.forget_tuned()
    # Whatever was chosen: a distributed model's other processes take as many steps.
    after = preserving(model, devices, lambda: _step_ms(model, batch))
    if choices == [dispatch.select(cell.call).backend for cell in recorded]:
        after = before
    report = TuneReport(tuple(measured), tuple(not_reached), ", ".join(files) or None, before, after)
    print(report)
    return report


def warmup(model: nn.Module, batch: Any) -> None:
    """Run one training step of ``model`` before a CUDA graph is captured, so that nothing is compiled meanwhile.

    Forward and backward, in training mode, on the current stream: every Triton kernel of the step is compiled and every
    backend chosen. Parameters, gradients, buffers, modes and PyTorch's random numbers are as before afterwards, and the
    graph and the gradients behind the batch are left alone. An optimizer's step is not part of it: take one before
    capturing.

    Args:
        model: any module.
        batch: what it is called with; see ``tune``.

    Raises:
        ValueError: ``model`` is no module, or its results have no gradient.
        RuntimeError: a CUDA graph is being captured already, or ``torch.inference_mode`` is on.
    """
    _check("warmup", model)
    preserving(model, _devices(model, batch), lambda: _finished_step(model, batch))


def _check(owner: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{owner}: model: expected a module, got {model!r:.200}")
    if any(nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise ValueError(f"{owner}: model: expected initialised parameters, got lazy ones: call the model once before")
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{owner}: a CUDA graph is being captured, which must not measure or compile: "
            "call fusedops.warmup(model, batch), or tune, before the capture begins"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{owner}: torch.inference_mode() is on, and nothing has a gradient in it: call it outside")


# ---------------------------------------------------------------- one step


def _step(model: nn.Module, batch: Any) -> None:
    """Run forward and backward, under the caller's autocast as far as that reaches forward."""
    torch.clear_autocast_cache()  # a step in training has its own block of autocast
    for p in model.parameters():
        p.grad = None
    with torch.enable_grad():
        batch = _copied(batch, {})
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
        loss = _loss(output)
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()


def _finished_step(model: nn.Module, batch: Any) -> None:
    _step(model, batch)
    for device in _devices(model, batch):
        torch.cuda.synchronize(device)


def _loss(output: Any) -> Tensor:
    """Return a model's own loss, else the sum of its floating-point results."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [own] if isinstance(own, Tensor) else list(_tensors(output))
    sums = [t.sum(dtype=wide(t.dtype)) for t in found if t.is_floating_point() and t.requires_grad]
    if not sums:
        raise ValueError("model: expected a floating-point result with a gradient, got none")
    return torch.stack([one.to(sums[0]) for one in sums]).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, item.name) for item in fields(value)])


def _copied(value: Any, made: dict[int, Tensor]) -> Any:
    """Copy the tensors that ``_tensors`` finds, and what they are in.

    Args:
        value: a batch or a part of it.
        made: the copies so far by the original's ``id``: a tensor that is there twice still is.
    """
    if isinstance(value, Tensor):
        if id(value) not in made:
            made[id(value)] = _copied_tensor(value)
        return made[id(value)]
    if isinstance(value, MutableMapping):
        found: Any = copy.copy(value)
        found.update({key: _copied(part, made) for key, part in value.items()})
        return found
    if isinstance(value, Mapping):
        return {key: _copied(part, made) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_copied(part, made) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        for item in fields(value):
            object.__setattr__(found, item.name, _copied(getattr(value, item.name), made))  # it may be frozen
        return found
    return value


def _copied_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor to a leaf where it is one; else to the result of a copy, which may be written to as well."""
    if tensor.is_leaf:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return tensor.detach().requires_grad_().clone()


def _step_ms(model: nn.Module, batch: Any) -> float:
    from ..bench import timing

    devices = _devices(model, batch)
    device = devices[0] if devices else torch.device("cpu")
    _step(model, batch)
    return timing.wall_time(lambda: _step(model, batch), device, calls=1) / 1e3


def _devices(model: nn.Module, batch: Any) -> list[torch.device]:
    """Return the GPUs that a step runs on."""
    tensors = [*model.parameters(), *model.buffers(), *_tensors(batch)]
    return list(dict.fromkeys(t.device for t in tensors if t.device.type == "cuda"))


def _device(call: Call) -> torch.device:
    return torch.device(call.device) if call.index < 0 else torch.device(call.device, call.index)


def _recorded(model: nn.Module, batch: Any) -> list[tuple[Any, ...]]:
    """Run a step and return every kind of call that the dispatch table was asked for; see ``dispatch.recorder``."""
    calls: list[tuple[Any, ...]] = []
    dispatch.cache.clear()
    dispatch.recorder = lambda *call: calls.append(call)
    try:
        _step(model, batch)
    finally:
        dispatch.recorder = None
    return [(call, rows, *others) for call, rows, *others in calls if rows and call.hidden]
