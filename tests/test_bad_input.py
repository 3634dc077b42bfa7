"""What no op can work with: a ValueError or TypeError that names op and argument, the same words in every backend."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fusedops
from fusedops import nn, testing
from fusedops.registry import OPS, Case, OpSpec

ROWS, HIDDEN = 4, 8
OVER_ROWS = [spec for spec in OPS.values() if spec.takes("normalized_shape")]
every_op = pytest.mark.parametrize("spec", OVER_ROWS, ids=[spec.name for spec in OVER_ROWS])


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
NAN, INF, HUGE = float("nan"), float("inf"), 10**400  # the last one more than a float can hold
NO_NUMBERS = (NAN, INF, HUGE, True, False, "1", 1j, [1.0], np.bool_(True), np.ones(2), torch.tensor(0.0), torch.ones(2))
NO_FLAGS = (1, 0, None, "no", torch.tensor(True))
OPTIONS: dict[str, tuple[Any, ...]] = {
    "normalized_shape": (7, (), (2, ROWS, HIDDEN), -1, 8.0, (8.0,), "8", None, (HIDDEN, 1), [[HIDDEN]]),
    "eps": (-1e-5, -1, *NO_NUMBERS),
    "weight_offset": (None, -HUGE, *NO_NUMBERS),
    "out_dtype": (torch.int32, torch.float64, torch.complex64, "bf16", []),
    "residual_dtype": (torch.int32, torch.float64, "bf16", []),
    "post_norm": NO_FLAGS,
    "training": NO_FLAGS,
    "dropout_p": (-0.1, 1.1, None, *NO_NUMBERS),
    "backend": ("cuda", 3, "", [], ["native"], {}),
}


def _freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def cases() -> Iterator[Any]:
    for spec in OVER_ROWS:
        parameters = inspect.signature(spec.function).parameters
        for name in spec.grads:
            for kind, make in {**TENSORS, **({} if name == "input" else SHAPES)}.items():
                yield pytest.param(spec, name, make, id=f"{spec.name}-{name}-{kind}")
            if parameters[name].default is inspect.Parameter.empty:
                yield pytest.param(spec, name, lambda t: None, id=f"{spec.name}-{name}-None")
        for name in filter(OPTIONS.__contains__, parameters):  # a set has another order in every process
            for value in OPTIONS[name]:
                yield pytest.param(spec, name, lambda t, value=value: value, id=f"{spec.name}-{name}-{value!r:.20}")


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


@pytest.mark.parametrize(("spec", "name", "make"), list(cases()))
def test_explain_refuses_what_the_op_refuses(spec: OpSpec, name: str, make: Callable[[Any], Any]) -> None:
    kwargs = good(spec)
    kwargs[name] = make(kwargs.get(name))
    with pytest.raises(ValueError, match=rf"^{spec.name}: \w+: expected ") as refused:
        spec.function(**{"backend": "reference", **kwargs})
    with pytest.raises(ValueError, match=f"^{re.escape(str(refused.value))}$"):
        fusedops.explain(spec.name, **kwargs)


@every_op
def test_explain_refuses_arguments_that_the_op_has_not(spec: OpSpec) -> None:
    kwargs = good(spec)
    with pytest.raises(TypeError, match=rf"^{spec.name}: got an unexpected keyword argument 'epsilon'"):
        fusedops.explain(spec.name, **kwargs, epsilon=1e-5)
    del kwargs["input"]
    with pytest.raises(TypeError, match=rf"^{spec.name}: missing a required argument: 'input'"):
        fusedops.explain(spec.function, **kwargs)


NUMBERS = {
    "eps": (np.float32(0.5), np.float64(0.5), np.float16(0.5), np.int64(1), 1, 0, Fraction(1, 2)),
    "weight_offset": (np.float32(-0.5), np.float64(0.5), np.int8(1), np.float32(0), 1, 0, Fraction(1, 2)),
    "dropout_p": (np.float32(1.0), np.float64(0.0), np.int64(1), 1, 0, Fraction(1, 1)),
}


@every_op
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_any_kind_count_as_floats(spec: OpSpec, name: str, backend: str, device: str) -> None:
    if name not in inspect.signature(spec.function).parameters:
        pytest.skip(f"{spec.name} has no {name}")
    kwargs = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in good(spec).items()}
    for value in NUMBERS[name]:
        expected = spec.function(**kwargs, backend=backend, **{name: float(value)})
        torch.testing.assert_close(spec.function(**kwargs, backend=backend, **{name: value}), expected, rtol=0, atol=0)


@every_op
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_any_kind_count_as_floats_when_compiled(spec: OpSpec, name: str, backend: str, device: str) -> None:
    """An argument of NumPy's is an array to Dynamo, which then leaves the graph to read it."""
    if name not in inspect.signature(spec.function).parameters or device != "cpu" or backend == "triton":
        pytest.skip("nothing of it there")
    kwargs = good(spec)
    torch._dynamo.reset()
    compiled = torch.compile(lambda n: spec.function(**kwargs, backend=backend, **{name: n}), backend="eager")
    for value in (NUMBERS[name][0], 1):
        expected = spec.function(**kwargs, backend=backend, **{name: float(value)})
        torch.testing.assert_close(compiled(value), expected, rtol=0, atol=0)


