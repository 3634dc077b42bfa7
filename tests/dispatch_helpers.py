"""What the tests of dispatch share: a call, and backends that serve it or say why not."""

from __future__ import annotations

from types import ModuleType

import torch

from fusedops.dispatch import Call, Limits

F32, BF16 = torch.float32, torch.bfloat16
CALL = Call("layer_norm", "cpu", -1, (("input", F32), ("weight", BF16), ("output", F32)), 768, 1023)
ALL = Limits(frozenset({F32, BF16}))


def fake_backend(reason: str | None = None, limits: Limits | None = None, op: str = "layer_norm") -> ModuleType:
    """A backend that serves an op within limits, or can't run at all."""
    module = ModuleType("fake")
    module.unavailable = lambda device_type: reason
    module.LIMITS = {} if limits is None else {op: limits}
    module.implementation = lambda call: lambda *args: "served"
    return module
