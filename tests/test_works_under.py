"""The ops inside what PyTorch puts around them: transforms, subclasses, scripts, hooks, checkpoints, threads.

What no kernel knows of takes plain PyTorch, compiled or not, and is never an error or another number.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_helpers import (
    RANDOM_SPECS,
    SPECS,
    as_function,
    assert_close,
    assert_same,
    make_leaves,
    results,
    small_case,
    total,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops.ops import _common
from fusedops.registry import OpSpec

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
MODULES = pytest.mark.parametrize("module", [fusedops.nn.LayerNorm, fusedops.nn.RMSNorm])
Module = Callable[..., nn.Module]


# ---------------------------------------------------------------- torch.func


def first_argument(spec: OpSpec, reference: bool = False) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the op's loss as a function of its first argument, and that."""
    case = small_case(spec, shape=(3, 4, 8))
    op = as_function(spec, case, spec.reference if reference else None, eps=1e-3)
    first, *rest = (leaf.detach() for leaf in make_leaves(spec, case))
    return lambda a: total(op(a, *rest)), first


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda loss, x: torch.func.grad(loss)(x),
    "vjp": lambda loss, x: torch.func.vjp(loss, x)[1](torch.ones(()))[0],
    "jvp": lambda loss, x: torch.func.jvp(loss, (x,), (x.cos(),))[1],
    "jacrev": lambda loss, x: torch.func.jacrev(loss)(x),
    "jacfwd": lambda loss, x: torch.func.jacfwd(loss)(x[0, :1]),
    "hessian": lambda loss, x: torch.func.hessian(loss)(x[0, :1]),
    "linearize": lambda loss, x: torch.func.linearize(loss, x)[1](x.cos()),
    "functionalize": lambda loss, x: torch.func.functionalize(loss)(x),
}


@SPECS
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(spec: OpSpec, transform: str) -> None:
    if spec.grads[1:2] == ("residual",) and transform in ("jacfwd", "hessian"):
        pytest.skip("the residual has the first argument's shape, which these shorten")
    found = [TRANSFORMS[transform](*first_argument(spec, reference)) for reference in (False, True)]
    torch.testing.assert_close(*found)


@SPECS
def test_vmap(spec: OpSpec) -> None:
    case = small_case(spec, shape=(5, 4, 8))
    leaves = [leaf.detach() for leaf in make_leaves(spec, case)]
    batched = tuple(0 if leaf.dim() > 1 else None for leaf in leaves)
    assert_close(torch.func.vmap(as_function(spec, case), batched)(*leaves), as_function(spec, case)(*leaves))


@SPECS
@pytest.mark.parametrize("transform", ["vmap", "grad", "vjp", "jacrev"])
def test_compiled_transforms(spec: OpSpec, transform: str) -> None:
    """Dynamo shows a traced transform by other means than eager; no kernel may be called in one either."""
    torch._dynamo.reset()
    loss, x = first_argument(spec)
    if transform == "vmap":
        case = small_case(spec, shape=(5, 4, 8))
        leaves = [leaf.detach() for leaf in make_leaves(spec, case)]
        batched = tuple(0 if leaf.dim() > 1 else None for leaf in leaves)
        function = torch.func.vmap(as_function(spec, case), batched)
        assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves), function(*leaves))
        return
    compiled = torch.compile(lambda x: TRANSFORMS[transform](loss, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), TRANSFORMS[transform](loss, x))
    # The same code outside of a transform is compiled anew, not taken for the plain one.
    torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(x), loss(x))


def test_compiled_tangents_are_not_zero() -> None:
    torch._dynamo.reset()
    x, w = torch.randn(3, 8), torch.rand(8)
    tangent = lambda x: torch.func.jvp(lambda a: fusedops.rms_norm(a, 8, w), (x,), (x.cos(),))[1]  # noqa: E731
    torch.testing.assert_close(torch.compile(tangent, backend="aot_eager", fullgraph=True)(x), tangent(x))


