"""torch.compile, torch.export, compiled autograd and opcheck, with every backend forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from op_helpers import (
    ALL_SPECS,
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
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusedops
from fusedops.ops import _common
from fusedops.registry import OpSpec

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(params=["native", "triton", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    reason = fusedops.backends(torch.device(device).type)[request.param]
    if reason and request.param in request.config.getoption("--require").split(","):
        pytest.fail(f"--require {request.param}: {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)
    torch._dynamo.reset()
    with fusedops.use_backend(request.param):
        yield request.param


def compare(backend: str, got: Sequence[Tensor], want: Sequence[Tensor], rough: bool = False) -> None:
    """Compare compiled with eager results: native ops are the same kernels, others may be made of other ones.

    Args:
        backend: what was forced.
        got: compiled.
        want: eager.
        rough: a tensor on the way has 16 bits, or a matrix multiplication is in the graph.
    """
    if backend == "native" and not rough:
        return assert_same(got, want)
    return assert_close(got, want, rtol=3e-2 if rough else 1e-4, atol=3e-2 if rough else 1e-4)


@ALL_SPECS
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=str)
def test_compiled_equals_eager(
    spec: OpSpec, dynamic: bool, dtypes: tuple[torch.dtype, ...], backend: str, device: str
) -> None:
    case = small_case(spec, *dtypes)
    op = as_function(spec, case)

    def function(first: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return tuple(out + 1 for out in op(first * 1, *rest))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for shape in ((4, 16), (5, 24), (7, 40)):
        if backend == "triton":  # a width is compiled into its kernels
            shape = (shape[0], 16)
        leaves = make_leaves(spec, small_case(spec, *dtypes, shape=shape), device)
        compare(backend, results(compiled, leaves), results(function, leaves), backend != "native" and BF16 in dtypes)
        counts.append(counter.frame_count)
    if dynamic:
        assert len(set(counts)) == 1, "another shape compiled again"


@ALL_SPECS
@pytest.mark.parametrize("autocast", [False, True])
def test_another_batch_compiles_nothing(spec: OpSpec, autocast: bool, backend: str, device: str) -> None:
    """Left to itself torch.compile takes a size as fixed until it sees another; after that none compiles again."""
    case = small_case(spec)
    op = as_function(spec, case)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(torch.device(device).type, BF16, enabled=autocast):
            return op(*tensors)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for batch in (4, 5, 64, 2, 1000, 17, 33):
        leaves = make_leaves(spec, small_case(spec, shape=(batch, 3, 16)), device)
        with torch._dynamo.config.patch(error_on_recompile=batch not in (4, 5)):
            compare(backend, results(compiled, leaves), results(function, leaves), backend != "native" and autocast)


@ALL_SPECS
def test_compiled_under_autocast(spec: OpSpec, backend: str, device: str) -> None:
    linear = torch.nn.Linear(16, 16, device=device)
    op = as_function(spec, small_case(spec))

    def function(first: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(torch.device(device).type, BF16):
            return op(linear(first), *rest)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    leaves = make_leaves(spec, small_case(spec), device)
    compare(backend, results(compiled, leaves), results(function, leaves), rough=True)


def test_compiled_modules_in_inference_mode(device: str) -> None:
    net = torch.nn.Sequential(fusedops.nn.RMSNorm(8), fusedops.nn.LayerNorm(8)).to(device)
    x = torch.randn(3, 8, device=device)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), net(x))


@SPECS
def test_inductor(spec: OpSpec, device: str) -> None:
    op = as_function(spec, small_case(spec))

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        first, *rest = op(*tensors)
        return (*op(first * 2, *tensors[1:]), *rest)

    leaves = make_leaves(spec, small_case(spec, shape=(4, 32)), device)
    compiled = torch.compile(function, fullgraph=True)
    assert_close(results(compiled, leaves), results(function, leaves), rtol=1e-4, atol=1e-4)


@ALL_SPECS
def test_compiled_checkpoint(spec: OpSpec, backend: str, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    op = as_function(spec, small_case(spec))

    def function(first: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = checkpoint(
            lambda *tensors: op(tensors[0].sin(), *tensors[1:]), first, *rest, use_reentrant=False
        )
        return outputs

    leaves = make_leaves(spec, small_case(spec), device)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    compare(backend, results(compiled, leaves), results(function, leaves))


@RANDOM_SPECS
def test_compiled_dropout_is_eagers(spec: OpSpec, backend: str, device: str) -> None:
    """Where no other random operation is in the graph; again at every call."""
    case = small_case(spec, shape=(8, 64))
    op = as_function(spec, case, dropout_p=0.5)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    found = []
    for function in (op, compiled):
        torch.manual_seed(1)
        found.append([results(function, make_leaves(spec, case, device)) for _ in range(3)])
    for eager, other in zip(*found, strict=True):
        compare(backend, other, eager)
    assert not torch.equal(found[1][0][0], found[1][1][0])


@RANDOM_SPECS
@pytest.mark.parametrize("decompose", [False, True])
def test_exported_dropout_is_eagers(spec: OpSpec, decompose: bool, backend: str, device: str) -> None:
    """With its gradients, but for Triton's programs: those are for inference."""
    op = as_function(spec, small_case(spec), dropout_p=0.5)

    class Model(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return op(*tensors)

    leaves = tuple(leaf.detach() for leaf in make_leaves(spec, small_case(spec), device))
    program = torch.export.export(Model(), leaves)
    program = program.run_decompositions() if decompose else program
    found = []
    for function in (op, program.module()):
        torch.manual_seed(1)
        found.append([out for _ in range(2) for out in function(*leaves)])
    compare(backend, found[1], found[0])
    assert not torch.equal(found[1][1], found[1][3])
    if backend == "triton":
        return
    found = []
    for function in (op, program.module()):
        torch.manual_seed(1)
        found.append(results(function, [leaf.requires_grad_() for leaf in leaves]))
    compare(backend, found[1], found[0])


# ---------------------------------------------------------------- compiled autograd


@ALL_SPECS
def test_compiled_autograd(spec: OpSpec, backend: str, device: str) -> None:
    """After the first few one compiled backward graph serves every batch."""
    op = as_function(spec, small_case(spec))
    counter = CompileCounterWithBackend("aot_eager")
    compiler = torch.compile(backend=counter, fullgraph=True)
    counts = []
    for batch in (4, 6, 9, 12, 70):
        leaves = make_leaves(spec, small_case(spec, shape=(batch, 16)), device)
        with torch._dynamo.compiled_autograd._enable(compiler):
            total(op(*leaves)).backward()
        compare(backend, [leaf.grad for leaf in leaves], torch.autograd.grad(total(op(*leaves)), leaves))
        counts.append(counter.frame_count)
    assert counts[0] >= 1
    assert counts[-1] == counts[2], "each batch compiled again"


@SPECS
def test_second_derivatives_under_compiled_autograd(spec: OpSpec, backend: str, device: str) -> None:
    if backend != "native":
        pytest.skip("second derivatives are plain PyTorch's, whose layer_norm fails there")
    op = as_function(spec, small_case(spec), eps=1e-2)
    found = []
    for compiled in (False, True):
        leaves = make_leaves(spec, small_case(spec), device)
        first = torch.autograd.grad(total(op(*leaves)), leaves, create_graph=True)
        second = total(first)
        if compiled:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                second.backward()
        else:
            second.backward()
        found.append([leaf.grad for leaf in leaves])
    assert_close(*found, rtol=1e-3, atol=1e-3)


def test_a_training_step_with_compiled_autograd(device: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), fusedops.nn.LayerNorm(8), fusedops.nn.RMSNorm(8)).to(device)

    def train(x: Tensor) -> None:
        (net(x) ** 3).sum().backward()

    found = []
    for function in (train, torch.compile(train, backend="aot_eager")):
        net.zero_grad()
        with torch._dynamo.config.patch(compiled_autograd=function is not train):
            function(torch.ones(4, 8, device=device))
        found.append([p.grad.clone() for p in net.parameters()])
    assert_close(*found, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- torch.export


@ALL_SPECS
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decompose", [False, True])
def test_exported_programs_run(spec: OpSpec, strict: bool, decompose: bool, backend: str, device: str) -> None:
    """With any number of rows, as exported for training and as taken apart for a compiler; gradients flow."""
    op = as_function(spec, small_case(spec))

    class Net(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return op(*tensors)

    leaves = make_leaves(spec, small_case(spec), device)
    rows = torch.export.Dim("rows", min=2)
    shapes = tuple({0: rows} if leaf.shape[:1] == (4,) else {} for leaf in leaves)
    exported = torch.export.export(Net(), tuple(leaves), dynamic_shapes=(shapes,), strict=strict)
    if decompose:
        exported = exported.run_decompositions()
    others = make_leaves(spec, small_case(spec, shape=(9, 16)), device, seed=1)
    if backend == "triton":  # of a Python autograd function torch.export keeps the forward alone
        with torch.no_grad():
            compare(backend, exported.module()(*others), op(*others))
        return
    compare(backend, results(exported.module(), others), results(op, others))


def test_exported_modules_are_one_node_each(backend: str, device: str) -> None:
    net = torch.nn.Sequential(fusedops.nn.RMSNorm(8), fusedops.nn.LayerNorm(8)).to(device).eval()
    a, b = torch.randn(2, 8, device=device), torch.randn(2, 8, device=device)
    exported = torch.export.export(net, (a,))
    torch.testing.assert_close(exported.module()(b), net(b))
    if backend == "native":
        names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert names == ["fusedops.rms_norm.default", "fusedops.layer_norm.default"]


def test_a_traced_module_depends_on_its_input(device: str) -> None:
    net = torch.nn.Sequential(fusedops.nn.RMSNorm(8), fusedops.nn.LayerNorm(8)).to(device).eval()
    b = torch.randn(5, 8, device=device)
    torch.testing.assert_close(torch.jit.trace(net, torch.randn(2, 8, device=device))(b), net(b))


# ---------------------------------------------------------------- the registered operators


def registered() -> list[str]:
    """Names of our operators in PyTorch's registry."""
    fusedops.backends("cpu")
    return sorted({name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                   if name.startswith("fusedops::")})  # fmt: skip


X, X16 = torch.randn(3, 8), torch.randn(2, 3, 8).to(BF16)
W, B, ROWS = torch.rand(8), torch.rand(8), torch.rand(3)
NONE, DX, SEED = (None, None), [True, False, False], torch.tensor([3, 5])
CLASSES, STATS, ONE = torch.tensor([0, 7, 3]), torch.rand(3, 2), torch.ones(())
# The public names of an op stand for its forward; arguments of the ops beneath them, in order.
SAMPLES: dict[str, list[tuple[object, ...]]] = {
    "layer_norm": [(X, [8], W, B, 1e-5, None), (X16, [3, 8], None, None, 1e-5, F32), (X.mT, [3], *NONE, 1e-5, None)],
    "rms_norm": [(X, [8], W, 1e-5, 0.0, None), (X16, [8], None, 1e-5, 0.0, F32), (X16, [8], W, 1e-5, 1.0, None)],
    "layer_norm_fwd": [(X, [8], W, B, 1e-5, None), (X16, [8], W, None, 1e-5, F32)],
    "rms_norm_fwd": [(X, [8], W, 1e-5, 0.0, None), (X16, [3, 8], None, 1e-5, 0.0, F32)],
    "layer_norm_bwd": [(X, X, [8], W, ROWS, ROWS, [True, True, True]), (X, X, [8], None, ROWS, ROWS, DX)],
    "rms_norm_bwd": [(X, X, [8], W, ROWS, 0.0, [True, True]), (X, X, [8], W, ROWS, 0.0, [False, True])],
    "dropout_seed": [],  # two calls give two seeds, which opcheck takes for a fault
    "add_layer_norm": [
        (X, X + 1, [8], W, B, 1e-5, 0.0, False, None, None),
        (X16, X16.float(), [8], *NONE, 1e-5, 0.0, False, F32, BF16),
        (X, X + 1, [8], W, B, 1e-5, 0.0, True, BF16, None),
        (X, X + 1, [8], W, B, 1e-5, 0.5, False, None, None, {"seed": SEED}),
    ],
    "add_layer_norm_fwd": [
        (X, X, [8], W, B, 1e-5, SEED, 0.5, False, False, None, None),
        (X16, X16, [3, 8], *NONE, 1e-5, None, 0.0, False, False, F32, F32),
        (X16, X16.float(), [8], W, B, 1e-5, SEED, 0.5, True, True, None, None),
    ],
    "add_layer_norm_bwd": [
        (X, X, X, [8], W, ROWS, ROWS, SEED, 0.5, False, [True] * 4, F32, BF16, F32),
        (X, None, X, [8], None, ROWS, ROWS, None, 0.0, False, [True, True, False, False], F32, F32),
        (X.to(BF16), X, X, [8], W, ROWS, ROWS, SEED, 0.5, True, [True] * 4, BF16, F32, F32),
    ],
    "add_rms_norm": [
        (X, X + 1, [8], W, 1e-5, 1.0, 0.0, False, None, None),
        (X16, X16.float(), [8], None, 1e-5, 0.0, 0.0, False, F32, BF16),
        (X, X + 1, [8], W, 1e-5, 1.0, 0.0, True, BF16, None),
        (X, X + 1, [8], W, 1e-5, 1.0, 0.5, False, None, None, {"seed": SEED}),
    ],
    "add_rms_norm_fwd": [
        (X, X, [8], W, 1e-5, 1.0, SEED, 0.5, False, False, None, None),
        (X16, X16, [8], None, 1e-5, 0.0, None, 0.0, False, False, F32, F32),
        (X16, X16.float(), [8], W, 1e-5, 1.0, SEED, 0.5, True, True, None, None),
        (X, X, [8], None, 1e-5, 0.0, None, 0.0, True, False, BF16, None),
    ],
    "add_rms_norm_bwd": [
        (X, X, X, [8], W, ROWS, 1.0, SEED, 0.5, False, [True] * 3, F32, BF16),
        (X, None, X, [8], None, ROWS, 0.0, None, 0.0, False, [True, False, False], BF16, F32),
        (X.to(BF16), X, X, [8], W, ROWS, 1.0, SEED, 0.5, True, [True] * 3, BF16, F32),
    ],
    "cross_entropy": [
        (X, CLASSES, None, -100, "mean", 0.0, 0.0, None, False), (X, CLASSES, W, 7, "sum", 0.1, 0.1, 5.0, False),
        (X16, CLASSES.new_zeros(2, 8), None, -100, "none", 0.0, 0.0, None, False),
    ],
    "cross_entropy_fwd": [(X, CLASSES, W, -100, "mean", 0.1, 0.0, None), (X, CLASSES, None, 7, "none", 0.0, 0.0, 5.0)],
    "cross_entropy_bwd": [
        (ONE, X, CLASSES, W, STATS, ONE, 7, "mean", 0.1, 0.1, 5.0),
        (ROWS, X, CLASSES, None, STATS, ONE, -100, "none", 0.0, 0.0, None),
    ],
    "cross_entropy_bwd_": [(X, ONE, CLASSES, None, STATS, ONE, 7, "mean", 0.0, 0.0, None)],
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str, backend: str, device: str) -> None:
    if backend != "native":
        pytest.skip("the operators are the native backend's")
    assert set(registered()) <= set(SAMPLES), "an operator without a sample"
    for args in SAMPLES[name]:
        whole = not name.endswith(("fwd", "bwd", "bwd_"))
        leaves = tuple(
            a.to(device).clone().requires_grad_(whole and a.is_floating_point()) if isinstance(a, Tensor) else a
            for a in args
        )
        named = {key: seed.to(device) for key, seed in leaves[-1].items()} if isinstance(leaves[-1], dict) else {}
        torch.library.opcheck(getattr(torch.ops.fusedops, name).default, leaves[: len(leaves) - bool(named)], named)


def test_two_ops_first_seen_in_one_trace(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: neither op has been compiled before."""
    monkeypatch.setattr(_common, "_traced", _common._Traced())
    x, w = torch.randn(4, 16, device=device), torch.rand(16, device=device)

    def function(x: Tensor) -> Tensor:
        return fusedops.rms_norm(fusedops.layer_norm(x, 16, w), 16, w, backend="reference")

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), function(x))


# What the Triton ops take: rows by columns, no shapes.
TRITON_SAMPLES: dict[str, list[tuple[object, ...]]] = {
    "layer_norm_fwd": [(X, W, B, 1e-5, F32), (X, *NONE, 1e-5, BF16)],
    "rms_norm_fwd": [(X, W, 1e-5, 1.0, F32), (X, None, 1e-5, 0.0, BF16)],
    "layer_norm_bwd": [(X, X, W, ROWS, ROWS, [True] * 3, F32), (X, X, None, ROWS, ROWS, DX, None)],
    "rms_norm_bwd": [(X, X, W, ROWS, 0.0, [True, True]), (X, X, W, ROWS, 1.0, [False, True])],
    "add_norm_fwd": [
        (X, X, W, B, True, 1e-5, 0.0, SEED, 0.5, False, False, F32, BF16),
        (X, X, None, None, False, 1e-5, 0.0, None, 0.0, False, False, F32, F32),
        (X, X, W, B, True, 1e-5, 0.0, SEED, 0.5, True, True, BF16, F32),
        (X, X, W, None, False, 1e-5, 0.0, None, 0.0, True, False, BF16, F32),
    ],
    "add_norm_bwd": [
        (X, X, X, W, ROWS, ROWS, 0.0, SEED, 0.5, False, [True] * 4, F32, BF16, F32),
        (X, None, X, None, None, ROWS, 0.0, None, 0.0, False, [True, True, False, False], F32, F32, None),
        (X.to(BF16), X, X, W, ROWS, ROWS, 0.0, SEED, 0.5, True, [True] * 4, BF16, F32, F32),
    ],
    "cross_entropy_fwd": [(X, CLASSES, W, -100, "mean", 0.1, 0.0, None), (X, CLASSES, None, 7, "none", 0.0, 0.1, 5.0)],
    "cross_entropy_bwd": [
        (ONE, X, CLASSES, W, STATS, ONE, 7, "mean", 0.1, 0.1, 5.0),
        (ROWS, X, CLASSES, None, STATS, ONE, -100, "none", 0.0, 0.0, None),
    ],
}


@pytest.mark.parametrize("name", TRITON_SAMPLES)
def test_opcheck_triton(name: str, backend: str, device: str) -> None:
    if backend != "triton":
        pytest.skip("the operators are Triton's")
    import fusedops.backends.triton.traced  # noqa: F401  # defines them

    for args in TRITON_SAMPLES[name]:
        on_device = tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)
        torch.library.opcheck(getattr(torch.ops.fusedops_triton, name).default, on_device)
