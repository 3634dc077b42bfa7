r"""Adam and AdamW: m ← lerp(m, g, 1-β1), v ← β2·v + (1-β2)·g², p ← p - lr/(1-β1ᵗ) · m / (√v/√(1-β2ᵗ) + eps).

Source: Kingma and Ba, arXiv:1412.6980; amsgrad: Reddi et al., arXiv:1904.09237; decoupled weight decay: Loshchilov and
Hutter, arXiv:1711.05101. The order of operations is that of torch.optim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import OptimSpec, register
from .base import Bucket, FusedOptimizer


class Adam(FusedOptimizer):
    """Adam (L2 weight decay): torch.optim.Adam in one launch a device.

    Args:
        params: parameters, ``(name, parameter)`` pairs or group dicts; fp16 | bf16 | fp32 | fp64. They may be views of
            one buffer that lie side by side or interleave; two that share an element are refused, as far as
            ``overlaps.check_overlaps`` sees it; frozen ones without a gradient may lie anywhere.
        lr: learning rate; a 1-element tensor is read on its device, so it may change between replays of a CUDA graph.
        betas: decay of the first and second moment; 1-element tensors are read on their device, as ``lr``.
        eps: added to the denominator.
        weight_decay: times the weight, added to the gradient.
        amsgrad: divide by the running maximum of the second moment.
        maximize: step along the gradient.
        foreach: accepted for torch's sake, changes nothing.
        capturable: accepted; every step may be captured in a CUDA graph.
        differentiable: must be False.
        fused: False turns the gradient scaler's fused protocol off, as in torch; else changes nothing.
        master_weights: keep fp32 weights behind 16-bit parameters (4 bytes a parameter), which are their rounding. From
            a parameter's first step on the master is the weight: what others write into the parameter (a model's
            ``load_state_dict``, ``p.fill_()``, ``p.data``) is overwritten by the next step, unless that finds no master
            and makes it anew: ``for state in optimizer.state.values(): state.pop("master", None)`` after the writing.
        bf16_stochastic_round: round bf16 parameters at random, up or down with the probabilities that keep the mean;
            their moments are rounded to nearest as ever, and so are fp16 and wider parameters.
        kahan_sum: keep what rounding a 16-bit parameter lost in a ``compensation`` of its dtype (2 bytes a parameter),
            and add it before the next step.
        state_dtype: dtype of the moments: fp32 | bf16 | fp16; None: the parameter's.
        max_grad_norm: clip the norm of all (unscaled) gradients to it within the step; they are not written.
        seed: of stochastic rounding, 0 to 2⁶⁴ - 1. Give optimizers of one parameter each a seed of their own.
        backend: ``"native"``, ``"triton"`` or ``"reference"`` (Apex's Adam is refused); None: the table's choice.

    Raises:
        ValueError: a parameter or option that Adam can't work with.
        UnsupportedError: an option that is not built, or a backend that can't serve it.

    A group may set every option of its own but ``max_grad_norm`` and ``backend``; at most one of ``master_weights``,
    ``kahan_sum`` and ``bf16_stochastic_round``. Every step looks at the groups' options before it writes, so a learning
    rate that a schedule made negative or NaN is refused, as in the constructor (torch goes on); only tensors on a
    device are taken as they are. State is made with a parameter's first gradient.

    *Numerics*: fp32 arithmetic (fp64 for fp64 parameters), bias corrections in fp64; weights, masters and moments are
    rounded once, when written. Deterministic: random bits are Philox's of (seed, step, index of the parameter, element
    in memory order), the same in every backend, so a run resumes from its state dict bit for bit. torch's ``foreach``
    rounds 16-bit tensors after every operation instead.
    """

    op = "adam"
    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        bf16_stochastic_round: bool = False,
        kahan_sum: bool = False,
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas) if isinstance(betas, Sequence) else betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": self._decoupled,
            "master_weights": master_weights,
            "bf16_stochastic_round": bf16_stochastic_round,
            "kahan_sum": kahan_sum,
            "state_dtype": state_dtype,
            "seed": seed,
        }
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, backend=backend)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return torch's keys of the moments."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def make_plan(self, bucket: Bucket) -> Any:
        """Return the backend's AdamPlan."""
        largest = bucket.column("max_exp_avg_sq")
        plan: Any = bucket.backend.adam_plan(
            bucket.params,
            bucket.column("exp_avg"),
            bucket.column("exp_avg_sq"),
            [] if all(t is None for t in largest) else largest,
            bucket.column("master"),
            bucket.column("compensation"),
            bucket.column("step"),
            bucket.group,
            bucket.index,
        )
        return plan

    def arguments(self) -> tuple[list[Any], ...]:
        """Return the lists of AdamPlan.prepare, one element a group."""
        groups = self.param_groups
        return (
            [g["lr"] for g in groups],
            [g["betas"][0] for g in groups],
            [g["betas"][1] for g in groups],
            [g["eps"] for g in groups],
            [g["weight_decay"] for g in groups],
            [g["decoupled_weight_decay"] for g in groups],
            [g["amsgrad"] for g in groups],
            [g["maximize"] for g in groups],
            [g["seed"] if g["bf16_stochastic_round"] else None for g in groups],
        )