@MODULES
def test_functional_call_and_ensembles(module: Module) -> None:
    nets = [module(8) for _ in range(3)]
    for net in nets:
        nn.init.uniform_(net.weight)
    params, buffers = torch.func.stack_module_state(nets)
    x = torch.randn(4, 8)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.func.functional_call(nets[0], (params, buffers), (x,)) ** 3).sum()

    found = torch.func.vmap(torch.func.grad(loss), (0, None))(params, x)
    for i, net in enumerate(nets):
        want = torch.autograd.grad((net(x) ** 3).sum(), [*net.parameters()])
        assert_close([found[name][i] for name, _ in net.named_parameters()], want)


def test_an_exported_program_refuses_tangents() -> None:
    """Its graph names the native op, which has no forward-mode formula: an error, not tangents of zero."""
    if fusedops.backends("cpu")["native"]:
        pytest.skip("the native kernels are not built")
    for module in (fusedops.nn.LayerNorm(8), fusedops.nn.RMSNorm(8)):
        x = torch.randn(2, 8)
        program = torch.export.export(module, (x,)).module()
        with pytest.raises(NotImplementedError, match=r"_norm: forward-mode derivatives: expected none"):
            torch.func.jvp(program, (x,), (x,))


# ---------------------------------------------------------------- other tensors


@SPECS
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("out_dtype", [None, BF16], ids=str)
def test_nested_tensors(spec: OpSpec, layout: torch.layout, out_dtype: torch.dtype | None) -> None:
    each = [make_leaves(spec, small_case(spec, shape=(rows, 16)), seed=rows) for rows in (2, 5, 1)]
    parameters = [leaf for leaf in each[0] if leaf.dim() == 1]
    nested = [i for i, leaf in enumerate(each[0]) if leaf.dim() == 2]

    def op(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(spec.grads, tensors, strict=True))
        result = spec.function(**given, normalized_shape=16, out_dtype=out_dtype)
        return result if isinstance(result, tuple) else (result,)

    def join(parts: list[Tensor]) -> Tensor:
        if layout is torch.strided:
            return torch.nested.as_nested_tensor(parts)
        return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)  # one object: the sizes agree

    offsets = torch.tensor([0, 2, 7, 8])
    outputs = op(*(join([some[i] for some in each]) if i in nested else leaf for i, leaf in enumerate(each[0])))
    assert all(out.is_nested and out.layout is layout for out in outputs)
    parts = [part for out in outputs for part in out.unbind()]
    alone = [op(*(some[i] if i in nested else leaf for i, leaf in enumerate(each[0]))) for some in each]
    expected = [out for same in zip(*alone, strict=True) for out in same]
    assert_close(parts, expected)
    wanted = [*(some[i] for some in each for i in nested), *parameters]
    found = [torch.autograd.grad(total(some), wanted) for some in (parts, expected)]
    assert_close(*found, rtol=1e-4, atol=1e-5)


@SPECS
def test_nested_tensors_where_all_is_plain_torch(spec: OpSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "CONFIG", replace(_common.CONFIG, disabled=True))
    leaves = [leaf.detach() for leaf in make_leaves(spec, small_case(spec))]
    nested = [torch.nested.as_nested_tensor([leaf]) if leaf.dim() > 1 else leaf for leaf in leaves]
    result = spec.function(**dict(zip(spec.grads, nested, strict=True)), normalized_shape=16)
    first = result[0] if isinstance(result, tuple) else result
    torch.testing.assert_close(first.unbind()[0], as_function(spec, small_case(spec))(*leaves)[0])


@RANDOM_SPECS
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_dropped(spec: OpSpec, layout: torch.layout, compiled: bool) -> None:
    if compiled and layout is torch.strided:
        pytest.skip("PyTorch compiles jagged tensors only")
    torch._dynamo.reset()

    def function(x: Tensor, r: Tensor) -> Any:
        return spec.function(x, r, (64,), dropout_p=0.5)

    x = torch.nested.nested_tensor([torch.ones(rows, 64) for rows in (2, 5, 1)], layout=layout, requires_grad=True)
    r = x.detach() * 0
    _, summed = (torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function)(x, r)
    values = torch.cat(summed.unbind())
    assert set(values.unique().tolist()) == {0.0, 2.0}
    assert len(values.unique(dim=0)) == 8, "each row has a mask of its own"
    (grad,) = torch.autograd.grad(values.sum(), x)
    assert torch.equal(torch.cat(grad.unbind()), values.detach())


