"""Modules: subclasses of PyTorch's own, with the same constructors and state dicts.

What PyTorch's have not (``out_dtype``, ``weight_offset``) has its default in the class too, so that ``fusedops.patch``
can turn an existing instance into one of these. TorchScript finds what only the class has among ``__constants__``.
``torch.jit.script`` compiles plain PyTorch with the same numbers (TorchScript knows neither our dispatch nor autocast).
"""

# No `from __future__ import annotations`: TorchScript reads the annotations of attributes as objects.
from typing import Any

import torch
import torch.fx
from torch import Tensor

from ._options import cap, epsilon, flag, number, probability
from .ops import add_layer_norm, add_rms_norm, cross_entropy, layer_norm, rms_norm
from .ops._common import check_result_dtype, offset

for _name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "cross_entropy"):
    torch.fx.wrap(_name)  # symbolic_trace records the call, as it does PyTorch's own


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on ``fusedops.layer_norm``.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as PyTorch's.
        out_dtype: dtype of the result; None: the input's, under autocast the autocast dtype.
    """

    __constants__ = [*torch.nn.LayerNorm.__constants__, "out_dtype"]  # noqa: RUF012  # torch's is a list
    out_dtype: torch.dtype | None = None

    def __init__(self, *args: Any, out_dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        owner = type(self).__name__
        self.eps = epsilon(owner, self.eps)
        check_result_dtype(owner, "out_dtype", out_dtype)
        self.out_dtype = out_dtype

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (..., *normalized_shape)."""
        if torch.jit.is_scripting():
            wide = torch.float64 if input.dtype == torch.float64 else torch.float32
            weight = None if self.weight is None else self.weight.to(wide)
            bias = None if self.bias is None else self.bias.to(wide)
            y = torch.nn.functional.layer_norm(input.to(wide), self.normalized_shape, weight, bias, self.eps)
            return y.to(input.dtype if self.out_dtype is None else self.out_dtype)
        else:  # TorchScript leaves out only what is in an else
            return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, out_dtype=self.out_dtype)


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` on ``fusedops.rms_norm``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as PyTorch's.
        weight_offset: added to the weight, which starts at ``1 - weight_offset``; 1.0 for Gemma's weights.
        out_dtype: dtype of the result; None: the input's, under autocast the autocast dtype.
    """

    __constants__ = [*torch.nn.RMSNorm.__constants__, "weight_offset", "out_dtype"]  # noqa: RUF012  # torch's is a list
    weight_offset: float = 0.0
    out_dtype: torch.dtype | None = None

    def __init__(
        self, *args: Any, weight_offset: float = 0.0, out_dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        owner = type(self).__name__
        self.eps = None if self.eps is None else epsilon(owner, self.eps)
        check_result_dtype(owner, "out_dtype", out_dtype)
        self.weight_offset, self.out_dtype = offset(owner, weight_offset, self.weight), out_dtype
        self.reset_parameters()  # again, with the offset known

    def reset_parameters(self) -> None:
        """Set the weight so that rows are scaled by one."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (..., *normalized_shape)."""
        if torch.jit.is_scripting():
            wide = torch.float64 if input.dtype == torch.float64 else torch.float32
            weight = None if self.weight is None else self.weight.to(wide) + self.weight_offset
            y = torch.nn.functional.rms_norm(input.to(wide), self.normalized_shape, weight, self.eps)
            return y.to(input.dtype if self.out_dtype is None else self.out_dtype)
        else:  # TorchScript leaves out only what is in an else
            return rms_norm(
                input, self.normalized_shape, self.weight, self.eps, weight_offset=self.weight_offset,
                out_dtype=self.out_dtype,
            )  # fmt: skip

    def extra_repr(self) -> str:
        """Show what PyTorch's shows, and an offset."""
        return super().extra_repr() + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")


class AddLayerNorm(LayerNorm):
    """``fusedops.add_layer_norm`` as a module: ``(input, residual)`` to the norm of their sum and the next residual.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as PyTorch's LayerNorm.
        dropout_p: the share of ``input`` that is dropped while training.
        post_norm: the next residual is the norm, not the sum.
        out_dtype: dtype of the norm; None: the input's, under autocast the autocast dtype.
        residual_dtype: dtype of the sum and of the next residual; None: the residual's.
    """

    post_norm: bool = False  # modules that were pickled before it was have none

    def __init__(
        self,
        *args: Any,
        dropout_p: float = 0.0,
        post_norm: bool = False,
        residual_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        owner = type(self).__name__
        check_result_dtype(owner, "residual_dtype", residual_dtype)
        self.dropout_p = probability(owner, "dropout_p", dropout_p)
        self.post_norm, self.residual_dtype = flag(owner, "post_norm", post_norm), residual_dtype

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Normalise ``residual + dropout(input)``, both (..., *normalized_shape)."""
        return add_layer_norm(
            input, residual, self.normalized_shape, self.weight, self.bias, self.eps, dropout_p=self.dropout_p,
            training=self.training, post_norm=self.post_norm, out_dtype=self.out_dtype,
            residual_dtype=self.residual_dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Show dropout and the mode beside what the norm shows."""
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}, post_norm={self.post_norm}"


class AddRMSNorm(RMSNorm):
    """``fusedops.add_rms_norm`` as a module: ``(input, residual)`` to the norm of their sum and the next residual.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as PyTorch's RMSNorm.
        weight_offset: as RMSNorm's.
        dropout_p: the share of ``input`` that is dropped while training.
        post_norm: the next residual is the norm, not the sum.
        out_dtype: dtype of the norm; None: the input's, under autocast the autocast dtype.
        residual_dtype: dtype of the sum and of the next residual; None: the residual's.
    """

    post_norm: bool = False  # modules that were pickled before it was have none

    def __init__(
        self,
        *args: Any,
        dropout_p: float = 0.0,
        post_norm: bool = False,
        residual_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        owner = type(self).__name__
        check_result_dtype(owner, "residual_dtype", residual_dtype)
        self.dropout_p = probability(owner, "dropout_p", dropout_p)
        self.post_norm, self.residual_dtype = flag(owner, "post_norm", post_norm), residual_dtype

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Normalise ``residual + dropout(input)``, both (..., *normalized_shape)."""
        return add_rms_norm(
            input, residual, self.normalized_shape, self.weight, self.eps, weight_offset=self.weight_offset,
            dropout_p=self.dropout_p, training=self.training, post_norm=self.post_norm, out_dtype=self.out_dtype,
            residual_dtype=self.residual_dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Show dropout and the mode beside what the norm shows."""
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}, post_norm={self.post_norm}"


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on ``fusedops.cross_entropy``.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as PyTorch's.
        z_loss: adds ``z_loss · lse²`` to the loss of each row.
        softcap: the logits are ``softcap · tanh(input / softcap)``; None: ``input`` itself.
        inplace_backward: write the gradient over the logits, which are lost.
    """

    z_loss: float = 0.0
    softcap: float | None = None
    inplace_backward: bool = False

    def __init__(
        self,
        *args: Any,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace_backward: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        owner = type(self).__name__
        self.label_smoothing = probability(owner, "label_smoothing", self.label_smoothing)
        self.z_loss = number(owner, "z_loss", z_loss, "a finite number ≥ 0", 0.0)
        self.softcap = None if softcap is None else cap(owner, softcap)
        self.inplace_backward = flag(owner, "inplace_backward", inplace_backward)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits (rows, classes, ...) and targets (rows, ...)."""
        return cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, softcap=self.softcap,
            inplace_backward=self.inplace_backward,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Show the options."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, softcap={self.softcap}"
        )
