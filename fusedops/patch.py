"""Swap a model's modules for fusedops' own, in place, and back.

Only an instance's `__class__` changes: parameters keep their identity, and hooks, names, buffers and state dict stay
as they are. No class and nothing in torch is touched. A mark on each module remembers what was done and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from . import nn as fused_nn

# op name → (torch's class, ours, which must need no attribute of its own on the instance)
SWAPS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "layer_norm": (nn.LayerNorm, fused_nn.LayerNorm),
    "rms_norm": (nn.RMSNorm, fused_nn.RMSNorm),
}

_MARK = "_fusedops_patch"
_AUTOCAST = (
    "Under autocast they return its dtype, torch's return fp32: where that is the residual stream (post-norm, as BERT) "
    'skip them, or call fusedops.amp.set_norm_output("fp32").'
)


@dataclass(frozen=True)
class _Mark:
    """What `patch` did to one module: the class it had before, or the reason it was left."""

    original: type[nn.Module] | None = None
    reason: str = ""


@dataclass
class PatchReport:
    """What is patched in a model: module name → class now used, and module name → why it was left."""

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """One line on the counts, and one on what changes under autocast if any module was replaced."""
        count = len(self.replaced)
        left = f"{len(self.left)} left{' (print fusedops.patched(model) for why)' if self.left else ''}"
        counts = f"fusedops.patch: {count} module{'' if count == 1 else 's'} replaced, {left}"
        return f"{counts}\n{_AUTOCAST}" if count else counts

    def __str__(self) -> str:
        replaced = [f"  {name or '(the model itself)'} → {what}" for name, what in self.replaced.items()]
        left = [f"  {name or '(the model itself)'} left: {why}" for name, why in self.left.items()]
        return "\n".join([self.summary, *replaced, *left])


def patch(
    model: nn.Module,
    *,
    ops: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    verbose: bool = True,
) -> nn.Module:
    """Swap in place every `nn.LayerNorm` and `nn.RMSNorm` of `model` for fusedops' own; a second call changes nothing.

    Args:
        model: any module; an optimizer may be built before or after.
        ops: which ops to swap, of `layer_norm`, `rms_norm`; None: all.
        skip: module names, or patterns such as `"blocks.0.*"`, to leave alone.
        filter_fn: called with (name, module); a module it returns False for is left.
        verbose: print how many modules were replaced, and what that changes.

    Returns:
        `model` itself. `patched(model)` says what was replaced, what was left, and why.

    Raises:
        ValueError: `model` is no module, `ops` no list of ops, `skip` no list of names, or `filter_fn` no function.

    *Autocast*: a swapped norm returns the autocast dtype, where torch's returns fp32 (`fusedops.amp.set_norm_output`
    changes that). Where the norm's output is the residual stream that difference is not harmless: the norms of torch's
    own post-norm layers (`nn.TransformerEncoderLayer(norm_first=False)`, its decoder likewise) are left; those of other
    post-norm models (BERT's) can't be told from others, and are yours to skip.
    """
    _check_model(model)
    chosen = set(SWAPS) if ops is None else _checked_ops(ops)
    skip = _names("skip", "module names", skip)
    if filter_fn is not None and not callable(filter_fn):
        raise ValueError(f"filter_fn: expected a function or None, got {filter_fn!r}")
    swaps = {original: (op, ours) for op, (original, ours) in SWAPS.items()}
    post_norm = _post_norm_modules(model)

    for name, module in model.named_modules():
        if not _is_norm(module) or _replaced(module):
            continue
        reason = _reason_to_leave(module, swaps)
        if not reason:
            op, ours = swaps[type(module)]
            if op not in chosen:
                reason = f"{op} is not among ops"
            elif any(fnmatchcase(name, pattern) for pattern in skip):
                reason = "named in skip"
            elif filter_fn is not None and not filter_fn(name, module):
                reason = "filter_fn returned False"
            elif module in post_norm:
                reason = "its output is a post-norm residual stream, which stays fp32 under autocast"
        if reason:
            module.__dict__[_MARK] = _Mark(reason=reason)
        else:
            module.__dict__[_MARK] = _Mark(original=type(module))
            module.__class__ = ours
    if verbose:
        print(patched(model).summary)
    return model


def patched(model: nn.Module) -> PatchReport:
    """What `patch` did to `model`: printable, with `replaced` and `left` as dicts by module name."""
    _check_model(model)
    report = PatchReport()
    for name, module in model.named_modules():
        mark = module.__dict__.get(_MARK)
        if _replaced(module):
            report.replaced[name] = f"fusedops.nn.{type(module).__name__}"
        elif mark is not None:
            report.left[name] = mark.reason
        elif _is_norm(module):
            report.left[name] = "patch has not seen it"
    return report


def unpatch(model: nn.Module) -> nn.Module:
    """Give every module that `patch` swapped its class back, and forget the rest; returns `model`."""
    _check_model(model)
    for module in model.modules():
        mark = module.__dict__.pop(_MARK, None)
        if mark is not None and mark.original is not None:
            module.__class__ = _class_before(type(module), mark.original)
    return model


def _class_before(kind: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return `original`, within the class that a parametrization or the like has built over ours since."""
    ours = {fused for _, fused in SWAPS.values()}
    if kind in ours or not ours.intersection(kind.__bases__):
        return original
    bases = tuple(original if base in ours else base for base in kind.__bases__)
    body = {name: value for name, value in kind.__dict__.items() if name not in ("__dict__", "__weakref__")}
    metaclass: Any = type(kind)
    rebuilt: type[nn.Module] = metaclass(kind.__name__, bases, body)
    return rebuilt


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a module, got {model!r}")


def _names(argument: str, what: str, given: Any) -> tuple[str, ...]:
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{argument}: expected a list of {what}, got {given!r}")
    return names


def _checked_ops(ops: Iterable[str]) -> set[str]:
    chosen = set(_names("ops", "op names", ops))
    unknown = chosen - SWAPS.keys()
    if unknown:
        raise ValueError(f"ops: expected names among {', '.join(SWAPS)}, got {', '.join(sorted(map(repr, unknown)))}")
    return chosen


def _replaced(module: nn.Module) -> bool:
    mark = module.__dict__.get(_MARK)
    return mark is not None and mark.original is not None


def _is_norm(module: nn.Module) -> bool:
    """Torch's norms, their subclasses, and other classes that are such norms by name; not ours made by the user."""
    if type(module) in {ours for _, ours in SWAPS.values()}:
        return _replaced(module)
    torch_classes = tuple(original for original, _ in SWAPS.values())
    return isinstance(module, torch_classes) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def _reason_to_leave(module: nn.Module, swaps: dict[type[nn.Module], tuple[str, type[nn.Module]]]) -> str:
    kind = type(module)
    if kind not in swaps:
        base = next((c for c in swaps if issubclass(kind, c)), None)
        what = f"a subclass of nn.{base.__name__}" if base else "not torch's own class"
        return f"{kind.__module__}.{kind.__qualname__} is {what}"
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance"
    return ""


def _post_norm_modules(model: nn.Module) -> set[nn.Module]:
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    post = (layer for layer in model.modules() if isinstance(layer, layers) and not layer.norm_first)
    return {child for layer in post for child in layer.children()}
