"""What no op can work with: a ValueError or TypeError that names op and argument, the same words in every backend."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops.registry import OPS, Case, OpSpec

ROWS, HIDDEN = 4, 8
every_op = pytest.mark.parametrize("spec", OPS.values(), ids=OPS)


def good(spec: OpSpec) -> dict[str, Any]:
    """Return the arguments of a sound call."""
    return {**tensors(spec, ROWS, HIDDEN), "normalized_shape": (HIDDEN,)}


def tensors(spec: OpSpec, rows: int, hidden: int) -> dict[str, Tensor]:
    case = Case((rows, hidden), 1, dict.fromkeys(spec.grads, torch.float32))
    return {name: torch.rand(testing.shape_of(spec, case, name)) for name in spec.grads}


# What takes the place of a tensor: made from the good one.
TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "int64": lambda t: t.to(torch.int64),
    "bool": lambda t: t > 0.5,
    "complex": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "sparse": lambda t: t.to_sparse(),
    "sparse with fp64": lambda t: t.double().to_sparse(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8),
    "another device": lambda t: t.to("meta"),
    "freed": lambda t: _freed(t),
    "a list": lambda t: t.tolist(),
    "a number": lambda t: 1.0,
    "a string": lambda t: "ones",
}
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "shorter": lambda t: t[..., :-1].contiguous(),
    "longer": lambda t: torch.cat([t, t], -1),
    "one more dimension": lambda t: t[None],
    "no dimension": lambda t: t.flatten()[0],
    "nothing in it": lambda t: t[..., :0],
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "normalized_shape": (7, (), (2, ROWS, HIDDEN), -1, 8.0, (8.0,), "8", None, (HIDDEN, 1)),
    "eps": (-1e-5, float("nan"), "1e-5", 1j, [1e-5], torch.ones(2)),
    "weight_offset": ("1", None, 1j),
    "out_dtype": (torch.int32, torch.float64, torch.complex64, "bf16"),
    "residual_dtype": (torch.int32, torch.float64, "bf16"),
    "post_norm": (1, None, "yes", torch.tensor(True)),
    "dropout_p": (-0.1, 1.1, float("nan"), "0.1", None),
    "backend": ("cuda", 3),
}


def _freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def cases() -> Iterator[Any]:
    for spec in OPS.values():
        parameters = inspect.signature(spec.function).parameters
        for name in spec.grads:
            for kind, make in {**TENSORS, **({} if name == "input" else SHAPES)}.items():
                yield pytest.param(spec, name, make, id=f"{spec.name}-{name}-{kind}")
            if parameters[name].default is inspect.Parameter.empty:
                yield pytest.param(spec, name, lambda t: None, id=f"{spec.name}-{name}-None")
        for name in parameters.keys() & OPTIONS.keys():
            for value in OPTIONS[name]:
                yield pytest.param(spec, name, lambda t, value=value: value, id=f"{spec.name}-{name}-{value}")


def refuse(spec: OpSpec, name: str, make: Callable[[Any], Any], backend: str) -> str:
    kwargs = good(spec)
    kwargs[name] = make(kwargs.get(name))
    with pytest.raises((ValueError, TypeError)) as caught:
        spec.function(**{"backend": backend, **kwargs})
    return str(caught.value)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "cached"])
@pytest.mark.parametrize(("spec", "name", "make"), list(cases()))
def test_bad_argument_is_named(
    spec: OpSpec, name: str, make: Callable[[Any], Any], warm: bool, backend: str, device: str
) -> None:
    """Op, argument, what was expected and what came; as plainly when dispatch has seen the like of the call before."""
    if device != "cpu":
        pytest.skip("the checks come before any device")
    if warm:
        for dtype in (torch.float32, torch.float64 if backend != "triton" else torch.bfloat16):
            spec.function(
                **{k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in good(spec).items()}, backend=backend
            )
    message = refuse(spec, name, make, backend)
    says = rf"{name}: expected .*, got .+"
    if name == "input" and make is TENSORS["another device"]:  # it says where the others have to be
        says = r"(weight|residual): expected a tensor on meta, as input, got cpu"
    assert re.fullmatch(rf"{spec.name}: {says}", message, re.DOTALL), message


@every_op
@pytest.mark.parametrize("name", ["input", "weight"])
def test_bad_argument_is_named_when_compiled(spec: OpSpec, name: str, backend: str, device: str) -> None:
    if device != "cpu" or backend == "triton":
        pytest.skip("the checks come before any device")
    kwargs = good(spec)
    kwargs[name] = kwargs[name].to(torch.int64)
    compiled = torch.compile(lambda: spec.function(**kwargs, backend=backend), backend="eager", fullgraph=True)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"{spec.name}: {name}: expected .*, got .*int64"):
        compiled()


class Tagged(Tensor):
    """A subclass without a dispatch of its own."""


def _in_forward_mode(function: Callable[..., Any], x: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return function(x)


# What makes every call take plain PyTorch.
PLAIN: dict[str, Callable[[Callable[..., Any], Tensor], Any]] = {
    "vmap": lambda function, x: torch.vmap(function)(x[None]),
    "forward mode": _in_forward_mode,
    "subclass": lambda function, x: function(x.as_subclass(Tagged)),
    "nested": lambda function, x: function(torch.nested.nested_tensor([x])),
    "compiled subclass": lambda function, x: torch.compile(function, backend="eager")(x.as_subclass(Tagged)),
}


@every_op
@pytest.mark.parametrize("under", [*PLAIN, "disabled"])
@pytest.mark.parametrize("name", ["out_dtype", "residual_dtype", "backend"])
def test_bad_option_is_named_where_plain_pytorch_serves(
    spec: OpSpec, name: str, under: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in inspect.signature(spec.function).parameters:
        pytest.skip(f"{spec.name} has no {name}")
    torch._dynamo.reset()
    if under == "disabled":
        for module in (fusedops.ops._common, fusedops.ops.norm, fusedops.ops.add_norm, fusedops.amp):
            monkeypatch.setattr(module, "CONFIG", dataclasses.replace(fusedops.config.CONFIG, disabled=True))
    call = PLAIN.get(under, lambda function, x: function(x))
    for value in OPTIONS[name]:

        def function(x: Tensor, value: Any = value) -> Any:
            return spec.function(x, *([x] if spec.like_input else []), (HIDDEN,), **{name: value})

        with pytest.raises(Exception, match=rf"{spec.name}: {name}: expected .*, got"):
            call(function, torch.rand(ROWS, HIDDEN))


@every_op
def test_a_shape_that_dispatch_takes_for_another(spec: OpSpec, backend: str) -> None:
    """Calls count as alike when their rows are as many to the next power of two: here the second has no whole rows."""
    sound = tensors(spec, 5, 7)
    spec.function(**sound, normalized_shape=(7,), backend=backend)
    other = {name: torch.rand(4, 8) if t.dim() == 2 else t for name, t in sound.items()}
    with pytest.raises(ValueError, match=rf"{spec.name}: normalized_shape: expected .*\(4, 8\).*, got \(7,\)"):
        spec.function(**other, normalized_shape=(7,), backend=backend)


def test_a_gradient_that_lies_over_itself_is_not_clipped(backend: str) -> None:
    """Clipping writes: each element would be scaled once for every place it has; and the others stay as they are."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    for p, grad in zip(params, (torch.ones(10)[::2], torch.ones(1).expand(5), torch.ones(5)), strict=True):
        p.grad = grad
    with pytest.raises(ValueError, match=r"clip_grad_norm_: parameters: expected .* own, got one of shape \(5,\)"):
        fusedops.clip_grad_norm_(params, 1.0)
    assert all(bool((p.grad == 1).all()) for p in params)
