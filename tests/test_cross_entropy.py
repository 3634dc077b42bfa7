"""Cross-entropy beyond parity: PyTorch's own results, wrong arguments, gradients in place, transforms, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops import testing
from fusedops.registry import OPS, Case

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
SPEC = OPS["cross_entropy"]
cross_entropy = fusedops.cross_entropy


def logits(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (3 * torch.randn(shape)).to(dtype).requires_grad_()


def both(x: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient, ours and PyTorch's."""
    found = []
    for function in (cross_entropy, F.cross_entropy):
        loss = function(x, target, weight, **options)
        found.append((loss, torch.autograd.grad((loss * (1 + loss.detach().cos())).sum(), x)[0]))
    return found


# ---------------------------------------------------------------- as PyTorch's

SHAPES = [((7,), ()), ((5, 7), (5,)), ((2, 7, 3), (2, 3)), ((2, 7, 3, 4), (2, 3, 4)), ((0, 7), (0,)), ((1, 1), (1,))]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_is_pytorchs(reduction: str, weighted: bool, smoothing: float, backend: str, device: str) -> None:
    for (shape, indices), ignored in product(SHAPES, (-100, 2)):
        x = logits(*shape)
        classes = shape[min(1, len(shape) - 1)]
        target = torch.randint(classes, indices)
        if not indices and device != "cpu":  # of one ignored row without a batch PyTorch's CUDA kernel makes 0, not NaN
            target = target.where(target != ignored, 0)
        weight = torch.rand(classes) + 0.5 if weighted else None
        ours, theirs = both(x, target, weight, reduction=reduction, label_smoothing=smoothing, ignore_index=ignored)
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_are_all_ignored(reduction: str, smoothing: float, weighted: bool, backend: str) -> None:
    weight = torch.rand(7) if weighted else None
    target = torch.full((5,), -100)
    ours, theirs = both(logits(5, 7), target, weight, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(ours[0], theirs[0], equal_nan=True)
    assert not ours[1].any()


def test_what_an_ignored_row_holds_does_not_matter(backend: str) -> None:
    x = torch.randn(6, 9)
    target = torch.tensor([0, -100, 3, -100, 8, 1])
    found = []
    for bad in (0.0, float("nan"), float("inf"), -float("inf")):
        spoilt = x.clone()
        spoilt[1::2][:2] = bad
        leaf = spoilt.requires_grad_()
        loss = cross_entropy(leaf, target, z_loss=0.1, softcap=5.0)
        found.append((loss, *torch.autograd.grad(loss, leaf)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_loss_of_16_bits_is_fp32_also_under_autocast(dtype: torch.dtype, backend: str, device: str) -> None:
    x, target = logits(5, 33, dtype=dtype), torch.arange(5)
    plain = cross_entropy(x, target)
    with torch.autocast(torch.device(device).type, dtype):
        cast = cross_entropy(x, target)
        assert F.cross_entropy(x, target).dtype is F32
    theirs = F.cross_entropy(x.float(), target)  # on CUDA autocast takes the logarithm in 16 bits
    assert (plain.dtype, cast.dtype) == (F32, F32)
    assert torch.equal(plain, cast)
    torch.testing.assert_close(cast, theirs)
    assert torch.autograd.grad(cast, x)[0].dtype is dtype


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_class_probabilities_are_pytorchs(reduction: str, device: str) -> None:
    x, target, weight = logits(5, 7), torch.rand(5, 7), torch.rand(7)
    ours, theirs = both(x, target, weight, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)
    with_penalty = cross_entropy(x, target, reduction=reduction, z_loss=0.1)
    losses = F.cross_entropy(x, target, reduction="none") + 0.1 * x.logsumexp(1).square()
    torch.testing.assert_close(with_penalty, losses if reduction == "none" else getattr(losses, reduction)())
    found = fusedops.explain("cross_entropy", x, target)
    assert found.chosen == "reference"
    assert any("class probabilities" in reason for _, reasons in found.verdicts for reason in reasons)
    with pytest.raises(fusedops.UnsupportedError, match=r"native.*class probabilities"):
        cross_entropy(x, target, backend="native")


def test_masked_logits(backend: str) -> None:
    """Classes that are ruled out by -inf or the lowest number, in a row that is all of it too."""
    lowest = torch.finfo(F32).min
    x = torch.tensor([[0.5, -torch.inf, 1.0], [0.5, lowest, 1.0], [lowest] * 3, [1.0, 2.0, -torch.inf]])
    target = torch.tensor([0, 2, 1, 2])
    ours, theirs = both(x.requires_grad_(), target, reduction="none")
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[0][3] == torch.inf
    torch.testing.assert_close(ours[1][:3], theirs[1][:3])


# ---------------------------------------------------------------- wrong arguments

BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "input of integers": (lambda: {"input": torch.ones(3, 7).long()}, "input: expected a dtype .*, got torch.int64"),
    "input without dimensions": (lambda: {"input": torch.tensor(1.0)}, r"input: expected .*, got \(\)"),
    "a list": (lambda: {"input": [1.0]}, "input: expected a tensor, got list"),
    "sparse": (lambda: {"input": torch.ones(3, 7).to_sparse()}, "input: expected a dense tensor"),
    "target's shape": (lambda: {"target": torch.zeros(4).long()}, r"target: expected shape \(3,\) .*, got \(4,\)"),
    "one-hot integers": (
        lambda: {"target": torch.zeros(3, 7).long()},
        r"target: expected shape \(3,\) .*, got \(3, 7\)",
    ),
    "target of int32": (lambda: {"target": torch.zeros(3).int()}, "target: expected int64 .*, got torch.int32"),
    "target elsewhere": (lambda: {"target": torch.zeros(3, device="meta").long()}, "target: expected a tensor on cpu"),
    "weight's shape": (lambda: {"weight": torch.ones(8)}, r"weight: expected shape \(7,\), got \(8,\)"),
    "weight of fp64": (lambda: {"weight": torch.ones(7).double()}, "weight: expected fp32, .*, got torch.float64"),
    "a weight to train": (lambda: {"weight": torch.ones(7).requires_grad_()}, "weight: expected .* needs no gradient"),
    "reduction": (lambda: {"reduction": "average"}, "reduction: expected one of none, mean, sum, got 'average'"),
    "label_smoothing": (lambda: {"label_smoothing": 1.5}, "label_smoothing: expected a probability .*, got 1.5"),
    "z_loss": (lambda: {"z_loss": -1.0}, "z_loss: expected a finite number ≥ 0, got -1.0"),
    "softcap": (lambda: {"softcap": 0.0}, "softcap: expected None or a finite number > 0, got 0.0"),
    "ignore_index": (lambda: {"ignore_index": 1.5}, "ignore_index: expected an integer, got 1.5"),
    "inplace_backward": (lambda: {"inplace_backward": 1}, "inplace_backward: expected True or False, got 1"),
    "a leaf": (
        lambda: {"input": torch.ones(3, 7, requires_grad=True), "inplace_backward": True},
        "inplace_backward: expected logits that were computed, got a leaf",
    ),
    "expanded logits": (
        lambda: {"input": (torch.ones(7, requires_grad=True) * 1).expand(3, 7), "inplace_backward": True},
        "inplace_backward: expected logits in rows of memory of their own",
    ),
    "transposed logits": (
        lambda: {"input": (torch.ones(7, 3, requires_grad=True) * 1).T, "inplace_backward": True},
        r"inplace_backward: expected logits in rows .*, got \(3, 7\) with strides \(1, 3\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_is_named(name: str, device: str) -> None:
    make, words = BAD[name]
    with torch.device("cpu"):
        call = {"input": torch.ones(3, 7), "target": torch.tensor([0, 6, 3]), **make()}
    with pytest.raises(ValueError, match=f"^cross_entropy: {words}"):
        cross_entropy(**call)
    if not call.get("inplace_backward") or name == "inplace_backward":
        with pytest.raises(ValueError, match=f"^cross_entropy: {words}"):
            fusedops.explain("cross_entropy", **call)


@pytest.mark.parametrize("wrong", [7, -1, 2**40, -101])
def test_a_target_that_is_no_class_is_named_on_the_cpu(wrong: int, backend: str, device: str) -> None:
    if device != "cpu":
        pytest.skip("on a GPU it stops the kernel")
    x, target = torch.randn(4, 7), torch.tensor([0, -100, wrong, 6])
    with pytest.raises(ValueError, match="cross_entropy: target: expected class indices") as said:
        cross_entropy(x, target)
    assert f"from 0 to 6, or ignore_index -100, got {wrong}" in str(said.value)


def test_numbers_of_numpy_count(backend: str) -> None:
    x, target = torch.randn(4, 7), torch.tensor([0, 1, 2, 3])
    options = {"ignore_index": np.int64(2), "label_smoothing": np.float32(0.5), "z_loss": np.float64(0.5), "softcap": 2}
    plain = {"ignore_index": 2, "label_smoothing": 0.5, "z_loss": 0.5, "softcap": 2.0}
    torch.testing.assert_close(cross_entropy(x, target, **options), cross_entropy(x, target, **plain), rtol=0, atol=0)


# ---------------------------------------------------------------- the gradient in place of the logits


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", ["rows", "strided", "dimensions"])
def test_gradient_over_the_logits(dtype: torch.dtype, reduction: str, kind: str, backend: str) -> None:
    if backend == "reference" or (backend == "triton" and dtype is F64):
        pytest.skip("plain PyTorch sees to its memory itself")
    layouts: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
        "rows": ((5, 33), lambda x: x * 1),
        "strided": ((5, 40), lambda x: (x * 1)[:, 2:35]),
        "dimensions": ((2, 3, 33), lambda x: (x * 1).movedim(2, 1)),
    }
    shape, make = layouts[kind]
    leaf = torch.randn(shape, dtype=dtype, requires_grad=True)
    found = []
    for in_place in (False, True):
        x = make(leaf)
        target = torch.arange(x.numel() // 33).reshape(x.shape[0], *x.shape[2:]) % 33
        loss = cross_entropy(x, target, reduction=reduction, inplace_backward=in_place, softcap=4.0)
        version = x._version
        grads = torch.autograd.grad(loss.sum(), (x, leaf), retain_graph=True)
        assert (grads[0].data_ptr() == x.data_ptr()) == in_place
        assert (x._version > version) == in_place
        found.append(tuple(grad.clone() for grad in grads))
        if in_place:
            assert torch.equal(x, found[0][0]), "the logits' memory holds the gradient"
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_saved_the_logits_is_told(backend: str) -> None:
    """A softmax saves its output: its gradient would be that of other numbers."""
    p = torch.randn(4, 9, requires_grad=True)
    probabilities = torch.softmax(p, -1)
    loss = cross_entropy(probabilities, torch.arange(4), inplace_backward=True)
    if backend == "reference":
        loss.backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forward_leaves_the_logits_alone(backend: str) -> None:
    x, target = logits(4, 50, dtype=BF16), torch.arange(4)
    kept = x.detach().clone()
    y = x * 1
    loss = cross_entropy(y, target, inplace_backward=True)
    assert torch.equal(y, kept)
    loss.backward()
    assert torch.equal(x, kept)


# ---------------------------------------------------------------- PyTorch's machinery


def test_backward_saves_little(backend: str) -> None:
    if backend == "reference":
        pytest.skip("plain PyTorch keeps its own")
    x, target, saved = logits(64, 33, dtype=BF16), torch.arange(64) % 33, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        cross_entropy(x, target)
    known = {x.untyped_storage().data_ptr(), target.untyped_storage().data_ptr()}
    own = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    assert sum(t.nbytes for t in own) <= 8 * 64 + 4, "two numbers a row, and what the mean divides by"


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda loss, x: torch.func.grad(loss)(x),
    "jvp": lambda loss, x: torch.func.jvp(loss, (x,), (x.cos(),))[1],
    "vmap": lambda loss, x: torch.func.vmap(loss)(torch.stack([x, x + 1])),
    "hessian": lambda loss, x: torch.func.hessian(loss)(x),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str, compiled: bool) -> None:
    if compiled and transform in ("jvp", "hessian"):
        pytest.skip("PyTorch does not compile them")
    torch._dynamo.reset()
    target = torch.tensor([0, -100, 3])
    found = []
    for function in (cross_entropy, SPEC.reference):
        loss = partial(function, target=target, z_loss=0.1, label_smoothing=0.1)
        call = partial(TRANSFORMS[transform], lambda x, loss=loss: loss(x))
        if compiled and function is cross_entropy:
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        found.append(call(torch.linspace(-1, 2, 15).reshape(3, 5)))
    torch.testing.assert_close(*found)


class Tagged(Tensor):
    """A subclass without a dispatch of its own."""


@pytest.mark.parametrize("tagged", ["input", "target", "weight"])
def test_tensor_subclasses_take_plain_torch(tagged: str) -> None:
    call = {"input": torch.randn(3, 5), "target": torch.tensor([0, 1, 2]), "weight": torch.rand(5)}
    want = cross_entropy(**call)
    got = cross_entropy(**{**call, tagged: call[tagged].as_subclass(Tagged)})
    assert isinstance(got, Tagged)
    torch.testing.assert_close(got.as_subclass(Tensor), want)


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        loss = cross_entropy(torch.randn(3, 8, dtype=BF16), torch.zeros(3, dtype=torch.int64), reduction="none")
        assert (loss.shape, loss.dtype) == ((3,), F32)
    x = torch.empty(3, 8, 2, device="meta", dtype=BF16, requires_grad=True)
    loss = cross_entropy(x, torch.empty(3, 2, device="meta", dtype=torch.int64))
    assert (loss.shape, loss.dtype, loss.device.type) == ((), F32, "meta")


@pytest.mark.parametrize("kind", ["negative", "zeros"])
def test_tensors_that_are_not_in_memory(kind: str, backend: str, device: str) -> None:
    base = (
        torch._neg_view(torch.randn(5, 16))
        if kind == "negative"
        else torch._efficientzerotensor((5, 16), device=device)
    )
    target, results = torch.arange(5), []
    for written in (False, True):
        x = (base + 0.0 if written else base).detach().requires_grad_()
        loss = cross_entropy(x, target)
        results.append((loss, *torch.autograd.grad(loss, x)))
    torch.testing.assert_close(*results)


def test_inference_mode(backend: str) -> None:
    with torch.inference_mode():
        x, target = torch.randn(4, 64), torch.arange(4)
        torch.testing.assert_close(cross_entropy(x, target), F.cross_entropy(x, target))


@pytest.mark.parametrize("inplace_backward", [False, True])
def test_compiled_step(inplace_backward: bool, backend: str, device: str) -> None:
    """Logits made in the graph; the gradient in place is the graph's own business."""
    torch._dynamo.reset()
    linear, target = torch.nn.Linear(8, 33), torch.arange(4)

    def step(x: Tensor) -> Tensor:
        return cross_entropy(linear(x), target, label_smoothing=0.1, inplace_backward=inplace_backward)

    x, found = torch.randn(4, 8), []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        linear.zero_grad()
        function(x).backward()
        found.append([p.grad.clone() for p in linear.parameters()])
    torch.testing.assert_close(*found)


# ---------------------------------------------------------------- numbers


def test_planted_faults_are_seen() -> None:
    """What is wrong by little: a class left out of a long row, smoothing forgotten, a mean over all rows."""
    case = Case((40, 3000), 1, {"input": BF16})
    sample = testing.make_sample(SPEC, case)
    kept: list[Tensor] = []

    def grad(output: Tensor) -> Tensor:
        kept.append(testing.make_grad(case, output))
        return kept[-1]

    def ratio(function: Callable[..., Tensor]) -> float:
        results = testing.run(function, sample, grad)
        return max(c.ratio for c in testing.judge(SPEC, case, sample, kept[-1], results).comparisons)

    assert ratio(SPEC.function) <= 1
    assert ratio(lambda input, target: SPEC.reference(torch.cat([input[:, :-1], input[:, -1:] - 99], 1), target)) > 1
    assert ratio(lambda input, target: SPEC.reference(input, target, label_smoothing=1e-4)) > 1
    assert ratio(lambda input, target: SPEC.reference(input, target, reduction="sum") / 40) > 1
    assert ratio(lambda input, target: SPEC.reference(input.half().bfloat16() * 1.01, target)) > 1


def test_a_large_mean_costs_no_digits(backend: str) -> None:
    """The loss is made of differences from the largest logit, which are exact."""
    x = torch.randn(8, 500).mul(64).round().div(64)
    target = torch.arange(8)
    near, far = (cross_entropy(x + shift, target, reduction="none") for shift in (0.0, 2.0**15))
    torch.testing.assert_close(far, near, rtol=1e-6, atol=1e-6)


def test_results_repeat_bit_for_bit_whatever_the_threads(device: str) -> None:
    if device != "cpu" or fusedops.backends("cpu")["native"]:
        pytest.skip("of the native CPU kernels")
    x, target, found = logits(997, 1031), torch.arange(997) % 1031, []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        loss = cross_entropy(x, target, label_smoothing=0.1, backend="native")
        found.append((loss, *torch.autograd.grad(loss, x)))
    torch.set_num_threads(threads)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@ON_GPU
@pytest.mark.parametrize("wrong", [7, -1, 2**40])
def test_a_wrong_target_stops_the_kernel(wrong: int) -> None:
    """In a process of its own, whose CUDA context does not survive."""
    code = (
        "import torch, fusedops\n"
        "x = torch.randn(4, 7, device='cuda')\n"
        f"fusedops.cross_entropy(x, torch.tensor([0, 1, {wrong}, 3], device='cuda'), backend='native')\n"
        "torch.cuda.synchronize()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "cross_entropy: target: expected class indices" in done.stderr + done.stdout, done.stderr


@ON_GPU
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_in_a_cuda_graph(reduction: str, backend: str) -> None:
    static, target = torch.randn(9, 5001).bfloat16().requires_grad_(), torch.randint(5001, (9,))

    def step() -> tuple[Tensor, Tensor]:
        loss = cross_entropy(static, target, reduction=reduction, label_smoothing=0.1)
        return loss, torch.autograd.grad(loss.sum(), static)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            static.copy_(torch.randn(9, 5001))
            target.random_(5001)
        graph.replay()
        torch.testing.assert_close(captured, step(), rtol=0, atol=0)


# ---------------------------------------------------------------- the module


def test_the_module_is_pytorchs(backend: str) -> None:
    x, target, weight = logits(5, 7), torch.tensor([0, 6, -1, 2, 3]), torch.rand(7)
    given = {"weight": weight, "ignore_index": -1, "reduction": "sum", "label_smoothing": 0.1}
    ours, theirs = fusedops.nn.CrossEntropyLoss(**given), torch.nn.CrossEntropyLoss(**given)
    torch.testing.assert_close(ours(x, target), theirs(x, target))
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    theirs.load_state_dict(ours.state_dict())
    more = fusedops.nn.CrossEntropyLoss(z_loss=0.1, softcap=5, inplace_backward=True)
    assert torch.equal(more(x * 1, target.clamp(0)), cross_entropy(x, target.clamp(0), z_loss=0.1, softcap=5.0))
    assert "z_loss=0.1, softcap=5.0" in repr(more)
    more(x * 1, target.clamp(0)).backward()


@pytest.mark.parametrize(
    ("name", "value"), [("z_loss", -1), ("softcap", 0), ("label_smoothing", 2), ("inplace_backward", None)]
)
def test_bad_option_of_the_module_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^CrossEntropyLoss: {name}: expected .*, got"):
        fusedops.nn.CrossEntropyLoss(**{name: value})
