"""The native ops' schemas for installations without the extension: an exported graph that names them still runs there.

``csrc/bindings.cpp`` defines the same; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops.add_norm_reference import add_layer_norm_reference, add_rms_norm_reference
from ..ops.cross_entropy_reference import class_dim, cross_entropy_reference, total_weight
from ..ops.dropout import dropout_factor
from ..ops.norm_reference import layer_norm_reference, rms_norm_reference

SCHEMAS = (
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
    "ScalarType? out_dtype=None) -> Tensor",
    "layer_norm_fwd(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
    "ScalarType? out_dtype) -> (Tensor y, Tensor mean, Tensor rstd)",
    "layer_norm_bwd(Tensor dy, Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor mean, Tensor rstd, "
    "bool[3] output_mask, ScalarType? bias_dtype=None) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float eps=1e-06, "
    "float weight_offset=0., ScalarType? out_dtype=None) -> Tensor",
    "rms_norm_fwd(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps, float weight_offset, "
    "ScalarType? out_dtype) -> (Tensor y, Tensor rstd)",
    "rms_norm_bwd(Tensor dy, Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor rstd, "
    "float weight_offset, bool[2] output_mask) -> (Tensor dx, Tensor dweight)",
    "dropout_seed(Tensor like) -> Tensor",
    "add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
    "Tensor? bias=None, float eps=1e-05, float dropout_p=0., bool post_norm=False, ScalarType? out_dtype=None, "
    "ScalarType? residual_dtype=None, *, Tensor? seed=None) -> (Tensor y, Tensor residual_out)",
    "add_layer_norm_fwd(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
    "float eps, Tensor? seed, float dropout_p, bool post_norm, bool keep_total, ScalarType? out_dtype, "
    "ScalarType? residual_dtype) -> (Tensor y, Tensor residual_out, Tensor total, Tensor mean, Tensor rstd)",
    "add_layer_norm_bwd(Tensor dy, Tensor? dresidual_out, Tensor total, SymInt[] normalized_shape, "
    "Tensor? weight, Tensor mean, Tensor rstd, Tensor? seed, float dropout_p, bool post_norm, "
    "bool[4] output_mask, ScalarType input_dtype, ScalarType residual_dtype, ScalarType? bias_dtype=None) -> "
    "(Tensor dinput, Tensor dresidual, Tensor dweight, Tensor dbias)",
    "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
    "float eps=1e-06, float weight_offset=0., float dropout_p=0., bool post_norm=False, "
    "ScalarType? out_dtype=None, ScalarType? residual_dtype=None, *, Tensor? seed=None) -> "
    "(Tensor y, Tensor residual_out)",
    "add_rms_norm_fwd(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, float eps, "
    "float weight_offset, Tensor? seed, float dropout_p, bool post_norm, bool keep_total, "
    "ScalarType? out_dtype, ScalarType? residual_dtype) -> "
    "(Tensor y, Tensor residual_out, Tensor total, Tensor rstd)",
    "add_rms_norm_bwd(Tensor dy, Tensor? dresidual_out, Tensor total, SymInt[] normalized_shape, "
    "Tensor? weight, Tensor rstd, float weight_offset, Tensor? seed, float dropout_p, bool post_norm, "
    "bool[3] output_mask, ScalarType input_dtype, ScalarType residual_dtype) -> "
    "(Tensor dinput, Tensor dresidual, Tensor dweight)",
    "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int ignore_index=-100, str reduction='mean', "
    "float label_smoothing=0., float z_loss=0., float? softcap=None, bool inplace_backward=False) -> Tensor",
    "cross_entropy_fwd(Tensor input, Tensor target, Tensor? weight, int ignore_index, str reduction, "
    "float label_smoothing, float z_loss, float? softcap) -> (Tensor loss, Tensor stats, Tensor total_weight)",
    "cross_entropy_bwd(Tensor dloss, Tensor input, Tensor target, Tensor? weight, Tensor stats, Tensor total_weight, "
    "int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap) -> Tensor",
    "cross_entropy_bwd_(Tensor(a!) input, Tensor dloss, Tensor target, Tensor? weight, Tensor stats, "
    "Tensor total_weight, int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap) -> ()",
)
# Ops that draw random numbers themselves.
RANDOM = ("dropout_seed", "add_layer_norm", "add_rms_norm")


def define() -> torch.library.Library:
    """Define the ops over plain PyTorch; they exist as long as the returned library does."""
    library = torch.library.Library("fusedops", "DEF")
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        draws = name == "dropout_seed"
        tags = (torch.Tag.nondeterministic_seeded,) if name in RANDOM else ()
        library.define(schema, "CONSERVATIVE" if draws else "", tags=tags)
        # A seed is drawn by an op of its own in compiled graphs too: PyTorch's draw would be the compiler's.
        key = "CompositeExplicitAutograd" if draws else "CompositeImplicitAutograd"
        library.impl(name, _IMPLEMENTATIONS[name], key)
    return library


def _statistics(input: Tensor, shape: Sequence[int], eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    rows = input.to(torch.promote_types(input.dtype, torch.float32)).flatten(-len(shape))
    mean = rows.mean(-1, keepdim=True) if centred else torch.zeros_like(rows[..., :1])
    rstd = ((rows - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    return mean.flatten(), rstd.flatten()


def _layer_norm_fwd(
    input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return layer_norm_reference(input, shape, weight, bias, eps, out_dtype), *_statistics(input, shape, eps, True)


def _rms_norm_fwd(
    input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float, weight_offset: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = rms_norm_reference(input, shape, weight, eps, weight_offset, out_dtype)
    return y, _statistics(input, shape, eps, False)[1]


def _bwd(
    dy: Tensor, input: Tensor, shape: Sequence[int], weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    weight_offset: float, mask: Sequence[bool], bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dweight and dbias; what the mask leaves out is empty."""
    wide, start = torch.promote_types(input.dtype, torch.float32), input.dim() - len(shape)
    x, g = input.to(wide).flatten(start), dy.to(wide).flatten(start)
    column = (*x.shape[:-1], 1)
    xhat = (x if mean is None else x - mean.reshape(column)) * rstd.reshape(column)
    wg = g if weight is None else g * (weight.to(wide).flatten() + weight_offset)
    inner = wg - xhat * (wg * xhat).mean(-1, keepdim=True)
    inner = inner if mean is None else inner - wg.mean(-1, keepdim=True)
    rows = tuple(range(start))
    grads = [input.new_empty(0) for _ in range(3)]
    if mask[0]:
        grads[0] = (rstd.reshape(column) * inner).reshape(input.shape).to(input.dtype)
    if mask[1] and weight is not None:
        grads[1] = (g * xhat).sum(rows).reshape(list(shape)).to(weight.dtype)
    if mask[2]:
        grads[2] = g.sum(rows).reshape(list(shape)).to(bias_dtype or (wide if weight is None else weight.dtype))
    return grads[0], grads[1], grads[2]