class AdamW(Adam):
    """AdamW (decoupled weight decay): torch.optim.AdamW in one launch a device.

    Arguments and numerics are those of ``Adam``; the weight is multiplied by ``1 - lr * weight_decay`` before the step.
    """

    op = "adamw"
    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        bf16_stochastic_round: bool = False,
        kahan_sum: bool = False,
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            master_weights=master_weights,
            bf16_stochastic_round=bf16_stochastic_round,
            kahan_sum=kahan_sum,
            state_dtype=state_dtype,
            max_grad_norm=max_grad_norm,
            seed=seed,
            backend=backend,
        )


def _condition(
    group: Mapping[str, Any], before: Mapping[str, Tensor], after: Mapping[str, Tensor], computed: bool
) -> dict[str, Tensor]:
    """Return the size of what was added up to make each tensor of a step; see ``OptimSpec.condition``.

    Args:
        group: options of the parameter's group.
        before: fp64 ``weight``, ``grad``, ``exp_avg``, ``exp_avg_sq`` before the step.
        after: fp64 ``weight``, ``exp_avg``, ``exp_avg_sq``, ``step``, and ``max_exp_avg_sq`` with amsgrad, after it.
        computed: the gradient was unscaled or clipped on its way.

    The bound is 4 roundings of this size, and a second moment takes as many: 1 − β2, the square, their product, the
    sum. Two roundings of the gradient itself (unscaled and clipped; decay·w and its addition in an L2 decay) are four
    more, for squaring doubles what it lost: there, and only there, its share counts twice.
    """
    beta1, beta2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), group["weight_decay"]
    weight, grad = before["weight"].abs(), before["grad"].abs()
    if decay and not group["decoupled_weight_decay"]:
        grad, computed = grad + decay * weight, True
    exp_avg = beta1 * before["exp_avg"].abs() + (1 - beta1) * grad
    exp_avg_sq = beta2 * before["exp_avg_sq"] + (2 if computed else 1) * (1 - beta2) * grad**2
    root = after.get("max_exp_avg_sq", after["exp_avg_sq"])
    denominator = (root / (1 - beta2 ** after["step"])).sqrt() + group["eps"]
    step_size = lr / (1 - beta1 ** after["step"])
    # Half the relative error of the second moment reaches the update; where it cancelled, that is more than rounding.
    amplified = torch.where(root > 0, exp_avg_sq / root, 1.0).clamp(min=1.0)
    update = step_size * (exp_avg + after["exp_avg"].abs() * amplified) / denominator
    return {
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "max_exp_avg_sq": exp_avg_sq.maximum(root),
        "weight": weight * (1 + lr * decay) + update,
    }


def _bytes_per_parameter(dtype: torch.dtype, state_dtype: torch.dtype, master: bool) -> int:
    """Return gradient read, both moments read and written, weight (or master) read, weight and master written."""
    weights = dtype.itemsize + 2 * 4 if master else 2 * dtype.itemsize
    return dtype.itemsize + 4 * state_dtype.itemsize + weights


_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True},
    {"betas": (0.8, 0.95), "eps": 1e-6},
)

for _name, _ours, _torchs in (("adam", Adam, torch.optim.Adam), ("adamw", AdamW, torch.optim.AdamW)):
    register(OptimSpec(_name, _ours, _torchs, _OPTIONS, _condition, _bytes_per_parameter))
