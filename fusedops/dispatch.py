"""Which backend serves a call.

"Can it run?" is declared by each backend (``Limits``, with reasons); "should it run?" is a table of rows with evidence
(``dispatch_table``). ``select`` walks the first row that matches and takes the first backend without a reason against
it. An explicit choice (``backend=``, ``use_backend``, ``FUSEDOPS_BACKEND``) is obeyed or refused, never replaced.
Dispatch changes speed, never documented numerics.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from . import config, dispatch_table
from .config import CONFIG, check_backend, logger
from .dispatch_table import Row
from .errors import FallbackWarning, UnsupportedError


@dataclass(frozen=True)
class Call:
    """What is asked of a backend.

    Attributes:
        op: public name of the op or optimizer.
        device: device type (``"cpu"``, ``"cuda"``, …).
        index: device index, -1 where there is none.
        dtypes: dtype by argument name, absent arguments left out; ``"output"`` is always there.
        hidden: elements worked over together; None while compiling.
        rows: an upper bound of the number of rows (calls are alike up to a power of two of elements); None while
            compiling.
        compiling: traced by torch.compile or torch.export.
        options: further facts a backend may refuse, by name.
    """

    op: str
    device: str
    index: int
    dtypes: tuple[tuple[str, torch.dtype], ...]
    hidden: int | None = None
    rows: int | None = None
    compiling: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of a CUDA device, else None."""
        return torch.cuda.get_device_capability(self.index) if self.device == "cuda" else None


@dataclass(frozen=True)
class Limits:
    """What a backend can serve of one op; each limit gives its own reason.

    Attributes:
        dtypes: dtypes any tensor of the call may have.
        max_hidden: widest row.
        max_elements: most elements of the input.
        min_capability: oldest GPU.
        traceable: may be traced by torch.compile.
        extra: one more test; returns a reason or None.
    """

    dtypes: frozenset[torch.dtype]
    max_hidden: int | None = None
    max_elements: int | None = None
    min_capability: tuple[int, int] | None = None
    traceable: bool = True
    extra: Callable[[Call], str | None] | None = None

    def refuse(self, call: Call) -> list[str]:
        """Return every reason why the call can't be served."""
        reasons = [
            f"{name} is {dtype}; it takes {', '.join(sorted(str(d) for d in self.dtypes))}"
            for name, dtype in call.dtypes
            if dtype not in self.dtypes
        ]
        if self.max_hidden is not None and call.hidden is not None and call.hidden > self.max_hidden:
            reasons.append(f"hidden is {call.hidden}; at most {self.max_hidden} fits")
        elements = None if call.hidden is None or call.rows is None else call.hidden * call.rows
        if self.max_elements is not None and elements is not None and elements > self.max_elements:
            reasons.append(f"up to {elements} elements; at most {self.max_elements} are addressed")
        if self.min_capability and call.capability and call.capability < self.min_capability:
            reasons.append(f"compute capability {call.capability}; it needs {self.min_capability}")
        if call.compiling and not self.traceable:
            reasons.append("it can't be traced by torch.compile")
        if self.extra is not None and (reason := self.extra(call)):
            reasons.append(reason)
        return reasons


@dataclass(frozen=True)
class Choice:
    """The outcome of ``select``: a backend's name, what to call, and whether that checks its arguments itself."""

    backend: str
    run: Callable[..., Any]
    checks_arguments: bool = False


@dataclass(frozen=True)
class Explanation:
    """Why a call is served the way it is; ``print`` it."""

    call: Call
    chosen: str
    origin: str
    row: Row
    verdicts: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        call = self.call
        dtypes = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in call.dtypes)
        size = "" if call.hidden is None else f", hidden {call.hidden}, rows ≤ {call.rows}"
        lines = [f"{call.op} on {call.device}: {dtypes}{size}", f"  runs on   {self.chosen}   ({self.origin})"]
        lines += [f"  row       {' > '.join(self.row.backends)}   ({self.row.source})", f"  why       {self.row.why}"]
        for name, reasons in self.verdicts:
            lines.append(f"  {name:<9} {'can run' if not reasons else 'no: ' + '; '.join(reasons)}")
        return "\n".join(lines)


