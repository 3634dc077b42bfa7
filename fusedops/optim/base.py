"""What every optimizer of ours shares: groups, lazily made state, one plan a device, the gradient scaler's protocol.

A *plan* is a backend's step for the tensors of one device. It is kept across steps and made anew when parameters, state
objects or the groups' structure change; what may change between steps (gradients, learning rates, decays) is passed to
``plan.prepare`` each time, which checks and allocates. Only when all plans are prepared is new state kept and does
``plan.launch`` write: a step that raises has changed nothing, on any device. Nothing here waits for a device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _options, backends
from ..config import CONFIG
from ..dispatch import forced_backend, select
from . import checks, states
from .calls import adam_call, describe, keeper
from .options import Options, read_options, watched
from .overlaps import Places, check_added, check_overlaps

_PLAIN = frozenset((*checks.FLAGS, *states.RUN_KEYS, "seed"))
_AS_THEY_ARE = frozenset((float, int, bool, type(None)))  # numbers of a step, flags and seeds


@dataclass(slots=True)
class Bucket:
    """The parameters of one device that one plan updates, in group order.

    Attributes:
        device: where all tensors of the bucket are.
        backend: module of the backend that serves it.
        params: parameters that have state.
        group: index of each one's group.
        index: of each one in the optimizer, all groups counted through.
        states: state of each one, by torch's keys.
        plan: the backend's step.
    """

    device: torch.device
    backend: Any = None
    params: list[Tensor] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    plan: Any = None

    def column(self, key: str) -> list[Tensor | None]:
        """Return one state tensor of every parameter, None where a parameter has none."""
        return [state.get(key) for state in self.states]


@dataclass(slots=True)
class _Seen:
    """What the plans were built from, to tell by identity when they no longer fit.

    Attributes:
        params: every parameter, in group order.
        states: values of ``state``, in its order.
        planned: state of every parameter that a plan updates.
        values: every tensor in ``planned``.
        structure: see ``Options``.
        forced: the explicit choice of a backend.
        waiting: parameters that never had a gradient, hence no state.
    """

    params: list[Tensor]
    states: list[Any]
    planned: list[dict[str, Any]]
    values: list[Any]
    structure: list[tuple[Any, ...]]
    forced: str | None
    waiting: list[Tensor]


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers of Adam's family: one launch updates all groups and dtypes of a device.

    A subclass names itself to dispatch (``op``), its per-element state (``moments``), builds a backend's plan
    (``make_plan``) and lists the per-group numbers of a step (``arguments``).

    Threads may share an optimizer: what steps, reads or replaces its state waits for its turn, ``zero_grad`` too, since
    a step reads the gradients. What runs on several streams of a GPU has to be put in order there, as ever.

    Attributes:
        max_grad_norm: the gradients' norm is clipped to it within the step, or None.
        grad_norm: 0-dim norm of the last step's unscaled gradients, on the first one's device; None where the step had
            no reason to measure it (``max_grad_norm``, or a step by ``fusedops.amp.GradScaler``).
    """

    op: ClassVar[str]

    _buckets: list[Bucket] | None
    _seen: _Seen
    _last_options: Options | None
    _places: Places | None  # between groups that are added, where the parameters lie
    _lock: threading.RLock
    grad_norm: Tensor | None

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, max_grad_norm: float | None, backend: str | None
    ) -> None:
        owner = type(self).__name__
        checks.check_max_grad_norm(owner, max_grad_norm)
        defaults = {name: _plain_option(name, value) for name, value in defaults.items()}
        checks.check_group(owner, {**defaults, "params": ()})
        self.max_grad_norm = max_grad_norm
        self.backend = backend
        self._warned_lost_updates = False
        self._lock = threading.RLock()
        self._complete = False
        self._places = None
        super().__init__(params, defaults)
        check_overlaps(owner, self._parameters())  # once, not with each of its groups
        self._reset()

    # ---- what a subclass provides ----

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the keys of the group's per-element state tensors, which start at zero."""
        raise NotImplementedError

    def make_plan(self, bucket: Bucket) -> Any:
        """Return the backend's plan for a bucket."""
        raise NotImplementedError

    def arguments(self) -> tuple[Sequence[Any], ...]:
        """Return the per-group sequences that ``plan.prepare`` takes after the gradients; first the learning rates."""
        raise NotImplementedError

    # ---- torch.optim.Optimizer ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see ``torch.optim.Optimizer.add_param_group``.

        The caller's dict is left as it is.

        Raises:
            ValueError: a parameter or option that the optimizer can't work with; nothing has been added then.
        """
        with self._lock:
            self._add_param_group(param_group)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        owner = type(self).__name__
        places, self._places = self._places, None  # who refuses the group must not leave it there
        if isinstance(param_group, dict):
            param_group = {name: _plain_option(name, value) for name, value in param_group.items()}
            params = param_group["params"]
            if not isinstance(params, set):  # torch's own TypeError says why
                param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
                checks.check_no_group_option(owner, param_group)
                filled = {**self.defaults, **param_group}
                checks.check_group(owner, filled)
                if self._complete:
                    added = (p[1] if isinstance(p, tuple) else p for p in param_group["params"])
                    places = check_added(owner, self._parameters(), added, places)
                if self.backend is not None and param_group["params"]:
                    select(describe(self.op, [filled]), self.backend)  # an explicit choice is refused here, not in step
        super().add_param_group(param_group)
        self._buckets, self._places = None, places
        if not self._warned_lost_updates:
            self._warned_lost_updates = checks.warn_lost_updates(owner, self.param_groups[-1])

    profile_hook_step = staticmethod(watched)  # type: ignore[assignment]  # torch's constructor puts it around step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            ValueError: a gradient that does not fit its parameter, or a group's option that makes no sense; nothing has
                been written then.
            UnsupportedError: a backend was chosen that can't serve these parameters, with every reason.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or fill them with zeros; see ``torch.optim.Optimizer.zero_grad``."""
        with self._lock:
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; ``capturable`` is always saved as False.

        A 16-bit parameter's state may hold one more tensor: its fp32 ``master`` (``master_weights``) or its
        ``compensation`` (``kahan_sum``).

        A state dict of ours loads into torch.optim, which casts the state of 16-bit parameters to their dtype; see
        ``convert_state_dict``.
        """
        with self._lock:
            saved = super().state_dict()
        for group in saved["param_groups"]:
            group["capturable"] = False  # else torch would demand a capturing run of whoever loads it
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of ours or of the torch optimizer of the same name.

        Every tensor is copied and keeps its saved dtype; ``state_dtype``, where given, decides instead. So do
        ``master_weights``, ``kahan_sum`` and ``bf16_stochastic_round`` where one was given, else the dict's own count.
        Masters and compensations are taken from the dict, else made from each other or from the parameters. Flags,
        decays and rates may be whatever numbers torch steps with, as ``amsgrad=1`` or a ``weight_decay`` in a tensor.

        Raises:
            ValueError: groups, shapes or the kind of weight decay differ, or a value makes no sense; nothing has been
                loaded then.
        """
        with self._lock:
            states.load(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_lock", threading.RLock())
        for key in ("max_grad_norm", "backend"):
            self.__dict__.setdefault(key, None)
        for options in (self.defaults, *self.param_groups):
            options.update({key: value for key, value in states.OURS.items() if key not in options})
        self._warned_lost_updates = True
        self._reset()

    # ---- gradient scaler ----

    def step_scaled(self, grad_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Step on gradients that are ``grad_scale`` times too large, looking for inf and NaN in the same read.

        Args:
            grad_scale: 1-element fp32.
            found_inf: 1-element fp32 zero; becomes 1 where a gradient holds an inf or NaN, and then nothing changes.
            *args: passed to ``step``.
            **kwargs: passed to ``step``.

        Returns:
            What ``step`` returned.
        """
        with self._lock:
            given = getattr(self, "grad_scale", None)
            self.grad_scale = grad_scale if given is None else grad_scale * given  # a user's own counts, as in torch
            self.found_inf, self._fill_found_inf = found_inf, True
            try:
                return self.step(*args, **kwargs)
            finally:
                del self.grad_scale, self.found_inf
                self._fill_found_inf = False

    @property
    def step_was_skipped(self) -> Tensor:
        """Whether the last step changed nothing because a gradient held an inf or NaN: 0-dim bool.

        On the device where a scaler looked, on the CPU before any step and after one without a scaler. With
        ``fused=False`` ``torch.amp.GradScaler`` does not call the step that it skips, so that it isn't seen here;
        ``fusedops.amp.GradScaler`` tells.
        """
        found = self._last_found_inf
        return torch.zeros((), dtype=torch.bool, device="cpu") if found is None else found.reshape(()) != 0

    # ---- the step ----

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _reset(self) -> None:
        self._complete = True  # of groups that its maker gave
        self._buckets = None
        self._last_options = None
        self._places = None
        self._fill_found_inf = False  # fusedops.amp.GradScaler: measure the gradients into found_inf
        self._step_supports_amp_scaling = self.defaults.get("fused") is not False  # torch's protocol and way out
        self.grad_norm = None
        self._warned_captured_rate = False
        self._last_found_inf: Tensor | None = None

    @torch.compiler.disable
    def _update(self) -> None:
        with self._lock:
            self._take_step()

    def _take_step(self) -> None:
        checks.check_max_grad_norm(type(self).__name__, self.max_grad_norm)
        options = read_options(type(self).__name__, self.param_groups, self.arguments, self._last_options)
        buckets, made = self._buckets, None
        if buckets is None or not self._plans_hold(options):
            buckets, made = self._make_plans()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if not isinstance(found_inf, Tensor):
            found_inf = None  # torch's scaler sets the number 0 where no parameter has a gradient
        measured = norm = limit = None
        arguments = options.arguments
        self._warn_captured_rates(buckets, arguments[0])
        checks.check_scaling(type(self).__name__, grad_scale, found_inf)
        if not all(backends.checks_arguments(bucket.backend) for bucket in buckets):
            checks.check_gradients(type(self).__name__, self._parameters())
        try:
            if self.max_grad_norm is not None or self._fill_found_inf:
                measured = self._measure(buckets, grad_scale, found_inf if self._fill_found_inf else None)
            if self.max_grad_norm is not None and measured is not None:
                norm, limit = measured, float(self.max_grad_norm)
            for bucket in buckets:
                device = bucket.device
                here = [_to(x, device) for x in (grad_scale, found_inf, norm)]
                columns = arguments if options.plain else [[_number(x, device) for x in column] for column in arguments]
                bucket.plan.prepare(*columns, *here, limit)
        except (ValueError, TypeError, RuntimeError) as error:
            owner = type(self).__name__
            checks.check_gradients(owner, self._parameters())  # the same words, whoever refused
            if isinstance(error, ValueError):  # a backend knows the argument's name, not the optimizer's
                raise ValueError(f"{owner}: {error}") from error
            raise
        if made is not None:
            self._keep(buckets, made, options)
        self._last_options, self.grad_norm = options, measured
        for bucket in buckets:
            bucket.plan.launch()
        self._last_found_inf = found_inf

    def _warn_captured_rates(self, buckets: list[Bucket], rates: Sequence[Any]) -> None:
        """Warn once where a CUDA graph is about to keep a learning rate that is a number: replays run no Python."""
        if self._warned_captured_rate or not torch.cuda.is_initialized() or all(isinstance(lr, Tensor) for lr in rates):
            return
        if any(b.device.type == "cuda" for b in buckets) and torch.cuda.is_current_stream_capturing():
            self._warned_captured_rate = True
            checks.warn(
                f"{type(self).__name__}: lr is a number, which this CUDA graph keeps: replays ignore a change. "
                "Pass a tensor on the device, as lr=torch.tensor(1e-3, device='cuda')."
            )

    def _measure(self, buckets: list[Bucket], grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor | None:
        """Return the norm of all unscaled gradients, set ``found_inf`` where one is not finite; one read of each."""
        norms = []
        for bucket in buckets:
            found = found_inf
            if found_inf is not None and found_inf.device != bucket.device:
                found = torch.zeros_like(found_inf, device=bucket.device)
            norm = bucket.plan.grad_norm(_to(grad_scale, bucket.device), found)
            if norm is None:
                continue
            norms.append(norm)
            if found is not None and found_inf is not None and found is not found_inf:
                torch.maximum(found_inf, found.to(found_inf.device), out=found_inf)
        return combine_norms(norms) if norms else None

    def _plans_hold(self, options: Options) -> bool:
        """Tell whether the plans still describe the parameters, the state objects and the groups' structure."""
        seen = self._seen
        same: Callable[[list[Any], list[Any]], bool] = backends.get("native").same_objects
        return (
            same(seen.params, [group["params"] for group in self.param_groups])
            and same(seen.states, [self.state])
            and same(seen.values, seen.planned)
            and seen.structure == options.structure
            and seen.forced == forced_backend(self.op, self.backend)
            and not any(p.grad is not None for p in seen.waiting)
        )

    @torch.no_grad()
    def _make_plans(self) -> tuple[list[Bucket], dict[Tensor, dict[str, Any]]]:
        """Return one bucket a device, with its plan, and what becomes of each parameter's state.

        Missing state is made and state that others replaced is mended, beside what there is: the step may still fail.
        """
        owner = type(self).__name__
        params = self._parameters()
        checks.check_gradients(owner, params)
        check_overlaps(owner, params)
        made: dict[Tensor, dict[str, Any]] = {}
        buckets: dict[Any, Bucket] = {}
        number = -1
        for i, group in enumerate(self.param_groups):
            checks.check_group(f"{owner}: group {i}", group)
            moments = self.moments(group)
            for p in group["params"]:
                number += 1
                state = dict(self.state.get(p, {}))
                if not state and p.grad is None:
                    continue
                made[p] = state
                states.complete(f"{owner}: state of parameter {number}", state, p, group, moments)
                bucket = buckets.setdefault((p.device, checks.is_plain(p)), Bucket(p.device))
                bucket.params.append(p)
                bucket.group.append(i)
                bucket.index.append(number)
                bucket.states.append(state)
        for (_, plain), bucket in buckets.items():
            bucket.backend = self._choose_backend(bucket, plain)
            try:
                bucket.plan = self.make_plan(bucket)
            except ValueError as error:
                raise ValueError(f"{owner}: {error}") from error
        return [*buckets.values()], made

    def _keep(self, buckets: list[Bucket], made: dict[Tensor, dict[str, Any]], options: Options) -> None:
        """Make plans and their state the optimizer's own, once nothing can fail any more."""
        for p, state in made.items():
            live = self.state.setdefault(p, {})
            live.clear()
            live.update(state)
        for bucket in buckets:
            bucket.states = [self.state[p] for p in bucket.params]
        planned = [state for bucket in buckets for state in bucket.states]
        params = self._parameters()
        self._seen = _Seen(
            params=params,
            states=[*self.state.values()],
            planned=planned,
            values=[value for state in planned for value in state.values()],
            structure=options.structure,
            forced=forced_backend(self.op, self.backend),
            waiting=[p for p in params if p not in made],
        )
        self._buckets, self._places = buckets, None  # the plans' parameters may leave the groups, and be freed

    def _choose_backend(self, bucket: Bucket, plain: bool) -> ModuleType:
        if CONFIG.disabled or not plain:
            return backends.get("reference")
        groups = [self.param_groups[i] for i in bucket.group]
        amsgrad = any(group["amsgrad"] for group in groups)
        stored = [
            (p, state["exp_avg"].dtype, keeper(p, group))
            for p, state, group in zip(bucket.params, bucket.states, groups, strict=True)
        ]
        return backends.get(select(adam_call(self.op, stored, amsgrad), self.backend).backend)


def combine_norms(norms: Sequence[Tensor]) -> Tensor:
    """Return the 0-dim norm of what the given norms (1 element each, any devices) are of, on the first one's device."""
    if len(norms) == 1:
        return norms[0].reshape(())
    device = norms[0].device
    dtype = torch.float64 if any(n.dtype is torch.float64 for n in norms) else torch.float32
    return torch.linalg.vector_norm(torch.cat([on_device(n, device).to(dtype).reshape(1) for n in norms]))


def on_device(t: Tensor, device: torch.device) -> Tensor:
    """Return ``t`` on a device; only a copy to the CPU is waited for, as its value is read there at once."""
    return t if t.device == device else t.to(device, non_blocking=device.type != "cpu")


def _to(t: Tensor | None, device: torch.device) -> Tensor | None:
    return None if t is None else on_device(t, device)


def _plain_option(name: str, value: Any) -> Any:
    """Return a group's option, flags and seeds of NumPy's as Python's own: any file can hold these."""
    return _options.plain(value) if name in _PLAIN else value


def _number(value: Any, device: torch.device) -> Any:
    """Return what a plan on ``device`` can read: Python's own numbers, tensors of fp32 or fp64 there or on the CPU."""
    if type(value) in _AS_THEY_ARE:
        return value
    if not isinstance(value, Tensor):
        value = _options.plain(value)  # NumPy's scalars and the like, which not all of torch takes
        return value if type(value) in _AS_THEY_ARE else float(value)
    if value.dtype not in (torch.float32, torch.float64):
        value = value.to(torch.float32)
    return value if value.device.type == "cpu" else on_device(value, device)
