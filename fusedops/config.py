"""Environment variables, read once at import.

A value that is not understood raises at import: a misspelt backend name must not silently run another one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

BACKENDS = ("native", "triton", "apex", "reference")
_LOGS = ("dispatch", "fallback")
_VARIABLES = ("FUSEDOPS_DISABLE", "FUSEDOPS_BACKEND", "FUSEDOPS_LOGS", "FUSEDOPS_TABLE")

logger = logging.getLogger("fusedops")


@dataclass(frozen=True)
class Config:
    """Parsed environment: ``forced`` maps an op name (or ``*``) to a backend."""

    disabled: bool
    forced: Mapping[str, str]
    logs: frozenset[str]
    table: str | None
    given: Mapping[str, str]


def check_backend(name: str, where: str) -> str:
    """Return ``name`` if it is a backend's, else raise ValueError naming ``where``."""
    if name not in BACKENDS:
        raise ValueError(f"{where}: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def parse(environ: Mapping[str, str]) -> Config:
    """Parse the variables of ``environ``.

    Raises:
        ValueError: a value that is not understood, naming the variable.
    """
    given = {name: environ[name] for name in _VARIABLES if environ.get(name)}
    disable = given.get("FUSEDOPS_DISABLE", "0")
    if disable not in ("0", "1"):
        raise ValueError(f"FUSEDOPS_DISABLE: expected 0 or 1, got {disable!r}")
    forced: dict[str, str] = {}
    for part in filter(None, given.get("FUSEDOPS_BACKEND", "").split(",")):
        op, equals, name = map(str.strip, part.rpartition("="))
        if equals and not op:
            raise ValueError(f"FUSEDOPS_BACKEND: expected the name of an op before '=', got {part.strip()!r}")
        if (first := forced.get(op or "*")) is not None:
            raise ValueError(f"FUSEDOPS_BACKEND: expected {op or 'the default'} once, got {first!r} and {name!r}")
        forced[op or "*"] = check_backend(name, "FUSEDOPS_BACKEND")
    logs = frozenset(filter(None, (part.strip() for part in given.get("FUSEDOPS_LOGS", "").split(","))))
    if unknown := logs.difference(_LOGS):
        raise ValueError(f"FUSEDOPS_LOGS: expected any of {', '.join(_LOGS)}, got {', '.join(sorted(unknown))!r}")
    return Config(disable == "1", forced, logs, given.get("FUSEDOPS_TABLE"), given)


CONFIG = parse(os.environ)
if CONFIG.logs and not logger.handlers:
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