@SPECS
def test_a_nested_tensor_of_another_width_is_refused(spec: OpSpec) -> None:
    leaves = make_leaves(spec, small_case(spec))
    nested = torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(2, 15)])
    others = [nested if leaf.dim() > 1 else leaf for leaf in leaves]
    with pytest.raises(ValueError, match=rf"{spec.name}: .*expected"):
        spec.function(**dict(zip(spec.grads, others, strict=True)), normalized_shape=16)


@SPECS
def test_compiled_jagged_tensors(spec: OpSpec) -> None:
    torch._dynamo.reset()
    leaves = make_leaves(spec, small_case(spec))
    parts = [torch.randn(rows, 16) for rows in (2, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)

    def function(nested: Tensor, *parameters: Tensor) -> Any:
        given = iter(parameters)
        arguments = {n: nested if leaf.dim() > 1 else next(given) for n, leaf in zip(spec.grads, leaves, strict=True)}
        result = spec.function(**arguments, normalized_shape=(16,))
        return result if isinstance(result, tuple) else (result,)

    parameters = [leaf for leaf in leaves if leaf.dim() == 1]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(nested, *parameters), function(nested, *parameters), strict=True):
        torch.testing.assert_close(got.values(), want.values())


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@SPECS
@pytest.mark.parametrize("compiled", [False, True])
def test_dtensors(spec: OpSpec, compiled: bool, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch._dynamo.reset()
    case = small_case(spec)
    op, plain = as_function(spec, case), make_leaves(spec, case)
    leaves = [
        distribute_tensor(leaf.detach(), mesh, [Shard(0) if leaf.dim() > 1 else Replicate()]).requires_grad_()
        for leaf in plain
    ]
    got = results(torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op, leaves)
    assert all(isinstance(t, DTensor) for t in got)
    assert_close([t.full_tensor() for t in got], results(op, plain))


@pytest.mark.parametrize("sharded", ["rows", "classes"])
def test_the_loss_of_dtensors(sharded: str, mesh: Any) -> None:
    """Also of logits whose classes are spread over devices, which PyTorch's own loss knows to add up."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    plain, target = torch.randn(6, 16, requires_grad=True), torch.arange(6)
    want = fusedops.cross_entropy(plain, target)
    x = distribute_tensor(plain.detach(), mesh, [Shard(0 if sharded == "rows" else 1)]).requires_grad_()
    y = distribute_tensor(target, mesh, [Shard(0) if sharded == "rows" else Replicate()])
    with loss_parallel() if sharded == "classes" else contextlib.nullcontext():
        got = fusedops.cross_entropy(x, y)
        got.backward()
    assert_close([got.full_tensor(), x.grad.full_tensor()], [want, *torch.autograd.grad(want, plain)])


@RANDOM_SPECS
@pytest.mark.parametrize("compiled", [False, True])
def test_dtensors_are_dropped(spec: OpSpec, compiled: bool, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    torch._dynamo.reset()

    def function(x: Tensor, r: Tensor) -> Any:
        return spec.function(x, r, 64, dropout_p=0.5)

    x = distribute_tensor(torch.ones(8, 64), mesh, [Shard(0)]).requires_grad_()
    r = distribute_tensor(torch.zeros(8, 64), mesh, [Shard(0)])
    y, summed = (torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function)(x, r)
    values = summed.full_tensor()
    assert set(values.unique().tolist()) == {0.0, 2.0}
    (grad,) = torch.autograd.grad(values.sum() + 0 * y.full_tensor().sum(), x)
    assert torch.equal(grad.full_tensor(), values.detach())


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "fully_shard"])
@pytest.mark.parametrize("optimizer", [fusedops.optim.Adam, fusedops.optim.AdamW])
def test_data_parallel_training(wrapper: str, optimizer: Callable[..., Any], mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    def trained(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net: nn.Module = nn.Sequential(nn.Linear(8, 8), fusedops.nn.LayerNorm(8), fusedops.nn.RMSNorm(8))
        parameters = [*net.parameters()]
        if wrapped and wrapper == "fully_shard":
            for layer in (*net, net):
                fully_shard(layer, mesh=mesh)
            parameters = [*net.parameters()]
        elif wrapped:
            net = nn.parallel.DistributedDataParallel(net)
        ours = optimizer(parameters, lr=0.1, max_grad_norm=1.0)
        for _ in range(3):
            ours.zero_grad()
            (net(torch.linspace(-1, 1, 32).reshape(4, 8)) ** 3).sum().backward()
            ours.step()
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in parameters]

    assert_close(trained(True), trained(False))


class Tagged(Tensor):
    """A subclass without a dispatch of its own."""


@SPECS
def test_compiled_subclasses(spec: OpSpec) -> None:
    torch._dynamo.reset()
    case = small_case(spec)
    leaves = [leaf.detach() for leaf in make_leaves(spec, case)]
    tagged = [leaf.as_subclass(Tagged) for leaf in leaves]
    got = torch.compile(as_function(spec, case), backend="eager", fullgraph=True)(*tagged)
    assert all(isinstance(out, Tagged) for out in got)
    assert_close([out.as_subclass(Tensor) for out in got], as_function(spec, case)(*leaves))


@SPECS
def test_explain_says_why_plain_torch(spec: OpSpec) -> None:
    def explained(x: Tensor) -> tuple[str, str]:
        found = fusedops.explain(spec.name, *(x for _ in ("input", *spec.like_input)), 8)
        return found.chosen, found.origin

    x, found = torch.ones(2, 8), []
    assert explained(x)[1] == "dispatch table"
    nested = [torch.nested.nested_tensor([x], layout=layout) for layout in (torch.strided, torch.jagged)]
    for kind, name in ((x.as_subclass(Tagged), "Tagged"), *((t, "nested tensor") for t in nested)):
        assert explained(kind) == ("reference", f"no kernel knows a {name}")
    torch.func.vmap(lambda x: (found.append(explained(x)), x)[1])(x)
    with torch.autograd.forward_ad.dual_level():
        found.append(explained(x))
    reasons = ("a torch.func transform", "forward-mode AD")
    assert found == [("reference", f"within {reason}") for reason in reasons]


@SPECS
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_fake_tensors_forward_and_backward(spec: OpSpec, where: str) -> None:
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch without a GPU aborts on a fake CUDA tensor that requires a gradient")
    with FakeTensorMode(), torch.device(where):
        case = small_case(spec, BF16, F32)
        leaves = [torch.empty((4, 16) if i == 0 or n == "residual" else (16,), dtype=d, requires_grad=True)
                  for i, (n, d) in enumerate(case.dtypes.items())]  # fmt: skip
        outputs = as_function(spec, case, out_dtype=F16)(*leaves)
        grads = torch.autograd.grad(total(outputs), leaves)
    assert outputs[0].dtype is F16
    assert [(g.shape, g.dtype, g.device.type) for g in grads] == [(t.shape, t.dtype, where) for t in leaves]


@SPECS
def test_make_fx(spec: OpSpec) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    op, leaves = as_function(spec, small_case(spec)), make_leaves(spec, small_case(spec))
    graph = make_fx(lambda *tensors: results(op, tensors))(*leaves)
    others = make_leaves(spec, small_case(spec), seed=1)
    assert_close(graph(*others), results(op, others))


# ---------------------------------------------------------------- TorchScript


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@MODULES
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"out_dtype": F32},
        {"elementwise_affine": False},
        {"eps": 1e-2},
        {"normalized_shape": (4, 8)},
        {"weight_offset": 1.0},
    ],
    ids=str,
)
def test_scripted_modules(module: Module, dtype: torch.dtype, options: dict[str, Any]) -> None:
    if dtype is F64 and "out_dtype" in options:
        pytest.skip("fp64 stays fp64")
    if module is fusedops.nn.LayerNorm and "weight_offset" in options:
        pytest.skip("LayerNorm has no offset")
    net = module(**{"normalized_shape": 8, **options})
    net = net.to(dtype) if dtype is F64 else net
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Sequential(net)), file)
    file.seek(0)
    leaves = [torch.randn(3, 4, 8).to(dtype).requires_grad_(), *net.parameters()]
    scripted, found = torch.jit.load(file), []
    for each in (net, scripted):
        y = each(leaves[0])
        found.append([y, *torch.autograd.grad((y.float() ** 3).sum(), [leaves[0], *each.parameters()])])
    assert_close(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@SPECS
def test_traced_functions(spec: OpSpec) -> None:
    op = as_function(spec, small_case(spec))
    traced = torch.jit.trace(op, tuple(make_leaves(spec, small_case(spec))), check_trace=False)
    others = make_leaves(spec, small_case(spec, shape=(9, 16)), seed=1)
    assert_close(results(traced, others), results(op, others))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@RANDOM_SPECS
def test_traced_dropout_has_a_mask_a_call(spec: OpSpec) -> None:
    op, given = as_function(spec, small_case(spec), dropout_p=0.5), make_leaves(spec, small_case(spec))
    traced = torch.jit.trace(op, tuple(given), check_trace=False)
    found = []
    for function in (op, traced):
        torch.manual_seed(1)
        found.append([results(function, given) for _ in range(4)])  # the executor optimises after the second
    for want, got in zip(*found, strict=True):
        assert_close(got, want, rtol=1e-4, atol=1e-4)  # as of compiled code: other kernels, and the loss is cubed
    assert not torch.equal(found[1][2][1], found[1][3][1])


@pytest.mark.parametrize("module", [fusedops.nn.AddLayerNorm, fusedops.nn.AddRMSNorm])
def test_symbolically_traced_adds(module: Module) -> None:
    net = module(8, dropout_p=0.5)
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(net)))
    assert [node.op for node in traced.graph.nodes].count("call_function") == 1
    found, given = [], (torch.randn(4, 8), torch.randn(4, 8))
    for each in (net, traced):
        torch.manual_seed(1)
        found.append(each(*given))
    assert_same(*found)


@MODULES
def test_symbolically_traced_modules(module: Module) -> None:
    net = nn.Sequential(nn.Linear(8, 8), module(8, out_dtype=BF16))
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(net)))
    assert [node.name for node in traced.graph.nodes if node.op == "call_function"]
    leaves = [torch.randn(4, 8, requires_grad=True), *net.parameters()]
    found = []
    for each in (net, traced):
        y = each(leaves[0])
        found.append([y, *torch.autograd.grad(total([y]), [leaves[0], *each.parameters()])])
    assert_same(*found)


# ---------------------------------------------------------------- hooks and checkpoints


@MODULES
def test_hooks(module: Module) -> None:
    net, seen = module(8), []
    net.register_forward_pre_hook(lambda net, inputs: (inputs[0] * 2,))
    net.register_forward_hook(lambda net, inputs, output: output * 3)
    net.register_full_backward_pre_hook(lambda net, grads: seen.append("before"))
    net.register_full_backward_hook(lambda net, into, outof: seen.append((into[0].shape, outof[0].shape)))
    net.weight.register_hook(lambda grad: grad * 5)
    net.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    x = torch.randn(4, 8, requires_grad=True)
    y = net(x)
    y.register_hook(lambda grad: grad * 7)
    y.sum().backward()
    plain = module(8)
    inner = plain(x.detach() * 2)
    torch.testing.assert_close(y, inner * 3)
    torch.testing.assert_close(net.weight.grad, torch.autograd.grad((inner * 3 * 7 * 5).sum(), plain.weight)[0])
    assert set(map(str, seen)) == {"before", str((x.shape, x.shape)), "accumulated"}


@SPECS
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints(spec: OpSpec, reentrant: bool, autocast: bool, backend: str) -> None:
    from torch.utils.checkpoint import checkpoint

    case, where = small_case(spec), str(torch.get_default_device())
    op = as_function(spec, case)

    def block(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(out.tanh() for out in op(*tensors))

    found = []
    for function in (block, lambda *tensors: checkpoint(block, *tensors, use_reentrant=reentrant)):
        leaves = make_leaves(spec, case, where)
        with torch.autocast(torch.device(where).type, BF16, enabled=autocast):
            outputs = function(*leaves)
        total(outputs).backward()
        found.append([*(out.detach() for out in outputs), *(leaf.grad for leaf in leaves)])
    assert_same(*found)


@RANDOM_SPECS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_drop_the_same_elements_again(spec: OpSpec, reentrant: bool, backend: str) -> None:
    from torch.utils.checkpoint import checkpoint

    case, where = small_case(spec, shape=(8, 64)), str(torch.get_default_device())
    op, found = as_function(spec, case, dropout_p=0.5), []
    for function in (op, lambda *tensors: checkpoint(op, *tensors, use_reentrant=reentrant)):
        torch.manual_seed(1)
        leaves = make_leaves(spec, case, where)
        outputs = function(*leaves)
        total(outputs).backward()
        found.append([*(out.detach() for out in outputs), *(leaf.grad for leaf in leaves)])
    assert_same(*found)
    torch.manual_seed(2)
    assert not torch.equal(op(*make_leaves(spec, case, where))[0], found[0][0])


@SPECS
def test_selective_checkpoints(spec: OpSpec, backend: str) -> None:
    """Keep what the ops computed, compute the rest again."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    where, seen = str(torch.get_default_device()), set()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(str(operator))
        return CheckpointPolicy.MUST_SAVE if "norm" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    op, leaves = as_function(spec, small_case(spec)), make_leaves(spec, small_case(spec), where)
    block = lambda *tensors: tuple(out.tanh() for out in op(tensors[0].sin(), *tensors[1:]))  # noqa: E731
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    outputs = checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts)
    found = [*(out.detach() for out in outputs), *torch.autograd.grad(total(outputs), leaves)]
    assert_same(found, results(block, leaves))
    if backend == "native":
        assert f"fusedops.{spec.name}_fwd.default" in seen


