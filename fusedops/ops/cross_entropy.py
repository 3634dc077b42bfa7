"""Cross-entropy of logits and class indices.

The public function checks its arguments and hands over to the backend that ``dispatch`` chooses.

Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch, registry
from .._options import cap, flag, number, plain, probability
from ..dispatch import Call
from ..errors import UnsupportedError
from ..registry import OpSpec
from . import cross_entropy_record as record
from ._common import FLOATS, check_dense, check_parameter, choose, wide
from .cross_entropy_autograd import wrap_cross_entropy
from .cross_entropy_reference import class_dim, cross_entropy_reference

OP = "cross_entropy"
REDUCTIONS = ("none", "mean", "sum")
_PROBABILITIES = "target holds class probabilities, which only plain PyTorch takes"


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return ``weight[target] · (lse - logit[target])`` of each row, ``lse = log(sum(exp(logits)))``, and their mean.

    Args:
        input: (classes) | (rows, classes) | (rows, classes, ...): logits, fp32 | fp16 | bf16 | fp64, any strides. No
            copy is made where the classes of a row lie next to each other and rows are one distance apart.
        target: (...) of ``input``'s shape without the classes: int64 class indices. Class probabilities, of
            ``input``'s shape, are left to plain PyTorch.
        weight: (classes): any of the dtypes above (fp64 only with fp64), or None for ones; it has no gradient.
        ignore_index: rows with this target count for nothing, whatever their logits are.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, which divides by the sum of ``weight[target]`` over the rows
            that count; NaN if there are none, as PyTorch's.
        label_smoothing: the share of the target that is spread over all classes, as in PyTorch.
        z_loss: adds ``z_loss · lse²`` to the loss of each row that counts, whatever its weight, before the reduction.
        softcap: the logits are ``softcap · tanh(input / softcap)``; None: ``input`` itself.
        inplace_backward: write the gradient over the logits, which are lost: it saves their size in memory. Whoever
            needs them again, a second backward too, gets PyTorch's error of a tensor that was modified in place. Only
            for logits of which no copy has to be made. Plain PyTorch and compiled graphs see to memory themselves.
        backend: force ``"native"``, ``"triton"`` or ``"reference"``; None: dispatch chooses.

    Returns:
        fp32 (fp64 for fp64): one number, or one for each target.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value; on the CPU also a target that is no class.
            On a GPU, where the answer would have to be waited for, that stops the kernel: an assertion that names
            ``cross_entropy``, and no further CUDA call works in the process.
        UnsupportedError: the forced backend can't serve the call.

    *Autocast*: the result is fp32, as PyTorch's there; the logits are read as they are, not cast.
    *Numerics*: fp32 arithmetic and log-sum-exp (fp64 for fp64), one read of the logits; the gradient has the logits'
    dtype, each element rounded once. Deterministic. Unlike PyTorch's outside of autocast, the loss of 16-bit logits is
    fp32, and NaN in a row that is ignored stays there.
    *Source*: Milakov, Gimelshein (2018); the z-loss: Chowdhery et al., "PaLM" (2022).
    """
    checked = weight is not None or not _are_plain(input, target)
    if checked:
        check_tensors(input, target, weight)
    options = _options(ignore_index, reduction, label_smoothing, z_loss, softcap, inplace_backward)
    if options[-1]:
        _check_writable(input)
    if target.dtype is not torch.int64:
        if (forced := dispatch.forced_backend(OP, backend)) not in (None, "reference"):
            raise UnsupportedError(f"{OP}: backend {forced!r} can't serve this call: {_PROBABILITIES}")
        return cross_entropy_reference(input, target, weight, *options)
    classes = input.shape[class_dim(input)]
    choice = choose(OP, input, (), (classes,), wide(input.dtype), backend, constants=(target, weight))
    if not (checked or choice.checks_arguments):
        check_tensors(input, target, weight)
    try:
        result: Tensor = choice.run(input, target, weight, *options)
    except (ValueError, TypeError, IndexError, RuntimeError):
        check_tensors(input, target, weight)  # the same words, whoever refused
        if input.is_cpu:
            check_classes(target, classes, options[0])
        raise
    return result


def _are_plain(input: Any, target: Any) -> bool:
    """Tell arguments that a backend may be asked for; what else is wrong with them it may find itself."""
    return (
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and input.dtype in FLOATS
        and target.dtype is torch.int64
        and input.dim() > 0
        and not input.is_nested
    )


def refuse_probabilities(call: Call) -> str | None:
    """Return why no kernel serves a call, or None."""
    return _PROBABILITIES if ("target", "probabilities") in call.options else None


# ---------------------------------------------------------------- checks and dispatch


