"""What PyTorch's machinery expects of an op: second derivatives, transforms, subclasses, memory, views, versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops import testing
from fusedops.registry import OPS, Case, OpSpec

F32, BF16 = torch.float32, torch.bfloat16
SPECS = pytest.mark.parametrize("spec", OPS.values(), ids=OPS)
OVER_ROWS = [spec for spec in OPS.values() if spec.takes("normalized_shape")]
ROWS_SPECS = pytest.mark.parametrize("spec", OVER_ROWS, ids=[spec.name for spec in OVER_ROWS])
# Those called with an input and a shape alone; the others have such tests of their own.
NORMS = [spec for spec in OVER_ROWS if not spec.like_input]
NORM_SPECS = pytest.mark.parametrize("spec", NORMS, ids=[spec.name for spec in NORMS])


def here() -> str:
    """Where the ``backend`` fixture puts new tensors."""
    return str(torch.get_default_device())


def mixes() -> list[tuple[OpSpec, Case]]:
    """One small case for each mix of dtypes and options in the registry."""
    found = {}
    for spec in OPS.values():
        for case in spec.cases("quick"):
            key = (spec.name, *case.dtypes.items(), case.out_dtype, str(case.options))
            if case.layout == "contiguous" and case.values == "normal":
                small = Case((3, 16), case.normalized and 1, case.dtypes, case.out_dtype, case.options)
                found.setdefault(key, (spec, small))
    return list(found.values())


@pytest.mark.parametrize(("spec", "case"), mixes(), ids=[f"{spec.name}-{case.id}" for spec, case in mixes()])
def test_second_derivatives_are_the_references(spec: OpSpec, case: Case, backend: str) -> None:
    """Under create_graph=True backward is differentiable for every mix of dtypes and option."""
    if reason := testing.refused(spec, case, backend, here()):
        pytest.skip(reason)

    names = [name for name in case.dtypes if name in spec.grads]

    def second(function: Callable[..., Tensor], wide: bool) -> list[Tensor]:
        kwargs = dict(testing.make_sample(spec, case, here()).kwargs)
        sample = testing.make_sample(spec, case, here())
        if wide:
            with testing.same_random_numbers(sample):
                kwargs.update(spec.defaults(kwargs))
            kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, torch.dtype)}
            kwargs.update({n: kwargs[n].detach().double().requires_grad_(n in names) for n in case.dtypes})
        leaves = [kwargs[name] for name in names]
        with testing.same_random_numbers(sample):
            y = testing.outputs_of(function(**kwargs))
        grads = testing.outputs_of(testing.make_grad(case, spec.reference(**sample.kwargs)))
        grads = [grad.to(one.dtype) for grad, one in zip(grads, y, strict=True)]
        first = torch.autograd.grad(y, leaves, grads, create_graph=True)
        total = sum(g.double().square().sum() for g in first if g.requires_grad)
        return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))

    got, want = second(spec.function, False), second(spec.reference, True)
    half = any(dtype.itemsize == 2 for dtype in (*case.dtypes.values(), case.out_dtype or F32))
    for name, g, t in zip(names, got, want, strict=True):
        scale = float(t.abs().max()) or 1.0
        assert g.dtype is case.dtypes[name]
        assert float((g.double() - t).abs().max()) <= (3e-2 if half else 1e-4) * scale, name


@SPECS
def test_gradgradcheck(spec: OpSpec, backend: str) -> None:
    case = Case((3, 5), 1, dict.fromkeys(spec.grads, torch.float64))
    if reason := testing.refused(spec, case, backend, here()):
        pytest.skip(reason)
    kwargs = testing.make_sample(spec, case, here()).kwargs
    leaves = [kwargs.pop(name) for name in spec.grads]
    kwargs |= {"eps": 1e-2} if spec.takes("eps") else {}
    function = lambda *tensors: spec.function(**dict(zip(spec.grads, tensors, strict=True)), **kwargs)  # noqa: E731
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@SPECS
def test_gradgradcheck_with_frozen_parts(spec: OpSpec, backend: str) -> None:
    case = Case((3, 5), 1, dict.fromkeys(spec.grads, torch.float64))
    if reason := testing.refused(spec, case, backend, here()):
        pytest.skip(reason)
    for size in range(1, len(spec.grads)):
        for wanted in combinations(spec.grads, size):
            kwargs = testing.make_sample(spec, case, here()).kwargs
            kwargs.update({name: kwargs[name].detach() for name in spec.grads if name not in wanted}, eps=1e-2)
            leaves = [kwargs.pop(name) for name in wanted]
            function = lambda *tensors: spec.function(**dict(zip(wanted, tensors, strict=True)), **kwargs)  # noqa: B023, E731
            assert torch.autograd.gradgradcheck(function, leaves), wanted


# ---------------------------------------------------------------- what takes plain torch


@NORM_SPECS
def test_functional_transforms(spec: OpSpec) -> None:
    x, w, tangent = torch.randn(3, 4, 8), torch.rand(8), torch.randn(3, 4, 8)
    op = lambda a: spec.function(a, 8, w)  # noqa: E731
    plain = lambda a: spec.reference(a, (8,), w)  # noqa: E731
    close = torch.testing.assert_close
    close(torch.func.vmap(op)(x), plain(x))
    total = lambda f: lambda a: f(a).square().sum()  # noqa: E731
    close(torch.func.grad(total(op))(x), torch.func.grad(total(plain))(x))
    close(torch.func.vmap(torch.func.grad(total(op)))(x), torch.func.grad(total(plain))(x))
    value, derivative = torch.func.jvp(plain, (x,), (tangent,))
    for got, want in zip(torch.func.jvp(op, (x,), (tangent,)), (value, derivative), strict=True):
        close(got, want)
    close(torch.func.hessian(total(op))(x[0, 0]), torch.func.hessian(total(plain))(x[0, 0]))
    with torch.autograd.forward_ad.dual_level():
        dual = op(torch.autograd.forward_ad.make_dual(x, tangent))
        close(torch.autograd.forward_ad.unpack_dual(dual).tangent, derivative)


class Tagged(Tensor):
    """A subclass that wants to see every op."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@NORM_SPECS