def _layer_norm_bwd(
    dy: Tensor, input: Tensor, shape: Sequence[int], weight: Tensor | None, mean: Tensor, rstd: Tensor,
    mask: Sequence[bool], bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _bwd(dy, input, shape, weight, mean, rstd, 0.0, mask, bias_dtype)


def _rms_norm_bwd(
    dy: Tensor, input: Tensor, shape: Sequence[int], weight: Tensor | None, rstd: Tensor, weight_offset: float,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _bwd(dy, input, shape, weight, None, rstd, weight_offset, (*mask, False), None)[:2]


def _dropout_seed(like: Tensor) -> Tensor:
    return like.new_empty(2, dtype=torch.int64).random_(0, 2**63 - 1)


def _add_outputs(
    reference: Callable[..., tuple[Tensor, Tensor]], post_norm: bool, keep_total: bool
) -> tuple[Tensor, ...]:
    """Return y, residual_out and total, which is empty unless kept beside a residual_out; then the sum."""
    y, total = reference(post_norm=False)
    y, residual_out = reference(post_norm=True) if post_norm else (y, total)
    return y, residual_out, total if post_norm and keep_total else total.new_empty(0), total


def _add_layer_norm_fwd(
    input: Tensor, residual: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float,
    seed: Tensor | None, dropout_p: float, post_norm: bool, keep_total: bool, out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = (input, residual, shape, weight, bias, eps, 0.0 if seed is None else dropout_p)
    reference = partial(add_layer_norm_reference, *call, out_dtype=out_dtype, residual_dtype=residual_dtype, seed=seed)
    *outputs, total = _add_outputs(reference, post_norm, keep_total)
    return *outputs, *_statistics(total, shape, eps, True)


def _add_rms_norm_fwd(
    input: Tensor, residual: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float, weight_offset: float,
    seed: Tensor | None, dropout_p: float, post_norm: bool, keep_total: bool, out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = (input, residual, shape, weight, eps, weight_offset, 0.0 if seed is None else dropout_p)
    reference = partial(add_rms_norm_reference, *call, out_dtype=out_dtype, residual_dtype=residual_dtype, seed=seed)
    *outputs, total = _add_outputs(reference, post_norm, keep_total)
    return *outputs, _statistics(total, shape, eps, False)[1]


def _add_bwd(
    dy: Tensor, dsum: Tensor | None, total: Tensor, shape: Sequence[int], weight: Tensor | None, mean: Tensor | None,
    rstd: Tensor, weight_offset: float, seed: Tensor | None, p: float, post_norm: bool, mask: Sequence[bool],
    input_dtype: torch.dtype, residual_dtype: torch.dtype, bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dinput, dresidual, dweight and dbias; what the mask leaves out is empty, as is a copy of dresidual."""
    acc = torch.promote_types(total.dtype, torch.float32)
    need = (mask[0] or mask[1], *mask[2:])
    if post_norm and dsum is not None:
        dy, dsum = dy.to(acc) + dsum.to(acc), None
    dx, dweight, dbias = _bwd(dy, total.to(acc), shape, weight, mean, rstd, weight_offset, need, bias_dtype)
    dinput = dresidual = total.new_empty(0)
    dx = dx if dsum is None or not need[0] else dx + dsum
    if mask[1]:
        dresidual = dx.to(residual_dtype)
    if mask[0] and not (mask[1] and seed is None and input_dtype is residual_dtype):
        factor = 1.0 if seed is None else dropout_factor(seed, p, total.shape, len(shape), acc)
        dinput = (dx * factor).to(input_dtype)
    return dinput, dresidual, dweight, dbias


def _add_layer_norm_bwd(
    dy: Tensor, dsum: Tensor | None, total: Tensor, shape: Sequence[int], weight: Tensor | None, mean: Tensor,
    rstd: Tensor, seed: Tensor | None, p: float, post_norm: bool, mask: Sequence[bool], input_dtype: torch.dtype,
    residual_dtype: torch.dtype, bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _add_bwd(
        dy, dsum, total, shape, weight, mean, rstd, 0.0, seed, p, post_norm, mask, input_dtype, residual_dtype,
        bias_dtype,
    )  # fmt: skip


def _add_rms_norm_bwd(
    dy: Tensor, dsum: Tensor | None, total: Tensor, shape: Sequence[int], weight: Tensor | None, rstd: Tensor,
    weight_offset: float, seed: Tensor | None, p: float, post_norm: bool, mask: Sequence[bool],
    input_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _add_bwd(
        dy, dsum, total, shape, weight, None, rstd, weight_offset, seed, p, post_norm, (*mask, False),
        input_dtype, residual_dtype, None,
    )[:3]  # fmt: skip


def _cross_entropy_fwd(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float,
    z_loss: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    loss = cross_entropy_reference(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    logits = input.to(loss.dtype)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept = target != ignore_index
    largest = logits.amax(class_dim(input)) if logits.numel() else torch.zeros_like(kept, dtype=loss.dtype)
    log_sum = torch.logsumexp(logits - largest.unsqueeze(class_dim(input)), class_dim(input))
    stats = torch.where(kept, torch.stack([largest, log_sum]), 0.0)
    weight = None if weight is None else weight.to(loss.dtype)
    total = total_weight(loss, target, weight, kept) if reduction == "mean" else loss.new_zeros(())
    return loss, stats.flatten(1).mT.contiguous(), total


def _cross_entropy_bwd(
    dloss: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, total_weight: Tensor,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    with torch.enable_grad():
        logits = input.detach().requires_grad_()
        loss = cross_entropy_reference(
            logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap
        )
    return torch.autograd.grad(loss, logits, dloss.reshape(loss.shape))[0]


def _cross_entropy_bwd_(input: Tensor, dloss: Tensor, *args: Any) -> None:
    input.copy_(_cross_entropy_bwd(dloss, input, *args))


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm_reference,
    "layer_norm_fwd": _layer_norm_fwd,
    "layer_norm_bwd": _layer_norm_bwd,
    "rms_norm": rms_norm_reference,
    "rms_norm_fwd": _rms_norm_fwd,
    "rms_norm_bwd": _rms_norm_bwd,
    "dropout_seed": _dropout_seed,
    "add_layer_norm": add_layer_norm_reference,
    "add_layer_norm_fwd": _add_layer_norm_fwd,
    "add_layer_norm_bwd": _add_layer_norm_bwd,
    "add_rms_norm": add_rms_norm_reference,
    "add_rms_norm_fwd": _add_rms_norm_fwd,
    "add_rms_norm_bwd": _add_rms_norm_bwd,
    "cross_entropy": cross_entropy_reference,
    "cross_entropy_fwd": _cross_entropy_fwd,
    "cross_entropy_bwd": _cross_entropy_bwd,
    "cross_entropy_bwd_": _cross_entropy_bwd_,
}
