"""What every op's Python layer shares: sizes, dtype checks, the choice of a backend, second derivatives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import dispatch, registry
from .._build import load_native
from .._options import LARGEST, number
from ..config import CONFIG, check_backend
from ..dispatch import Call, Choice

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
# What a call is described by while tracing: made here, as a graph would record their making.
_STAND_INS = {dtype: torch.empty(1, dtype=dtype, device="meta") for dtype in FLOATS}
# Tensor types our kernels may see; any other subclass (DTensor, quantised weights) takes plain PyTorch.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)})
# And what stands for them while PyTorch runs our Python to trace it.
TENSOR_TYPES = _PLAIN | {FakeTensor, FunctionalTensor}
_MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]  # not in torch's stub
_NOT_DENSE = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, _MKLDNN)
)
_forward_ad = torch.autograd.forward_ad
_tracing_state = torch._C._get_tracing_state
_are_transforms_active = torch._C._are_functorch_transforms_active


def sizes(shape: int | Sequence[int], op: str = "") -> tuple[int, ...]:
    """Return a normalized_shape as a tuple.

    Args:
        shape: an integer or several.
        op: whose argument it is, for the message.

    Raises:
        ValueError: it is neither an integer nor a sequence.
    """
    if isinstance(shape, int):
        return (shape,)
    return tuple(shape) if isinstance(shape, (tuple, list)) else _unusual_sizes(shape, op)


def _unusual_sizes(shape: Any, op: str) -> tuple[int, ...]:
    """Take NumPy's integers and any iterable of integers for a shape."""
    try:
        return (operator.index(shape),) if hasattr(shape, "__index__") else tuple(map(operator.index, shape))
    except TypeError:
        raise ValueError(f"{op}: normalized_shape: expected an integer or a sequence of them, got {shape!r}") from None


def check_out_dtype(op: str, out_dtype: Any, dtype: torch.dtype, name: str = "out_dtype") -> None:
    """Raise ValueError if a result of ``out_dtype`` can't be made from an input of ``dtype``."""
    if (
        not isinstance(out_dtype, torch.dtype)
        or out_dtype not in FLOATS
        or (out_dtype is torch.float64) != (dtype is torch.float64)
    ):
        raise ValueError(
            f"{op}: {name}: expected fp32, fp16 or bf16 (fp64 only if all are), got {out_dtype} with {dtype} input"
        )