def module_cases() -> Iterator[Any]:
    for kind in (nn.LayerNorm, nn.RMSNorm, nn.AddLayerNorm, nn.AddRMSNorm):
        names = ["eps", "out_dtype"] + ["weight_offset"] * issubclass(kind, nn.RMSNorm)
        names += ["dropout_p", "post_norm", "residual_dtype"] * hasattr(kind, "post_norm")
        for name in names:
            for value in OPTIONS[name]:
                if value is not torch.float64:  # an input of that dtype may come
                    yield pytest.param(kind, name, value, id=f"{kind.__name__}-{name}-{value!r:.20}")


@pytest.mark.parametrize(("kind", "name", "value"), list(module_cases()))
def test_bad_option_is_named_when_a_module_is_made(kind: type[torch.nn.Module], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: {name}: expected .*, got .+"):
        kind(HIDDEN, **{name: value})


def test_numpys_flags_count_as_pythons() -> None:
    x, residual, weight = torch.ones(2, HIDDEN), torch.full((2, HIDDEN), 3.0), torch.ones(HIDDEN)
    for op in (fusedops.add_rms_norm, fusedops.add_layer_norm):
        for training in (True, False):
            _, total = op(x, residual, HIDDEN, weight, dropout_p=1.0, training=np.bool_(training))
            assert torch.equal(total, residual if training else residual + x)
        for post_norm in (True, False):
            results = [op(x, residual, HIDDEN, weight, post_norm=kind(post_norm)) for kind in (bool, np.bool_)]
            assert all(map(torch.equal, *results))
    assert nn.AddRMSNorm(HIDDEN, post_norm=np.True_).post_norm is True


def test_modules_keep_floats() -> None:
    """Whatever number they were given: TorchScript, state and repr know only Python's own."""
    module = nn.AddRMSNorm(HIDDEN, eps=np.float32(0.5), weight_offset=1, dropout_p=np.float64(0.25))
    assert [type(n) for n in (module.eps, module.weight_offset, module.dropout_p)] == [float] * 3
    assert (module.eps, module.weight_offset, module.dropout_p) == (0.5, 1.0, 0.25)
    assert not module.weight.any()
    assert nn.RMSNorm(HIDDEN).eps is None
    with pytest.raises(ValueError, match=r"^RMSNorm: weight_offset: expected 0\.0 without a weight, got 1\.0"):
        nn.RMSNorm(HIDDEN, elementwise_affine=False, weight_offset=1)


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
        ops = fusedops.ops
        for module in (ops._common, ops.norm, ops.norm_reference, ops.add_norm, fusedops.amp):
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


NOT_CLIPPED = {
    "sparse": r"a dense tensor, got layout torch\.sparse_coo",
    "complex": r"a dtype of .*, got torch\.complex64",
    "int64": r"a dtype of .*, got torch\.int64",
    "float8": r"a dtype of .*, got torch\.float8_e4m3fn",
    "freed": r"a tensor with storage, got one of shape \(3,\) whose storage was freed",
}


@pytest.mark.parametrize("norm_type", [2, 1.0, INF])
@pytest.mark.parametrize("kind", NOT_CLIPPED)
def test_gradients_that_are_not_clipped_are_named(kind: str, norm_type: float, backend: str) -> None:
    """By their parameter, before the others are scaled; hooks of a graph may make any of them."""
    params: list[Any] = [types.SimpleNamespace(grad=torch.ones(3)) for _ in range(3)]
    params[1].grad = TENSORS[kind](params[1].grad)
    words = rf"^clip_grad_norm_: gradient of parameter 1: expected {NOT_CLIPPED[kind]}"
    with pytest.raises(ValueError, match=words):
        fusedops.clip_grad_norm_(params, 0.1, norm_type)
    assert all(bool((p.grad == 1).all()) for p in (params[0], params[2]))


@pytest.mark.parametrize("bad", [-1, NAN, HUGE, True, "1", None, 1j, torch.ones(2), torch.tensor(-1.0)], ids=str)
def test_a_bound_that_is_none_clips_nothing(bad: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    for norm_type in (2, 1.0):
        with pytest.raises(ValueError, match=r"^clip_grad_norm_: max_norm: expected a number ≥ 0, got "):
            fusedops.clip_grad_norm_([p], bad, norm_type)
    assert bool((p.grad == 1).all())


@pytest.mark.parametrize("bound", [np.float32(0.5), np.int64(2), 0, INF, Fraction(1, 2), torch.tensor(0.5)], ids=str)
def test_bounds_of_any_kind_clip_as_floats(bound: Any, backend: str) -> None:
    norms, grads = [], []
    for value in (bound, float(bound)):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.full((3,), 2.0)
        norms.append(fusedops.clip_grad_norm_([p], value))
        grads.append(p.grad)
    assert torch.equal(*norms)
    assert torch.equal(*grads)
    torch.testing.assert_close(grads[0], torch.full((3,), 2.0) * min(1.0, float(bound) / 12**0.5))
