"""Which backend should serve a call: rows as literals, each with its evidence.

The first row that matches is taken. Rows of a file (``FUSEDOPS_TABLE``) stand first, then those that ``fusedops tune``
measured on this machine, then the shipped ones. A file that can't be read as rows, or has one that no call can match,
is ignored with one warning; so is a tuned one that was made for another machine or by somebody else. Ops are those
that are registered when fusedops has been imported, device types those of torch, third parties' among them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import machine
from ._files import MIB, read_json
from .config import BACKENDS

if TYPE_CHECKING:
    from .dispatch import Call

_ANY = (0, 2**63)


@dataclass(frozen=True)
class Row:
    """Backends in the order of preference for the calls it matches.

    Attributes:
        ops: op names; empty: every op.
        device: device type, or None for any.
        backends: names, best first.
        why: the evidence: results file and date, or a stated default.
        capability: lowest and highest compute capability as ``10 * major + minor``.
        dtypes: dtype of the input (``"bfloat16"``), empty: any.
        arguments: name and dtype of every tensor of the call, results among them; empty: any.
        options: options of an optimizer's call, by name; any value for those that are not named.
        hidden: narrowest and widest row.
        rows: fewest and most rows.
        source: where the row comes from.
    """

    ops: tuple[str, ...]
    device: str | None
    backends: tuple[str, ...]
    why: str
    capability: tuple[int, int] = _ANY
    dtypes: tuple[str, ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    hidden: tuple[int, int] = _ANY
    rows: tuple[int, int] = _ANY
    source: str = "shipped"

    def matches(self, call: Call) -> bool:
        """Tell whether the row is about this call; a size unknown while compiling matches only an unlimited range."""
        if (self.ops and call.op not in self.ops) or (self.device and call.device != self.device):
            return False
        if not (_within(call.hidden, self.hidden) and _within(call.rows, self.rows)):
            return False
        if self.dtypes and dtype_name(call.dtypes[0][1]) not in self.dtypes:
            return False
        if self.arguments and {(name, dtype_name(dtype)) for name, dtype in call.dtypes} != {*self.arguments}:
            return False
        if not {*self.options} <= {*call.options}:
            return False
        found = call.capability if self.capability != _ANY else None
        return _within(None if found is None else 10 * found[0] + found[1], self.capability)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in rows, as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _within(value: int | None, limits: tuple[int, int]) -> bool:
    return limits == _ANY if value is None else limits[0] <= value <= limits[1]


SHIPPED: tuple[Row, ...] = (
    Row(
        (),
        "cpu",
        ("native", "reference"),
        "default: compiled CPU kernels, else plain PyTorch; Triton only interprets there",
    ),
    Row((), "cuda", ("native", "triton", "reference"), "default for GPUs without a measured row"),
    Row((), None, ("triton", "reference"), "default for other devices: Triton where it exists, else plain PyTorch"),
)


_MOST = 4 * MIB  # thousands of rows


def load(path: str | None) -> tuple[Row, ...]:
    """Return the table: rows of the JSON file at ``path``, if given and sound, then the shipped ones."""
    if path is None:
        return SHIPPED
    try:
        return (*_parse(read_json(Path(path), most=_MOST), path), *SHIPPED)
    except (OSError, ValueError) as error:
        _warn_ignored(path, error)
        return SHIPPED


@functools.cache
def tuned(device: str, index: int) -> Mapping[str, tuple[Row, ...]]:
    """Return the rows that were tuned on a device of this machine, by op; read once a process, at the first choice.

    Args:
        device: its type.
        index: its index, -1 where there is none.
    """
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        return {}
    here = machine.facts(torch.device(device) if index < 0 else torch.device(device, index))
    path = machine.tuned_file(here)
    found: dict[str, list[Row]] = {}
    for row in () if path is None else load_tuned(path, here):
        for op in row.ops:
            found.setdefault(op, []).append(row)
    return {op: tuple(rows) for op, rows in found.items()}


def load_tuned(path: Path, here: machine.Facts) -> tuple[Row, ...]:
    """Return the rows of a file that was tuned on a machine; none, with a warning unless it is absent, if unsound."""
    try:
        data = read_json(path, most=_MOST, own=True)
        rows = _parse(data, f"tuned: {path}")
        if data.get("machine") != here:
            raise ValueError(f"machine: expected {here}, got {data.get('machine')!r:.300}")
        for number, row in enumerate(rows):
            may = automatic(here["device"])
            if row.device != here["device"] or not set(row.backends) <= set(may):
                raise ValueError(
                    f"rows[{number}]: expected {', '.join(may)} on {here['device']}, got {', '.join(row.backends)} on "
                    f"{row.device}"
                )
        return rows
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError) as error:
        _warn_ignored(str(path), error)
        return ()


def automatic(device: str) -> tuple[str, ...]:
    """Return the backends that may serve calls on a device type without being asked for."""
    rows = [row for row in SHIPPED if row.device == device] or [row for row in SHIPPED if row.device is None]
    return tuple(dict.fromkeys(name for row in rows for name in row.backends))


def _warn_ignored(path: str, error: Exception) -> None:
    warnings.warn(f"fusedops: the dispatch table {path} is ignored: {error}", UserWarning, stacklevel=3)


def _parse(data: Any, source: str) -> tuple[Row, ...]:
    """Build rows from ``{"rows": [{…}, …]}``, beside which may stand the ``"machine"`` they were measured on.

    Raises:
        ValueError: what is no row, and a row that no call can match, with its key, what was expected and what came.
    """
    if not (
        isinstance(data, dict)
        and {"rows"} <= data.keys() <= {"rows", "machine"}
        and isinstance(data["rows"], list)
        and isinstance(data.get("machine", {}), dict)
    ):
        raise ValueError(f'rows: expected {{"rows": [...]}} with nothing beside it but "machine", got {data!r:.80}')
    return tuple(make_row(item, f"rows[{number}]", source) for number, item in enumerate(data["rows"]))


def make_row(item: Any, where: str, source: str) -> Row:
    """Build a row from what stands for it in a file.

    Raises:
        ValueError: no call can match it, or it is no row: ``where`` it is, with its key.
    """
    from .registry import OPTIMS

    keys = _keys()
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected an object, got {item!r:.80}")
    for key, value in item.items():
        if key not in keys:
            raise ValueError(f"{where}: {key}: expected a key among {', '.join(keys)}, got the value {value!r:.80}")
        expected, sound = keys[key]
        if not sound(value):
            raise ValueError(f"{where}: {key}: expected {expected}, got {value!r:.80}")
    for key in _REQUIRED:
        if key not in item:
            raise ValueError(f"{where}: {key}: expected {keys[key][0]}, got a row without it")
    if "capability" in item and item["device"] not in ("cuda", None):
        raise ValueError(f"{where}: capability: expected none but for device 'cuda', got one for {item['device']!r}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
    if "options" in item and not (item["ops"] and {*item["ops"]} <= OPTIMS.keys()):
        raise ValueError(f"{where}: options: expected none but for {', '.join(OPTIMS)}, got some for {item['ops']}")
    for key in ("arguments", "options"):
        values[key] = tuple(item.get(key, {}).items())
    return Row(**values, source=source)


_REQUIRED = tuple(item.name for item in fields(Row) if item.default is MISSING)


def _keys() -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Return the keys of a row in a file: what each expects, in words and as a test of a value."""
    from .dispatch import known_ops
    from .optim.checks import KEEPERS
    from .registry import OPS

    arguments = {"param", "state", "grad", *(name for op in OPS.values() for name in (*op.grads, *op.outputs))}
    sizes = ("two integers ≥ 0, the lower first", _are_limits)
    ops = known_ops()
    return {
        "ops": (f"a list of ops, of {', '.join(ops)}", lambda value: _are_names(value, ops.__contains__)),
        "device": ("a device type that torch knows, or null", lambda value: value is None or _is_device(value)),
        "backends": (
            f"a list of backends, one at least, of {', '.join(BACKENDS)}",
            lambda value: _are_names(value, BACKENDS.__contains__) and bool(value),
        ),
        "why": ("text", lambda value: isinstance(value, str)),
        "capability": sizes,
        "dtypes": ("a list of torch's dtypes, such as float32", lambda value: _are_names(value, _is_dtype)),
        "arguments": (
            f"torch's dtypes by argument, of {', '.join(sorted(arguments))}",
            lambda value: (
                isinstance(value, dict)
                and _are_names([*value], arguments.__contains__)
                and _are_names([*value.values()], _is_dtype)
            ),
        ),
        "options": (
            f'an optimizer\'s: "amsgrad", true or false, and "keep", "" or one of {", ".join(KEEPERS)}',
            lambda value: (
                isinstance(value, dict)
                and value.keys() <= {"amsgrad", "keep"}
                and isinstance(value.get("amsgrad", True), bool)
                and value.get("keep", "") in ("", *KEEPERS)
            ),
        ),
        "hidden": sizes,
        "rows": sizes,
    }


def _are_names(value: Any, known: Callable[[str], bool]) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and known(name) for name in value)


def _are_limits(value: Any) -> bool:
    return (
        isinstance(value, list)
        and [type(limit) for limit in value] == [int, int]  # a bool is none
        and 0 <= value[0] <= value[1]
    )


def _is_device(value: Any) -> bool:
    """Tell a device's type, which may be of a third party's; with an index it is none, and matches no call."""
    try:
        return isinstance(value, str) and torch.device(value).type == value
    except RuntimeError:
        return False


def _is_dtype(name: str) -> bool:
    """Tell the name that a dtype has itself: calls are not matched by another (``float``)."""
    return str(getattr(torch, name, None)) == f"torch.{name}"
