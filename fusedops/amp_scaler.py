"""torch's gradient scaler, with one read of the gradients where torch reads and writes them all."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .optim.base import FusedOptimizer, on_device


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that lets our optimizers look for inf and NaN themselves.

    ``step`` on an optimizer of ours reads the gradients once, for the inf check and the norm that ``max_grad_norm``
    needs, and unscales within the update; torch's scaler also writes them all. Constructor, state dict, growth and
    backoff, ``unscale_`` (which writes unscaled gradients, in one pass) and other optimizers' steps are torch's.
    Nothing waits for the device.
    """

    @torch.compiler.disable  # the compiler keeps states by the id of an optimizer of its own making
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step ``optimizer`` unless a gradient holds an inf or NaN; see ``torch.amp.GradScaler.step``.

        Returns:
            What ``optimizer.step`` returned.

        Raises:
            RuntimeError: called twice since ``update``, or with a closure.
        """
        if not (self._enabled and isinstance(optimizer, FusedOptimizer)):
            return super().step(optimizer, *args, **kwargs)
        if not optimizer._step_supports_amp_scaling:
            returned = super().step(optimizer, *args, **kwargs)
            found = [*self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
            # The optimizer never hears of a step that is not taken.
            optimizer._last_found_inf = torch.stack([on_device(t, found[0].device) for t in found]).sum()
            return returned
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        # After unscale_ the gradients are checked and unscaled; without any gradient torch says what is missing.
        if state["stage"] is not OptState.READY or "closure" in kwargs or not _has_gradients(optimizer):
            return super().step(optimizer, *args, **kwargs)
        found_inf = torch.zeros_like(scale)
        returned = optimizer.step_scaled(scale, found_inf, *args, **kwargs)
        # update() adds other optimizers' findings in place; the optimizer keeps its own.
        state["found_inf_per_device"] = {scale.device: found_inf.clone()}
        state["stage"] = OptState.STEPPED
        return returned


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