def check_result_dtype(owner: str, name: str, dtype: Any) -> None:
    """Raise ValueError unless a result may have this dtype, whatever the input will be; None leaves it to the call."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATS):
        raise ValueError(f"{owner}: {name}: expected None or fp32, fp16, bf16 or fp64, got {dtype!r}")


def offset(op: str, weight_offset: Any, weight: Tensor | None) -> float:
    """Return a weight_offset as a float; raise ValueError if it is no number, or is not zero without a weight."""
    weight_offset = number(op, "weight_offset", weight_offset, "a finite number", -LARGEST)
    if weight is None and weight_offset:
        raise ValueError(f"{op}: weight_offset: expected 0.0 without a weight, got {weight_offset}")
    return weight_offset


def check_dense(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless it is a tensor whose elements lie in memory, where strides find them."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{op}: {name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout in _NOT_DENSE:
        raise ValueError(f"{op}: {name}: expected a dense tensor, got layout {tensor.layout}")
    if torch.compiler.is_compiling() or _are_transforms_active() or type(tensor) not in _PLAIN:
        return
    in_storage = tensor.device.type in ("cpu", "cuda") and not tensor._is_zerotensor() and not tensor.is_nested
    if in_storage and tensor.numel() and not tensor.untyped_storage().nbytes():
        shape = tuple(tensor.shape)
        raise ValueError(
            f"{op}: {name}: expected a tensor with storage, got one of shape {shape} whose storage was freed"
        )


def check_parameter(op: str, name: str, parameter: Any, input: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError naming what is wrong with a tensor that must have a shape, and suit input's device and dtype."""
    if not isinstance(parameter, Tensor):
        raise ValueError(f"{op}: {name}: expected a tensor or None, got {type(parameter).__name__}")
    check_dense(op, name, parameter)
    if parameter.shape != shape:
        raise ValueError(f"{op}: {name}: expected shape {shape}, got {tuple(parameter.shape)}")
    if parameter.device != input.device:
        raise ValueError(f"{op}: {name}: expected a tensor on {input.device}, as input, got {parameter.device}")
    dtype = parameter.dtype
    if dtype is not input.dtype and (dtype not in FLOATS or torch.float64 in (dtype, input.dtype)):
        raise ValueError(
            f"{op}: {name}: expected fp32, fp16 or bf16 (fp64 only if all are), got {dtype} with {input.dtype} input"
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that tensors of ``dtype`` are computed with in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def default_eps(dtype: torch.dtype) -> float:
    """Return the epsilon that PyTorch's RMSNorm takes where none is given."""
    return torch.finfo(wide(dtype)).eps


def rows_of(tensor: Tensor, hidden: int) -> Tensor:
    """View as (rows, hidden) with unit stride inside a row, copying only where no view exists."""
    return unit_stride(tensor.reshape(tensor.numel() // max(hidden, 1), hidden))


def unit_stride(rows: Tensor) -> Tensor:
    """Copy (rows, hidden) where the elements of a row are not next to each other."""
    return in_memory(rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous())


def flat_parameter(parameter: Tensor, hidden: int) -> Tensor:
    """View as (hidden), copying where elements are not next to each other: kernels know no stride of a parameter."""
    return in_memory(parameter.reshape(hidden).contiguous())


def in_memory(tensor: Tensor) -> Tensor:
    """Write out what memory does not hold: the sign of a negative view, the zeros of a tensor that stands for them."""
    if torch.compiler.is_compiling():
        return tensor
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.clone() if tensor._is_zerotensor() else tensor


def python_call_kind(
    input: Any, others: tuple[Any, ...], constants: tuple[Any, ...]
) -> tuple[torch.device | torch.dtype | int | None, ...] | None:
    """Return what dispatch tells calls apart by, read off their tensors: device, size by powers of two, dtypes.

    None: no kernel may see such a call, as a tensor is of a subclass, or none at all, the input is nested, or a
    functorch transform or torch.jit.trace is in force.

    ``csrc/ops/call_kind.cpp`` does the same in a fifth of the time; a test compares the two.
    """
    if (
        _are_transforms_active()
        or _tracing_state() is not None
        or not _PLAIN.issuperset(map(type, (input, *others, *constants)))
        or input.is_nested
    ):
        return None
    return (input.device, input.numel().bit_length(), *[None if t is None else t.dtype for t in (input, *others)])


_C = load_native()
call_kind: Callable[..., Any] = python_call_kind if _C is None else _C.call_kind


def choose(
    op: str,
    input: Tensor,
    others: tuple[Tensor | None, ...],
    shape: tuple[int, ...],
    out_dtype: torch.dtype,
    backend: str | None,
    options: tuple[tuple[str, Any], ...] = (),
    constants: tuple[Tensor | None, ...] = (),
) -> Choice:
    """Return what serves this call: one dict hit when its like was seen before.

    Args:
        op: its name.
        input: its first tensor.
        others: its other differentiable arguments, in their order.
        shape: its normalized_shape.
        out_dtype: dtype of its first result.
        backend: the explicit choice, or None.
        options: names and values of other arguments that backends may refuse.
        constants: its other tensors, of which only the type matters here.

    Pointers and strides are not part of the key: alignment is the launcher's business. Elements count by powers of two.
    What no kernel knows of (tensor subclasses, nested tensors, functorch transforms, forward-mode AD, torch.jit.trace)
    takes plain PyTorch, compiled or not.
    """
    if torch.compiler.is_compiling():
        types = (type(input), *[type(t) for t in others], *[type(t) for t in constants])
        dtypes = (input.dtype, *[None if t is None else t.dtype for t in others], out_dtype)
        device = input.device
        key = _choose_compiling(
            op, device.type, device.index, types, dtypes, dispatch.forced_backend(op, backend), options
        )
        found: Choice = getattr(_traced, key)
        return found
    kind = call_kind(input, others, constants)
    if kind is None or CONFIG.disabled or _forward_ad._current_level >= 0:
        return _choose_unusual(op, input, others, shape, out_dtype, backend, options)
    key = (op, backend, out_dtype, options, shape, kind)
    try:
        choice = dispatch.cache.get(key)
    except TypeError:  # something that can't be hashed stands for a name, a dtype or a size: it is named below
        choice = None
    if choice is None:
        call = _describe(op, (input, *others), shape, out_dtype, options)
        choice = dispatch.cache[key] = dispatch.select(call, backend)
        if dispatch.recorder is not None and dispatch.forced_backend(op, backend) is None:
            dispatch.recorder(call, input.numel() // max(call.hidden or 1, 1), out_dtype, dict(options))
    return choice


def _choose_unusual(
    op: str, input: Tensor, others: tuple[Tensor | None, ...], shape: tuple[int, ...], out_dtype: torch.dtype,
    backend: str | None, options: tuple[tuple[str, Any], ...],
) -> Choice:  # fmt: skip
    """Choose plain PyTorch, component by component where the input is a nested tensor of the strided layout."""
    if type(input) in _PLAIN and input.is_nested:
        _check_named(op, backend)
        return _by_component(op, (input, *others), shape, out_dtype, options)
    return _plain(op, input.dtype, out_dtype, backend)


def _describe(
    op: str, tensors: Sequence[Tensor | None], shape: tuple[int, ...], out_dtype: torch.dtype | None,
    options: tuple[tuple[str, Any], ...],
) -> Call:  # fmt: skip
    """Describe a call by the differentiable arguments of its op, in their order."""
    spec = registry.OPS[op]
    given = dict(zip(spec.grads, tensors, strict=True))
    return spec.describe(**given, normalized_shape=shape, out_dtype=out_dtype, **dict(options))


def why_plain(tensors: Sequence[Tensor]) -> str | None:
    """Return what makes ``choose`` take plain PyTorch for an eager call, in words; None if nothing does."""
    if CONFIG.disabled:
        return "FUSEDOPS_DISABLE=1"
    if _are_transforms_active():
        return "within a torch.func transform"
    if _forward_ad._current_level >= 0:
        return "within forward-mode AD"
    unknown = {"nested tensor" if t.is_nested else type(t).__name__ for t in tensors if _is_unknown(t)}
    return f"no kernel knows a {' or a '.join(sorted(unknown))}" if unknown else None


def _is_unknown(tensor: Tensor) -> bool:
    return tensor.is_nested or type(tensor) not in _PLAIN


def _plain(op: str, dtype: torch.dtype | None, out_dtype: torch.dtype | None, backend: str | None) -> Choice:
    """Choose plain PyTorch, which would take any dtype and has no use for a backend, after the checks of others."""
    if dtype in FLOATS and out_dtype is not None:  # else the input is to be named
        check_out_dtype(op, out_dtype, dtype)
    _check_named(op, backend)
    return Choice("reference", registry.OPS[op].reference)


def _check_named(op: str, backend: str | None) -> None:
    if backend is not None:
        check_backend(backend, f"{op}: backend")


def _by_component(
    op: str, tensors: tuple[Tensor | None, ...], shape: tuple[int, ...], out_dtype: torch.dtype,
    options: tuple[tuple[str, Any], ...],
) -> Choice:  # fmt: skip
    """Serve nested tensors of the strided layout, for which PyTorch lacks most functions, component by component."""
    spec = registry.OPS[op]

    def components(arguments: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        return zip(*(a.unbind() if _is_nested(a) else repeat(a) for a in arguments), strict=False)

    def run(*arguments: Any) -> Any:
        outputs = [spec.reference(*some) for some in components(arguments)]
        if outputs and isinstance(outputs[0], tuple):
            return tuple(map(torch.nested.as_nested_tensor, map(list, zip(*outputs, strict=True))))
        return torch.nested.as_nested_tensor(outputs)

    counts = {t.size(0) for t in tensors if t is not None and t.is_nested}
    if len(counts) > 1:
        raise ValueError(f"{op}: expected nested tensors of one number of components, got {sorted(counts)}")
    for some in components(tensors):
        _describe(op, some, shape, out_dtype, options)  # checks them
    return Choice("reference", run, checks_arguments=True)


def _is_nested(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_nested


class _Traced:
    """What traced code calls: an attribute a key of _choose_compiling (Dynamo can burn in a string, not a function).

    No dict: Dynamo sees that as it was at its first look, without what the same trace adds later.
    """


_traced = _Traced()


@torch.compiler.assume_constant_result
def _choose_compiling(
    op: str,
    device_type: str,
    device_index: int | None,
    types: tuple[type, ...],
    dtypes: tuple[torch.dtype | None, ...],
    forced: str | None,
    options: tuple[tuple[str, Any], ...],
) -> str:
    """Choose while Dynamo traces; it guards on the arguments and on the transforms in force.

    Sizes are left out, so that none is specialised.
    """
    tangents = _forward_ad._current_level >= 0
    if CONFIG.disabled or _are_transforms_active() or tangents or not TENSOR_TYPES.issuperset(types):
        choice = _plain(op, dtypes[0], dtypes[-1], forced)
    else:
        tensors = [None if d is None else _stand_in(d) for d in dtypes[:-1]]
        call = _describe(op, tensors, (1,), dtypes[-1], options)
        index = -1 if device_index is None else device_index
        call = replace(call, device=device_type, index=index, hidden=None, rows=None, compiling=True)
        choice = dispatch.select(call, forced)
    key = f"{op} on {choice.backend}"
    setattr(_traced, key, choice)
    return key


@torch.compiler.assume_constant_result
def transformed() -> bool:
    """Tell whether a functorch transform is in force."""
    return _are_transforms_active()


def _stand_in(dtype: torch.dtype) -> Tensor:
    return _STAND_INS[dtype] if dtype in _STAND_INS else torch.empty(1, dtype=dtype, device="meta")


def differentiate(
    function: Callable[[], Tensor], inputs: Sequence[Tensor | None], need: Sequence[bool], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``function()``, differentiable again: what backward does under create_graph."""
    with torch.enable_grad():
        output = function()
    wanted = [t for t, needed in zip(inputs, need, strict=True) if needed and t is not None]
    found = iter(torch.autograd.grad(output, wanted, grad_output, create_graph=True))
    return tuple(next(found) if needed and t is not None else None for t, needed in zip(inputs, need, strict=True))
