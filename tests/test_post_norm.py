"""The residual stream of a post-norm model: an add + norm returns its norm twice, and adds up both gradients of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_helpers import assert_close, assert_same
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops import nn
from fusedops.registry import OPS, OpSpec

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ADDS = [spec for spec in OPS.values() if "residual" in spec.grads]
SPECS = pytest.mark.parametrize("spec", ADDS, ids=[spec.name for spec in ADDS])
# dtypes of input, residual, y and the second result.
MIXES = pytest.mark.parametrize("mix", [(F32, F32, F32, F32), (BF16, F32, BF16, F32), (F16, F16, F32, BF16)], ids=str)


def tensors(mix: tuple[torch.dtype, ...], *shape: int) -> list[Tensor]:
    """Return an input, a residual and a weight that require a gradient."""
    made = torch.randn(shape), torch.randn(shape), torch.rand(shape[-1])
    return [t.to(dtype).requires_grad_() for t, dtype in zip(made, (*mix[:2], F32), strict=True)]


def call(
    spec: OpSpec, leaves: list[Tensor], mix: tuple[torch.dtype, ...], p: float = 0.0, **more: object
) -> list[Tensor]:
    """Return both results; the same elements are dropped each time."""
    torch.manual_seed(4)
    options = {"post_norm": True, "out_dtype": mix[2], "residual_dtype": mix[3], **more}
    return list(spec.function(*leaves[:2], leaves[0].shape[-1], *leaves[2:], dropout_p=p, **options))


@SPECS
@MIXES
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("hidden", [72, 35, 9000])
def test_both_results_are_roundings_of_the_norm_of_the_rounded_sum(
    spec: OpSpec, mix: tuple[torch.dtype, ...], p: float, hidden: int, backend: str
) -> None:
    """Bit for bit what calls without the mode return, with a gradient and without.

    A GPU may sum up the row in another order for another output dtype. There one result is the other's rounding, which
    it is not under Triton's interpreter, which truncates to bf16.
    """
    leaves = tensors(mix, 5, hidden)
    y, again = call(spec, leaves, mix, p)
    assert (y.dtype, again.dtype) == mix[2:]
    assert torch.equal(y, call(spec, leaves, mix, p, post_norm=False)[0])
    if y.is_cpu or y.dtype is again.dtype:
        assert torch.equal(again, call(spec, leaves, mix, p, post_norm=False, out_dtype=mix[3])[0])
    elif again.dtype is F32:
        assert torch.equal(y, again.to(y.dtype))
    else:
        assert torch.equal(again, y.to(again.dtype))
    with torch.no_grad():
        assert_same(call(spec, leaves, mix, p), (y, again))


@SPECS
@MIXES
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_backward_adds_the_gradients_in_fp32(
    spec: OpSpec, mix: tuple[torch.dtype, ...], p: float, backend: str
) -> None:
    """As if one fp32 result had the sum of both gradients; rounding either first would be seen in the second mix."""
    leaves = tensors(mix, 33, 72)
    outputs = call(spec, leaves, mix, p)
    grads = [torch.randn(33, 72).to(out.dtype) for out in outputs]
    got = torch.autograd.grad(outputs, leaves, grads)
    alone = call(spec, leaves, mix, p, post_norm=False, out_dtype=F32)[0]
    want = torch.autograd.grad(alone, leaves, grads[0].float() + grads[1].float())
    for g, w in zip(got, want, strict=True):
        assert g.dtype is w.dtype
        torch.testing.assert_close(g, w, **({"rtol": 1e-5, "atol": 1e-5} if g.dtype is F32 else {}))


@SPECS
@MIXES
@pytest.mark.parametrize("number", [0, 1])
def test_one_gradient_alone(spec: OpSpec, mix: tuple[torch.dtype, ...], number: int, backend: str) -> None:
    """Either result moves all leaves, as if the other's gradient were zero."""
    leaves = tensors(mix, 9, 24)
    outputs = call(spec, leaves, mix, 0.4)
    grads = [torch.randn(9, 24).to(out.dtype) * (i == number) for i, out in enumerate(outputs)]
    want = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    got = torch.autograd.grad(outputs[number], leaves, grads[number])
    assert all(bool(g.any()) for g in got)
    assert_close(got, want, **({"rtol": 1e-5, "atol": 1e-6} if mix[0] is F32 else {}))