def test_tensor_subclasses_take_plain_torch(spec: OpSpec) -> None:
    x, w = torch.randn(2, 8), torch.rand(8)
    Tagged.seen.clear()
    for args in ((x.as_subclass(Tagged), 8, w), (x, 8, w.as_subclass(Tagged))):
        y = spec.function(*args)
        assert isinstance(y, Tagged)
        torch.testing.assert_close(y.as_subclass(Tensor), spec.reference(x, (8,), w))
    assert any("norm" in name for name in Tagged.seen)


@NORM_SPECS
def test_fake_tensors(spec: OpSpec) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = spec.function(torch.randn(3, 8, dtype=BF16), 8, torch.randn(8), out_dtype=F32)
        assert (y.shape, y.dtype) == ((3, 8), F32)


@NORM_SPECS
def test_meta_tensors(spec: OpSpec) -> None:
    x = torch.empty(3, 8, 16, device="meta", dtype=BF16).transpose(0, 1)
    y = spec.function(x, 16)
    assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, BF16)


# ---------------------------------------------------------------- memory, views, versions


@NORM_SPECS
def test_inference_tensors(spec: OpSpec, backend: str) -> None:
    with torch.inference_mode():
        x, w = torch.randn(4, 64), torch.rand(64)
        torch.testing.assert_close(spec.function(x, 64, w), spec.reference(x, (64,), w))


