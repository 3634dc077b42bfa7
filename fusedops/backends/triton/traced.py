"""The norms and cross-entropy as ops that torch.compile traces into, down to the kernel launches.

Only loaded while compiling: in eager such an op would cost tens of microseconds a call. An op cannot return None, so
gradients that nobody needs come back as empty tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, triton_op

from . import add_norm, cross_entropy
from .launch import INTERPRETED, launch_traced
from .norm import _layer_norm_fwd, _rms_norm_fwd, make_dx, norm_bwd


def op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define a function as an op that compilers look into; of the interpreter's kernels they see the op alone."""
    if not INTERPRETED:
        return triton_op(name, mutates_args=())

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        opaque = custom_op(name, mutates_args=())(function)
        opaque.register_fake(function)
        return opaque

    return define


@op("fusedops_triton::layer_norm_fwd")
def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``norm.layer_norm_fwd``."""
    return _layer_norm_fwd(launch_traced, x, weight, bias, eps, out_dtype)


@op("fusedops_triton::layer_norm_bwd")
def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    need: list[bool],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``norm.layer_norm_bwd``."""
    dx = make_dx(x, need[0])
    _, dweight, dbias = norm_bwd(launch_traced, dy, x, weight, mean, rstd, 0.0, dx, need[1], need[2], bias_dtype)
    return _given(dx, x), _given(dweight, x), _given(dbias, x)


@op("fusedops_triton::rms_norm_fwd")
def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As ``norm.rms_norm_fwd``."""
    return _rms_norm_fwd(launch_traced, x, weight, eps, weight_offset, out_dtype)


@op("fusedops_triton::rms_norm_bwd")
def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, need: list[bool]
) -> tuple[Tensor, Tensor]:
    """As ``norm.rms_norm_bwd``."""
    dx = make_dx(x, need[0])
    _, dweight, _ = norm_bwd(launch_traced, dy, x, weight, None, rstd, weight_offset, dx, need[1], False, None)
    return _given(dx, x), _given(dweight, x)


@op("fusedops_triton::add_norm_fwd")
def add_norm_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    eps: float,
    weight_offset: float,
    seed: Tensor | None,
    dropout_p: float,
    post_norm: bool,
    keep_total: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As ``add_norm.add_norm_fwd``."""
    y, residual_out, total, mean, rstd = add_norm.add_norm_fwd(
        launch_traced,
        x,
        residual,
        weight,
        bias,
        centred,
        eps,
        weight_offset,
        seed,
        dropout_p,
        post_norm,
        keep_total,
        out_dtype,
        residual_dtype,
    )
    return y, residual_out, _given(total, x), _given(mean, x), rstd


@op("fusedops_triton::add_norm_bwd")
def add_norm_bwd(
    dy: Tensor,
    dresidual_out: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    seed: Tensor | None,
    dropout_p: float,
    post_norm: bool,
    need: list[bool],
    input_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``add_norm.add_norm_bwd``."""
    grads = add_norm.add_norm_bwd(
        launch_traced, dy, dresidual_out, total, weight, mean, rstd, weight_offset, seed, dropout_p, post_norm, need,
        input_dtype, residual_dtype, bias_dtype,
    )  # fmt: skip
    dinput, dresidual, dweight, dbias = (_given(grad, total) for grad in grads)
    return dinput, dresidual, dweight, dbias


@op("fusedops_triton::cross_entropy_fwd")
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``cross_entropy.fwd``."""
    options = cross_entropy.Options(ignore_index, reduction, label_smoothing, z_loss, softcap)
    return cross_entropy.fwd(launch_traced, x, target, weight, options)


@op("fusedops_triton::cross_entropy_bwd")
def cross_entropy_bwd(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    total_weight: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """As ``cross_entropy.bwd``, in memory of its own."""
    options = cross_entropy.Options(ignore_index, reduction, label_smoothing, z_loss, softcap)
    return cross_entropy.bwd(launch_traced, dloss, x, target, weight, stats, total_weight, options)


def _given(grad: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if grad is None else grad