# The explicit choice in force: op name or "*" → backend. A plain dict, so that Dynamo can guard on it.
_forced: dict[str, str] = dict(CONFIG.forced)
_rows: tuple[Row, ...] = dispatch_table.SHIPPED
# What select chose before, by everything the choice depends on; emptied when the explicit choice changes.
cache: dict[tuple[Any, ...], Choice] = {}
_warned: set[str] = set()
# While a step is recorded (``fusedops.tune``): told of every kind of call that the table is asked for, with its rows,
# the dtype of its first result and its options.
recorder: Callable[[Call, int, torch.dtype, dict[str, Any]], None] | None = None


class use_backend:
    """Force a backend, from here on or within a ``with`` block.

    Args:
        name: ``"native"``, ``"triton"``, ``"apex"``, ``"reference"``, or None to hand the choice back to the table.
        ops: names of ops to force it for; None: all.

    Raises:
        ValueError: a name that is no backend or op.

    A call that the backend can't serve then raises ``UnsupportedError``. The choice is process-wide.
    """

    def __init__(self, name: str | None, ops: Iterable[str] | None = None) -> None:
        if name is not None:
            check_backend(name, "use_backend: name")
        listed = ops is None or (isinstance(ops, Iterable) and not isinstance(ops, str))
        names = ("*",) if ops is None else tuple(ops) if listed else ()
        if not listed or any(op not in ("*", *known_ops()) for op in names):
            raise ValueError(f"use_backend: ops: expected any of {', '.join(known_ops())}, got {ops!r}")
        self._before = dict(_forced)
        if "*" in names:
            _forced.clear()
        for op in names:
            _forced.pop(op, None)
            if name is not None:
                _forced[op] = name
        cache.clear()

    def __enter__(self) -> use_backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _forced.clear()
        _forced.update(self._before)
        cache.clear()


def known_ops() -> tuple[str, ...]:
    """Return the names that dispatch knows: every op and optimizer."""
    from . import registry

    return (*registry.OPS, *registry.OPTIMS)


def check_forced() -> None:
    """Raise ValueError if the environment forces a backend for an op that there is not."""
    if unknown := set(_forced) - {"*", *known_ops()}:
        raise ValueError(
            f"FUSEDOPS_BACKEND: expected ops among {', '.join(known_ops())}, got {', '.join(sorted(unknown))}"
        )


def load_table() -> None:
    """Put the rows of the environment's table before the shipped ones; they name ops, so all have to be known."""
    global _rows
    _rows = dispatch_table.load(CONFIG.table)


def forced_backend(op: str, backend: str | None = None) -> str | None:
    """Return the explicit choice for an op: the argument, else ``use_backend``'s or the environment's, else None."""
    if backend is not None:
        return backend
    return _forced.get(op) or _forced.get("*")


def refusals(name: str, call: Call) -> list[str]:
    """Return every reason why backend ``name`` can't serve the call."""
    from . import backends

    backend = backends.get(name)
    if reason := backend.unavailable(call.device):
        return [reason]
    limits = backend.LIMITS.get(call.op)
    return [f"it has no {call.op}"] if limits is None else limits.refuse(call)


def forget_tuned() -> None:
    """Read the rows that were tuned on this machine anew, at the next choice."""
    dispatch_table.tuned.cache_clear()
    cache.clear()


def _table(call: Call) -> Iterator[Row]:
    """Yield the rows that match a call: of the environment's file, tuned on this machine, shipped."""
    tuned = dispatch_table.tuned(call.device, call.index).get(call.op, ())
    given = [row for row in _rows if row.source != "shipped"]
    shipped = [row for row in _rows if row.source == "shipped"]
    return (row for row in (*given, *tuned, *shipped) if row.matches(call))


def match_row(call: Call) -> Row:
    """Return the first row of the table that matches the call; the last row matches everything."""
    return next(_table(call))


def select(call: Call, backend: str | None = None) -> Choice:
    """Choose a backend for a call.

    Args:
        call: what is asked.
        backend: an explicit choice; None: ``use_backend``, the environment, else the table.

    Returns:
        The choice, whose ``run`` has the backend's own signature for the op.

    Raises:
        ValueError: ``backend`` is no backend's name.
        UnsupportedError: the explicit choice can't serve the call, with every reason.
    """
    from . import backends

    if (forced := forced_backend(call.op, backend)) is not None:
        check_backend(forced, f"{call.op}: backend")
        if reasons := refusals(forced, call):
            raise UnsupportedError(f"{call.op}: backend {forced!r} can't serve this call: {'; '.join(reasons)}")
        chosen = forced
    else:
        chosen = _from_table(call)
    if "dispatch" in CONFIG.logs:
        logger.info("dispatch: %s -> %s", call, chosen)
    return Choice(chosen, *backends.implementation(chosen, call))


