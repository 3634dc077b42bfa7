"""The native ops' schemas for installations without the extension: an exported graph that names them still runs there.

``csrc/bindings.cpp`` defines the same; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.norm import layer_norm_reference, rms_norm_reference

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
)


def define() -> torch.library.Library:
    """Define the ops over plain PyTorch; they exist as long as the returned library does."""
    library = torch.library.Library("fusedops", "DEF")
    for schema in SCHEMAS:
        name = library.define(schema)
        library.impl(name, _IMPLEMENTATIONS[name.rpartition("::")[2]], "CompositeImplicitAutograd")
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


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm_reference,
    "layer_norm_fwd": _layer_norm_fwd,
    "layer_norm_bwd": _layer_norm_bwd,
    "rms_norm": rms_norm_reference,
    "rms_norm_fwd": _rms_norm_fwd,
    "rms_norm_bwd": _rms_norm_bwd,
}