@SPECS
def test_saved_tensors_can_be_offloaded(spec: OpSpec, backend: str) -> None:
    where = str(torch.get_default_device())
    op, leaves = as_function(spec, small_case(spec)), make_leaves(spec, small_case(spec), where)
    expected = results(op, leaves)
    with torch.autograd.graph.save_on_cpu():
        assert_same(results(op, leaves), expected)


@MODULES
def test_inference_tensors_need_a_copy_to_train_on(module: Module) -> None:
    """As PyTorch's own modules; a graph that could not run backward is never made silently."""
    net = module(8)
    with torch.inference_mode():
        x = torch.randn(2, 8)
        assert net(x).is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        net(x)
    net(x.clone()).sum().backward()
    assert net.weight.grad is not None


# ---------------------------------------------------------------- threads and processes


@SPECS
def test_threads(spec: OpSpec, backend: str) -> None:
    """Forward and backward on several threads at once, on their own inputs and shared parameters."""
    where = str(torch.get_default_device())
    if (backend, where) == ("triton", "cpu"):
        pytest.skip("Triton's interpreter keeps the place of a program in one global")
    op = as_function(spec, small_case(spec))
    shapes = [(3, 16), (64, 16), (257, 16), (5, 7, 16)]
    work = [make_leaves(spec, small_case(spec, shape=shape), where, seed=i) for i, shape in enumerate(shapes)]
    expected = [results(op, leaves) for leaves in work]
    failures: list[BaseException] = []
    start = threading.Barrier(len(work))

    def run(leaves: list[Tensor], want: list[Tensor]) -> None:
        try:
            start.wait()
            for _ in range(50):
                assert_same(results(op, leaves), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=some) for some in zip(work, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


class Normalised(torch.utils.data.Dataset[Tensor]):
    """Items made by an op, in a worker process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return fusedops.layer_norm(torch.arange(4096.0).reshape(64, 64) * index, 64)


def test_data_loader_workers() -> None:
    """A forked worker can't use the threads of its parent, which has used them."""
    data = Normalised()
    expected = [data[i] for i in range(4)]
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, timeout=60)
    assert_close([*loader], expected)