@ROWS_SPECS
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float64], ids=str)
def test_arguments_are_left_alone_and_not_aliased(spec: OpSpec, dtype: torch.dtype, backend: str) -> None:
    case = Case((4, 16), 1, dict.fromkeys(spec.grads, dtype))
    if reason := testing.refused(spec, case, backend, here()):
        pytest.skip(reason)
    sample = testing.make_sample(spec, case, here())
    before = {name: sample.kwargs[name].detach().clone() for name in spec.grads}
    like = tuple(sample.kwargs["input"].detach() for _ in spec.outputs)
    grad = testing.make_grad(case, like if len(like) > 1 else like[0])
    kept = [one.clone() for one in testing.outputs_of(grad)]
    results = testing.run(spec.function, sample, lambda output: grad)
    given = {sample.kwargs[name].data_ptr() for name in spec.grads}
    given |= {one.data_ptr() for one in testing.outputs_of(grad)}
    assert all(torch.equal(sample.kwargs[name], before[name]) for name in spec.grads)
    assert all(map(torch.equal, testing.outputs_of(grad), kept))
    assert given.isdisjoint(result.data_ptr() for result in results.values())


@NORM_SPECS
def test_changing_a_saved_tensor_in_place_is_noticed(spec: OpSpec, backend: str) -> None:
    x, w = torch.randn(4, 16, requires_grad=True), torch.rand(16)
    (want,) = torch.autograd.grad(spec.function(x, 16, w).square().sum(), x)
    a = x * 1
    y = spec.function(a, 16, w)
    a.mul_(2)
    if backend != "reference":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.square().sum().backward()
        return
    with contextlib.suppress(RuntimeError):  # noticed, or harmless: a formula of several ops may have saved copies
        (got,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(got, want)


@NORM_SPECS
def test_result_may_be_changed_in_place(spec: OpSpec, backend: str) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    y = spec.function(x, 16)
    y.mul_(2)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    (want,) = torch.autograd.grad((spec.reference(x, (16,)) * 2).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@NORM_SPECS
def test_backward_twice(spec: OpSpec, backend: str) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    y = spec.function(x, 16).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


@NORM_SPECS
def test_gradient_that_is_a_slice_of_a_concatenation(spec: OpSpec, backend: str) -> None:
    x, k = torch.randn(2, 3, requires_grad=True), torch.arange(8.0)
    (got,) = torch.autograd.grad((torch.cat([spec.function(x, 3), torch.zeros(2, 5)], 1) * k).sum(), x)
    (want,) = torch.autograd.grad((spec.reference(x, (3,)) * k[:3]).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@NORM_SPECS
def test_bad_input_is_named(spec: OpSpec, backend: str) -> None:
    x = torch.randn(2, 8)
    bad: list[tuple[tuple[object, ...], dict[str, object], str]] = [
        ((x, 7), {}, r"normalized_shape.*\(7,\)|normalized_shape.*\[7\]"),
        ((x, ()), {}, "normalized_shape"),
        ((x, (2, 8, 8)), {}, "normalized_shape"),
        ((x, 8, torch.ones(7)), {}, "weight"),
        ((x, 8, torch.ones(2, 4)), {}, "weight"),
        ((x, 8, torch.ones(8, dtype=torch.float64)), {}, "weight"),
        ((x, 8, torch.ones(8, dtype=torch.int32)), {}, "weight"),
        ((x, 8, torch.ones(8, device="meta")), {}, "weight"),
        ((x.int(), 8), {}, "input"),
        ((x, 8), {"eps": -1.0}, "eps"),
        ((x, 8), {"eps": float("nan")}, "eps"),
        ((x, 8), {"out_dtype": torch.int32}, "out_dtype"),
        ((x, 8), {"out_dtype": torch.float64}, "out_dtype"),
        ((x.double(), 8), {"out_dtype": F32}, "out_dtype"),
    ]
    for args, kwargs, named in bad:
        with pytest.raises(ValueError, match=rf"(?s){spec.name}.*{named}"):
            spec.function(*args, **kwargs)


@NORM_SPECS
def test_errors_name_op_and_argument_also_where_a_like_call_was_seen(spec: OpSpec, backend: str) -> None:
    """The second call of a kind is checked elsewhere: by the backend, where that checks at all."""
    sample = {name: torch.ones((2, 16) if name in ("input", "residual") else (16,)) for name in spec.grads}
    spec.function(**sample, normalized_shape=16)
    bad = {
        "weight": [torch.ones(15), torch.ones(1, 16), torch.ones(16, device="meta")],
        "input|normalized_shape|residual": [torch.ones(2, 17), torch.ones(33)],
    }
    for argument, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{spec.name}: ({argument}): expected .*, got"):
                spec.function(**{**sample, argument.split("|")[0]: value}, normalized_shape=16)


def test_offset_needs_a_weight() -> None:
    with pytest.raises(ValueError, match=r"weight_offset: expected 0.0 without a weight, got 1.0"):
        fusedops.rms_norm(torch.randn(2, 8), 8, weight_offset=1.0)


def test_defaults_are_torchs(backend: str) -> None:
    x = torch.randn(2, 8) * 1e-3
    torch.testing.assert_close(fusedops.layer_norm(x, 8), F.layer_norm(x, (8,)))
    torch.testing.assert_close(fusedops.rms_norm(x, 8), F.rms_norm(x, (8,)))


@NORM_SPECS
@pytest.mark.parametrize("kind", ["negative", "zeros"])
def test_tensors_that_are_not_in_memory(spec: OpSpec, kind: str, backend: str) -> None:
    """A negative view has the other sign in memory, an efficient zero tensor has no memory at all."""

    def lazy(*shape: int) -> Tensor:
        if kind == "negative":
            return torch._neg_view(torch.randn(shape))
        return torch._efficientzerotensor(shape, device=here())

    dy = lazy(5, 16)
    given = [lazy(5, 16), *(lazy(16) for _ in spec.grads[1:])]
    results = []
    for written in (False, True):
        tensors = [(t + 0.0 if written else t).detach().requires_grad_() for t in given]
        kwargs = dict(zip(spec.grads, tensors, strict=True))
        y = spec.function(**kwargs, normalized_shape=16, eps=1e-3, backend=backend)
        results.append([y, *torch.autograd.grad(y, tensors, dy + 0.0 if written else dy)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found + 0.0, expected)


def test_freed_storage_is_refused() -> None:
    if fusedops.backends.get("native").unavailable("cpu"):
        pytest.skip("the native kernels are not built")
    x, w, flat = torch.ones(2, 8), torch.ones(8, requires_grad=True), torch.ones(4, 8)
    y = fusedops.layer_norm(x, 8, w, backend="native")
    w.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weight: expected a tensor with storage, got"):
        y.sum().backward()
    part = flat[2:]
    flat.untyped_storage().resize_(0)
    for op in (fusedops.layer_norm, fusedops.rms_norm):
        with pytest.raises(ValueError, match="input: expected a tensor with storage, got"):
            op(part, 8, backend="native")


@pytest.mark.parametrize("eps", ["1", [1.0], 1j, torch.ones(2), float("nan"), -1.0])
def test_an_eps_that_is_no_number_is_named(eps: object) -> None:
    for op in (fusedops.layer_norm, fusedops.rms_norm):
        with pytest.raises(ValueError, match=r"eps: expected a finite number ≥ 0, got"):
            op(torch.ones(2, 8), 8, eps=eps)


@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_third_derivatives_are_those_of_the_formula(centred: bool) -> None:
    """From native kernels; on a CPU PyTorch's own LayerNorm, hence our reference, has others."""
    if fusedops.backends("cpu")["native"]:
        pytest.skip("needs the extension")

    def formula(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if centred else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    def native(x: Tensor) -> Tensor:
        return (fusedops.layer_norm if centred else fusedops.rms_norm)(x, 5, eps=1e-5, backend="native")

    found, start = [], torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for function in (formula, native):
        x = start.clone().requires_grad_()
        value = (function(x) ** 3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = (grad**2).sum()
        found.append(grad.detach())
    torch.testing.assert_close(found[1], found[0])