@SPECS
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_first_and_second_derivatives(spec: OpSpec, p: float, backend: str) -> None:
    """Against finite differences; the sum that is kept is not a constant."""
    if backend == "triton":
        pytest.skip("no fp64")
    leaves = [t.to(F64).detach().requires_grad_() for t in tensors((F32, F32), 3, 5)]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(spec, list(given), (F64,) * 4, p, eps=1e-2))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@SPECS
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("trained", [(0, 1, 2), (0,), (2,)], ids=str)
def test_a_penalty_beside_the_loss(spec: OpSpec, p: float, trained: tuple[int, ...], backend: str) -> None:
    """Its gradient meets the results' own, and the kept sum's, in one backward pass that builds no graph."""
    found = []
    for name in (backend, "reference"):
        torch.manual_seed(1)
        leaves = tensors((F32, F32), 6, 24)
        wanted = [leaf.requires_grad_(i in trained) for i, leaf in enumerate(leaves) if i in trained]
        y, again = call(spec, leaves, (F32, F32, F32, F32), p, backend=name)
        grads = torch.autograd.grad(y.square().sum() + again.sin().sum(), wanted, create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        found.append(torch.autograd.grad(penalty + (y * again).sum(), wanted))
    assert_close(*found, rtol=1e-4, atol=1e-4)


@SPECS
def test_results_are_tensors_of_their_own(spec: OpSpec, backend: str) -> None:
    """Of one dtype as well; changing either breaks no backward pass."""
    leaves = tensors((F32, F32), 4, 32)
    y, again = call(spec, leaves, (F32,) * 4)
    want = torch.autograd.grad(y.sum() + again.square().sum(), leaves, retain_graph=True)
    assert y.untyped_storage().data_ptr() != again.untyped_storage().data_ptr()
    loss = y.sum() + again.square().sum()
    with torch.no_grad():
        y.zero_()
    assert_same(torch.autograd.grad(loss, leaves), want)


@SPECS
def test_meta_tensors(spec: OpSpec) -> None:
    x = torch.empty(3, 8, 16, device="meta", dtype=BF16).transpose(0, 1)
    y, again = spec.function(x, x.float(), 16, post_norm=True)
    assert (y.shape, y.dtype, again.shape, again.dtype) == (x.shape, BF16, x.shape, F32)


@SPECS
def test_empty_and_strided(spec: OpSpec, backend: str) -> None:
    for shape in ((0, 16), (3, 0, 16)):
        leaves = [
            torch.empty(shape).requires_grad_(),
            torch.empty(shape).requires_grad_(),
            torch.ones(16).requires_grad_(),
        ]
        outputs = call(spec, leaves, (F32,) * 4)
        found = torch.autograd.grad(outputs, leaves, outputs)
        assert [g.shape for g in found] == [t.shape for t in leaves]
        assert not found[2].any()
    leaves = tensors((F32, F32), 6, 20)
    outputs = call(spec, leaves, (F32,) * 4)
    grads = [torch.randn(20, 6).mT, torch.randn(6, 1).expand(6, 20)]
    want = torch.autograd.grad(outputs, leaves, [g.contiguous() for g in grads], retain_graph=True)
    assert_close(torch.autograd.grad(outputs, leaves, grads), want, rtol=1e-5, atol=1e-6)


@SPECS
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_no_bool_is_refused(spec: OpSpec, value: object, backend: str) -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=rf"{spec.name}: post_norm: expected True or False, got {value!r}"):
        spec.function(x, x, 8, post_norm=value)
    with pytest.raises(ValueError, match="post_norm: expected True or False"):
        fusedops.explain(spec.function, x, x, 8, post_norm=value)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("forced", ["native", "reference"])
@SPECS
def test_compiled_is_eager(spec: OpSpec, forced: str, compiler: str) -> None:
    """Two blocks one after the other, with dropout, forward and backward."""
    if reason := fusedops.backends("cpu")[forced]:
        pytest.skip(reason)
    torch._dynamo.reset()

    def blocks(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        options = {"post_norm": True, "out_dtype": BF16, "residual_dtype": F32}
        y, r = spec.function(x * 1, r, 32, w, dropout_p=0.5, **options)
        return spec.function(y * 2, r, 32, w, dropout_p=0.25, **options)

    found, leaves = [], tensors((BF16, F32), 4, 32)
    # Else y would stay fp32 between blocks that Inductor fuses.
    rounded = torch._inductor.config.patch(emulate_precision_casts=True)
    with fusedops.use_backend(forced), rounded:
        for function in (blocks, torch.compile(blocks, backend=compiler, fullgraph=True)):
            torch.manual_seed(11)
            outputs = function(*leaves)
            loss = sum(out.float().square().sum() for out in outputs)
            found.append([*(out.detach() for out in outputs), *torch.autograd.grad(loss, leaves)])
    eager, compiled = found
    if forced == "native":  # the same kernels with the same seeds
        assert_same(compiled[:2], eager[:2])
    if (forced, compiler) == ("reference", "inductor"):
        # Sums in another order: y rounded to bf16 between the blocks may be its neighbour, never another mask's.
        for got, want in zip(compiled, eager, strict=True):
            assert got.dtype is want.dtype
            assert (got - want).norm() < 2**-5 * want.norm()
    else:
        assert_close(compiled, eager)


@pytest.mark.parametrize(
    ("ours", "plain"), [(nn.AddLayerNorm, torch.nn.LayerNorm), (nn.AddRMSNorm, torch.nn.RMSNorm)], ids=str
)
def test_a_post_norm_block_under_autocast(
    ours: Callable[..., torch.nn.Module], plain: Callable[..., torch.nn.Module], backend: str
) -> None:
    """As PyTorch's layers: the residual stream stays fp32, the matmul's operand has the autocast dtype."""
    module, reference = ours(32, eps=1e-3, post_norm=True), plain(32, eps=1e-3)
    torch.nn.init.uniform_(module.weight)
    reference.load_state_dict(module.state_dict())
    assert "post_norm=True" in repr(module)
    x, r, up = torch.randn(6, 32), torch.randn(6, 32), torch.randn(32, 32)
    with torch.autocast(x.device.type, BF16):
        y, again = module(F.linear(x, up), r)
        want = reference(r + F.linear(x, up))
        assert (y.dtype, again.dtype, F.linear(y, up).dtype) == (BF16, F32, BF16)
    torch.testing.assert_close(again, want.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, want.to(BF16))
