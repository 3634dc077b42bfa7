"""Which backend should serve a call: rows as literals, each with its evidence.

The first row that matches is taken. Rows of a file (``FUSEDOPS_TABLE``) stand before the shipped ones; a file that
can't be read as rows is ignored with one warning.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._files import MIB, read_json

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
    hidden: tuple[int, int] = _ANY
    rows: tuple[int, int] = _ANY
    source: str = "shipped"

    def matches(self, call: Call) -> bool:
        """Tell whether the row is about this call; a size unknown while compiling matches only an unlimited range."""
        if (self.ops and call.op not in self.ops) or (self.device and call.device != self.device):
            return False
        if self.dtypes and str(call.dtypes[0][1]).removeprefix("torch.") not in self.dtypes:
            return False
        found = call.capability if self.capability != _ANY else None
        return (
            _within(None if found is None else 10 * found[0] + found[1], self.capability)
            and _within(call.hidden, self.hidden)
            and _within(call.rows, self.rows)
        )


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


def load(path: str | None) -> tuple[Row, ...]:
    """Return the table: rows of the JSON file at ``path``, if given and sound, then the shipped ones."""
    if path is None:
        return SHIPPED
    try:
        return (*_parse(read_json(Path(path), most=MIB), path), *SHIPPED)
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(f"fusedops: the dispatch table {path} is ignored: {error}", UserWarning, stacklevel=2)
        return SHIPPED


def _parse(data: Any, path: str) -> tuple[Row, ...]:
    """Build rows from ``{"rows": [{…}, …]}``; a field that is unknown or of the wrong kind raises."""
    from .config import check_backend

    names = {item.name for item in fields(Row)} - {"source"}
    rows = []
    for number, item in enumerate(data["rows"]):
        if not isinstance(item, dict) or not names.issuperset(item):
            raise ValueError(f"row {number}: expected an object with any of {sorted(names)}, got {item!r}")
        for key in ("ops", "backends", "dtypes"):
            if not (isinstance(item.get(key, []), list) and all(isinstance(part, str) for part in item.get(key, []))):
                raise ValueError(f"row {number}: {key} must be a list of names")
        if not item["backends"]:
            raise ValueError(f"row {number}: backends must name at least one")
        for name in item["backends"]:
            check_backend(name, f"row {number}")
        if not (isinstance(item["why"], str) and isinstance(item["device"], str | None)):
            raise ValueError(f"row {number}: why must be text, device a device type or null")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in item.items()
        }
        for key in ("capability", "hidden", "rows"):
            low, high = values.get(key, _ANY)
            if not (isinstance(low, int) and isinstance(high, int) and low <= high):
                raise ValueError(f"row {number}: {key} must be two integers, lowest first")
        rows.append(Row(**{**values, "source": path}))
    return tuple(rows)
