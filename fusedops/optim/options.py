"""The groups' options as a step finds them, and what watches a step: all that each one asks before it does anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .. import backends
from . import checks

_structure_of = itemgetter("amsgrad", "master_weights", "kahan_sum", "bf16_stochastic_round", "state_dtype")


@dataclass(slots=True)
class Options:
    """The options of all groups, checked.

    Attributes:
        values: of every group, in its order; an option that was assigned since is another object.
        arguments: see ``FusedOptimizer.arguments``.
        structure: what plans depend on, of every group.
        plain: all that plans are told is Python's own numbers.
        lasting: they stay what they are for as long as their values are the same objects.
    """

    values: list[Any]
    arguments: tuple[Sequence[Any], ...]
    structure: list[tuple[Any, ...]]
    plain: bool
    lasting: bool


def read_options(
    owner: str,
    groups: list[dict[str, Any]],
    arguments: Callable[[], tuple[Sequence[Any], ...]],
    before: Options | None,
) -> Options:
    """Look at what may have been assigned to groups since the last step.

    Args:
        owner: name of the optimizer, for the message.
        groups: its ``param_groups``.
        arguments: its method of that name.
        before: what was found last.

    Returns:
        ``before``, where it still holds.

    Raises:
        ValueError: an option that makes no sense.
    """
    if before is not None and before.lasting and backends.get("native").same_objects(before.values, groups):
        return before
    plain = True
    for i, group in enumerate(groups):
        if not checks.are_plain(group):
            checks.check_options(f"{owner}: group {i}", group)
            plain = False
        elif isinstance(group["lr"], Tensor):
            plain = False
    values = [value for group in groups for value in group.values()]
    lasting = plain and all(type(group["betas"]) is tuple for group in groups)  # a list may be written into
    return Options(values, arguments(), [*map(_structure_of, groups)], plain, lasting)


def watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step`` as torch does for profilers and hooks, which costs nothing where there is none to see it."""
    shown: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(step)
    is_profiled = backends.get("native").is_profiled

    @functools.wraps(step)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        unseen = not (
            torch.compiler.is_compiling()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or is_profiled()
        )
        return (step if unseen else shown)(self, *args, **kwargs)

    return hooked
