"""Other packages, each as its users run it, behind the signature of our own op.

An entry of ``OPS`` maps a peer's name to a function of (op, under autocast?) that returns a differentiable function of
the op's own keyword arguments. It raises ImportError where the package is not installed and ``NotServed`` for an op
or dtype the package does not have. ``OPTIMIZERS`` is the same for a list of parameters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]


class NotServed(Exception):
    """The package is there, but has nothing for this cell; the message says what."""


# ---------------------------------------------------------------- ops


def _torch(op: str, autocast: bool) -> Function:
    """PyTorch's own function, after an add where the op has one; under autocast with the cast of the next matmul."""
    added = op.startswith("add_")
    function: Callable[..., Any] | None = getattr(F, op.removeprefix("add_"), None)
    if function is None:
        raise NotServed(f"torch has no {op}")

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(input.device.type, input.dtype, enabled=autocast):
            if not added:
                return function(input, *args, **kwargs).to(input.dtype)
            total = input + kwargs.pop("residual")
            return function(total, *args, **kwargs).to(input.dtype), total

    return run if autocast or added else function


def _compile(op: str, autocast: bool) -> Function:
    torch._dynamo.reset()  # a new shape must be a new compilation, not a dynamic one
    torch._functorch.config.donated_buffer = False  # backward is timed many times on one graph
    compiled: Function = torch.compile(_torch(op, autocast), dynamic=False)
    return compiled


def _liger(op: str, autocast: bool) -> Function:
    if op == "layer_norm":
        layer_norm = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return lambda input, normalized_shape, weight, bias, eps=1e-5: layer_norm.apply(input, weight, bias, eps)
    if op == "rms_norm":
        rms_norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        # Not in place: that overwrites the gradient it is given, which repeated runs share.
        return lambda input, normalized_shape, weight, eps=1e-6: rms_norm.apply(input, weight, eps, 0.0, "llama", False)
    if op == "cross_entropy":
        loss = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
        # Its forward makes the gradient, where the logits were: it gets a copy of them, which is timed with it.
        return lambda input, target: loss.apply(input.clone(), target, None)[0]
    raise NotServed(f"no adapter for {op}")