def check_tensors(input: Any, target: Any, weight: Any) -> None:
    """Raise ValueError naming the argument, what was expected and what came."""
    check_dense(OP, "input", input)
    if input.dtype not in FLOATS:
        raise ValueError(f"{OP}: input: expected a dtype of fp32, fp16, bf16 or fp64, got {input.dtype}")
    if input.dim() == 0 or input.is_nested:
        raise ValueError(
            f"{OP}: input: expected (classes), (rows, classes) or (rows, classes, ...), got {_shown(input)}"
        )
    check_dense(OP, "target", target)
    dim = class_dim(input)
    indices = (*input.shape[:dim], *input.shape[dim + 1 :])
    probabilities = target.is_floating_point()
    if not probabilities and target.dtype is not torch.int64:
        raise ValueError(f"{OP}: target: expected int64 class indices, or class probabilities, got {target.dtype}")
    if target.shape != (input.shape if probabilities else indices):
        raise ValueError(
            f"{OP}: target: expected shape {tuple(input.shape) if probabilities else indices} with an input of "
            f"{tuple(input.shape)}, got {_shown(target)}"
        )
    if target.device != input.device:
        raise ValueError(f"{OP}: target: expected a tensor on {input.device}, as input, got {target.device}")
    if weight is not None:
        check_parameter(OP, "weight", weight, input, (input.shape[dim],))
        if weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{OP}: weight: expected a tensor that needs no gradient, got one that requires it")


def _shown(tensor: Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else str(tuple(tensor.shape))


def _check_writable(input: Tensor) -> None:
    """Raise ValueError unless a gradient may be written over the logits, as rows in memory of their own."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and input.requires_grad and input.numel()):
        return
    if input.is_leaf:
        raise ValueError(f"{OP}: inplace_backward: expected logits that were computed, got a leaf, which would be lost")
    dim = class_dim(input)
    try:
        rows = input.movedim(dim, -1).view(-1, input.shape[dim])
    except RuntimeError:
        rows = None
    if (
        rows is None
        or (rows.shape[1] > 1 and rows.stride(1) != 1)
        or (rows.shape[0] > 1 and rows.stride(0) < rows.shape[1])
    ):
        raise ValueError(
            f"{OP}: inplace_backward: expected logits in rows of memory of their own, got {tuple(input.shape)} with "
            f"strides {input.stride()}"
        )


def check_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise ValueError naming the first target that is no class; it waits for the device."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{OP}: target: expected class indices from 0 to {classes - 1}, or ignore_index {ignore_index}, got "
            f"{int(target[where])} at {list(where)}"
        )


def _options(
    ignore_index: Any, reduction: Any, label_smoothing: Any, z_loss: Any, softcap: Any, inplace_backward: Any
) -> tuple[int, str, float, float, float | None, bool]:
    ignore_index = plain(ignore_index)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"{OP}: ignore_index: expected an integer, got {ignore_index!r}")
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"{OP}: reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    label_smoothing = probability(OP, "label_smoothing", label_smoothing)
    z_loss = number(OP, "z_loss", z_loss, "a finite number ≥ 0", 0.0)
    softcap = None if softcap is None else cap(OP, softcap)
    return ignore_index, reduction, label_smoothing, z_loss, softcap, flag(OP, "inplace_backward", inplace_backward)


def _describe(
    input: Tensor, target: Tensor | None = None, weight: Tensor | None = None, *, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    inplace_backward: bool = False, normalized_shape: tuple[int, ...] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Call:  # fmt: skip
    """Describe a call by its arguments, or by input, classes and the output's dtype alone, as ``choose`` does."""
    if target is not None:
        check_tensors(input, target, weight)
        _options(ignore_index, reduction, label_smoothing, z_loss, softcap, inplace_backward)
    dtypes = (("input", input.dtype), ("output", wide(input.dtype)))
    classes = input.shape[class_dim(input)] if normalized_shape is None else normalized_shape[0]
    most = 2 ** input.numel().bit_length() - 1  # elements of a call of its like; as in choose's key
    options = (("target", "probabilities"),) if target is not None and target.is_floating_point() else ()
    return Call(OP, input.device.type, input.get_device(), dtypes, classes, most // max(classes, 1), options=options)


# ---------------------------------------------------------------- record

registry.register(
    OpSpec(
        name=OP,
        family=OP,
        function=cross_entropy,
        reference=cross_entropy_reference,
        wrap=wrap_cross_entropy,
        describe=_describe,
        grads=("input",),
        parameter_shape=record.parameter_shape,
        cases=record.cases,
        condition=record.condition,
        terms=record.terms,
        bytes_moved=record.bytes_moved,
        draw_options=record.draw_options,
        constants=record.constants,
        sizes=record.SIZES,
    )
)