@dataclass(frozen=True)
class _Walk:
    """A walk down the table: the row and backend that serve the call, who refused it, and the rows passed by."""

    row: Row
    backend: str
    refused: dict[str, str]
    passed_by: list[Row]


def _walk_table(call: Call) -> _Walk:
    """Find the first matching row with a backend for the call.

    A row of a file may name only backends that are not here, as after a move to another machine: it is passed by.
    """
    refused: dict[str, str] = {}
    passed_by: list[Row] = []
    for row in _table(call):
        for name in row.backends:
            reasons = refusals(name, call)
            if not reasons:
                return _Walk(row, name, refused, passed_by)
            refused[name] = "; ".join(reasons)
        passed_by.append(row)
    raise UnsupportedError(f"{call.op}: no backend can serve this call: {_told(refused)}")


def _told(refused: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refused.items())


def _from_table(call: Call) -> str:
    walk = _walk_table(call)
    for row in walk.passed_by:
        told = _told({name: walk.refused[name] for name in row.backends})
        _warn_fallback(f"{call.op}: the row {' > '.join(row.backends)} ({row.source}) is passed by: {told}")
    if walk.refused and walk.backend == "reference" and call.device in ("cpu", "cuda"):
        _warn_fallback(f"{call.op} runs in plain PyTorch: {_told(walk.refused)}")
    elif walk.refused and "fallback" in CONFIG.logs:
        logger.info("fallback: %s runs on %s: %s", call.op, walk.backend, walk.refused)
    return walk.backend


def _warn_fallback(message: str) -> None:
    """Warn once per reason."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message + ". `fusedops report` shows what is missing.", FallbackWarning, stacklevel=4)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend would serve a call and why.

    Args:
        op: name or public function of an op (``"layer_norm"``, ``fusedops.layer_norm``) or name of an optimizer.
        *args: the call's own arguments; for an optimizer its parameters.
        **kwargs: the call's own keyword arguments, ``backend`` included.

    Returns:
        The row of the table, each backend's verdict with its reasons, and where the choice came from.

    Raises:
        ValueError: an op or backend that dispatch does not know, or an argument that the op refuses.
        TypeError: arguments that the op does not have, or lacks.
    """
    from . import registry
    from .ops._common import why_plain
    from .optim import describe_optimizer

    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    backend = kwargs.pop("backend", None)
    plain = "FUSEDOPS_DISABLE=1" if CONFIG.disabled else None
    if name in registry.OPS:
        given = _bound(name, registry.OPS[name].function, args, kwargs).arguments
        plain = why_plain([value for value in given.values() if isinstance(value, torch.Tensor)])
        call = registry.OPS[name].describe(**{key: _first_component(value) for key, value in given.items()})
    elif name in registry.OPTIMS:
        optimizer = registry.OPTIMS[name].optimizer
        bound = _bound(name, optimizer, args, kwargs)
        bound.apply_defaults()
        call = describe_optimizer(name, optimizer.__name__, bound.arguments)
    else:
        raise ValueError(f"explain: op: expected one of {', '.join(known_ops())}, got {name!r}")
    if backend is not None:
        check_backend(backend, f"{name}: backend")
    verdicts = tuple((other, tuple(refusals(other, call))) for other in config.BACKENDS)
    if plain:
        return Explanation(call, "reference", plain, match_row(call), verdicts)
    forced = forced_backend(name, backend)
    origin = "backend= argument" if backend else "use_backend or FUSEDOPS_BACKEND" if forced else "dispatch table"
    if forced:
        chosen = f"nothing: {forced} was asked for and can't serve it" if refusals(forced, call) else forced
        return Explanation(call, chosen, origin, match_row(call), verdicts)
    try:
        walk = _walk_table(call)
    except UnsupportedError:
        return Explanation(call, "nothing can serve it", origin, match_row(call), verdicts)
    return Explanation(call, walk.backend, origin, walk.row, verdicts)


def _bound(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Give arguments their names, as a call of the function would."""
    try:
        return inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _first_component(argument: Any) -> Any:
    """Take the first component of a nested tensor of the strided layout, which has no shape of its own."""
    nested = isinstance(argument, torch.Tensor) and argument.is_nested and argument.layout is torch.strided
    return argument.unbind()[0] if nested and argument.size(0) else argument