def _quack(op: str, autocast: bool) -> Function:
    quack = importlib.import_module("quack.rmsnorm")
    if op == "rms_norm":
        return lambda input, normalized_shape, weight, eps=1e-6: quack.rmsnorm(input, weight, eps=eps)
    if op == "layer_norm":

        def forward(eps: float, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            if weight.dtype is not torch.float32:
                raise NotServed("quack's LayerNorm takes fp32 weights only")
            y, rstd, mean = quack.layernorm_fwd(x, weight, bias, eps, True, True)
            return y, mean, rstd

        def backward(eps: float, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *saved: Tensor) -> Any:
            return quack.layernorm_bwd(x, weight, dy, saved[1], saved[0])

        return _raw(forward, backward)
    raise NotServed(f"no adapter for {op}")


def _flash(op: str, autocast: bool) -> Function:
    if op == "cross_entropy":
        losses = importlib.import_module("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
        return lambda input, target: losses(input, target)[0].sum() / (target != -100).sum()
    norm = importlib.import_module("flash_attn.ops.triton.layer_norm").layer_norm_fn
    if op == "layer_norm":
        return lambda input, normalized_shape, weight, bias, eps=1e-5: norm(input, weight, bias, eps=eps)
    if op == "rms_norm":
        return lambda input, normalized_shape, weight, eps=1e-6: norm(input, weight, None, eps=eps, is_rms_norm=True)
    raise NotServed(f"no adapter for {op}")


def _apex_fused(op: str, autocast: bool) -> Function:
    apex = importlib.import_module("fused_layer_norm_cuda")
    if op == "layer_norm":
        return _raw(
            lambda eps, x, weight, bias: apex.forward_affine(x, weight.shape, weight, bias, eps),
            lambda eps, dy, x, weight, bias, mean, rstd: apex.backward_affine(
                dy, mean, rstd, x, weight.shape, weight, bias, eps, False
            ),
            autocast,
        )
    if op == "rms_norm":
        return _raw(
            lambda eps, x, weight: apex.rms_forward_affine(x, weight.shape, weight, eps),
            lambda eps, dy, x, weight, rstd: apex.rms_backward_affine(dy, rstd, x, weight.shape, weight, eps, False),
            autocast,
        )
    raise NotServed(f"no adapter for {op}")


def _apex_fast(op: str, autocast: bool) -> Function:
    apex = importlib.import_module("fast_layer_norm")
    if op != "layer_norm":
        raise NotServed(f"Apex Fast has no {op}")
    return _raw(
        lambda eps, x, weight, bias: apex.ln_fwd(x, weight, bias, eps),
        lambda eps, dy, x, weight, bias, mean, rstd: apex.ln_bwd(dy, x, mean, rstd, weight, None, False)[:3],
        autocast,
    )


class _Raw(torch.autograd.Function):
    """A package's forward and backward kernels as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, eps: float, *tensors: Tensor) -> Tensor:
        y, *saved = forward(eps, *tensors)
        ctx.backward_of, ctx.eps = backward, eps
        ctx.save_for_backward(*tensors, *saved)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, None, None, *ctx.backward_of(ctx.eps, dy, *ctx.saved_tensors)


def _raw(forward: Callable[..., Any], backward: Callable[..., Any], cast_parameters: bool = False) -> Function:
    """Wrap raw kernels; Apex under autocast rounds the parameters to the autocast dtype first."""

    def run(input: Tensor, normalized_shape: Any, *parameters: Tensor, eps: float = 1e-5, **named: Tensor) -> Tensor:
        given = (*parameters, *named.values())
        if cast_parameters:
            given = tuple(p.to(input.dtype) for p in given)
        y: Tensor = _Raw.apply(forward, backward, eps, input, *given)
        return y

    return run


OPS: dict[str, Callable[[str, bool], Function]] = {
    "torch": _torch,
    "compile": _compile,
    "liger": _liger,
    "quack": _quack,
    "flash": _flash,
    "apex-fused": _apex_fused,
    "apex-fast": _apex_fast,
}


def load(name: str, op: str, autocast: bool, device: str | torch.device) -> Function:
    """Return a package's function for an op.

    Raises:
        NotServed: the package has no such op, or no kernels for the device.
        ImportError: the package is not installed.
    """
    if name not in ("torch", "compile") and torch.device(device).type != "cuda":
        raise NotServed("its kernels are for CUDA devices")
    return OPS[name](op, autocast)


# ---------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class Stepper:
    """An optimizer over a list of parameters that have gradients.

    Attributes:
        step: does one step, clipping included where asked for.
        state: a parameter's ``exp_avg``, ``exp_avg_sq`` and, if it has one, ``master``.
    """

    step: Callable[[], Any]
    state: Callable[[Tensor], dict[str, Tensor]]


def _torch_optimizer(**options: Any) -> Callable[..., Stepper]:
    def make(params: Sequence[Tensor], reference: Any, state_dtype: torch.dtype, master: bool, clip: float | None,
             hyper: dict[str, Any]) -> Stepper:  # fmt: skip
        if master or state_dtype is not params[0].dtype:
            raise NotServed("torch keeps state in the parameter's dtype and has no master weights")
        optimizer = reference(params, **hyper, **options)

        def step() -> None:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params, clip, foreach=True)
            optimizer.step()

        return Stepper(step, lambda p: optimizer.state[p])

    return make


def _apex_adam(params: Sequence[Tensor], reference: Any, state_dtype: torch.dtype, master: bool, clip: float | None,
               hyper: dict[str, Any]) -> Stepper:  # fmt: skip
    """Call Apex's kernels as its FusedAdam does; with masters, its capturable kernel, the only one that has them."""
    amp_C = importlib.import_module("amp_C")
    if params[0].device.type != "cuda":
        raise NotServed("its kernels are for CUDA devices")
    if state_dtype is not torch.float32 or clip is not None:
        raise NotServed("Apex's Adam keeps fp32 state and does not clip")
    moments = [[torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    masters = [p.detach().float() for p in params] if master else []
    (beta1, beta2), decoupled = hyper["betas"], int(reference is torch.optim.AdamW)
    device = params[0].device
    skip = torch.zeros(1, dtype=torch.int, device=device)
    count, lr, one = (torch.full((1,), v, device=device) for v in (0, hyper["lr"], 1.0))
    count = count.int()
    done = 0

    def step() -> None:
        nonlocal done, count
        done += 1
        lists = [[p.grad for p in params], [p.detach() for p in params], *moments]
        if master:
            count += 1
            amp_C.multi_tensor_adam_capturable_master(
                65536, skip, [*lists, masters], lr, beta1, beta2, hyper["eps"], count, decoupled, 1,
                hyper["weight_decay"], one,
            )  # fmt: skip
        else:
            amp_C.multi_tensor_adam(
                65536, skip, lists, hyper["lr"], beta1, beta2, hyper["eps"], done, decoupled, 1, hyper["weight_decay"]
            )

    position = {id(p): i for i, p in enumerate(params)}

    def state(p: Tensor) -> dict[str, Tensor]:
        i = position[id(p)]
        found = {"exp_avg": moments[0][i], "exp_avg_sq": moments[1][i], "step": torch.tensor(float(done))}
        return {**found, "master": masters[i]} if master else found

    return Stepper(step, state)


OPTIMIZERS: dict[str, Callable[..., Stepper]] = {
    "torch": _torch_optimizer(fused=True),
    "foreach": _torch_optimizer(foreach=True),
    "apex-adam": _apex_adam,
}
# What --vs takes beside the names above.
ALIASES = {
    "apex": ("apex-fused", "apex-fast", "apex-adam"),
    "flash-attn": ("flash",),
    "torch.compile": ("compile",),
    "all": (*OPS, *OPTIMIZERS),
}
