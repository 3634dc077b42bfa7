"""The tuner: what a model calls is measured, and it and its batch are left as they were."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tune_helpers import BF16, NEEDS_GPU, everything, same, tuned_file

import fusedops
from fusedops import dispatch
from fusedops.tuning.table import order


class Net(nn.Module):
    """Norms of torch's, to be patched; what it keeps in buffers and writes to its parameters has to be undone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LayerNorm(16), nn.LayerNorm(16), nn.RMSNorm(24)
        self.linear, self.drop, self.batch = nn.Linear(16, 24), nn.Dropout(0.5), nn.BatchNorm1d(24)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.steps = self.steps + 1
        self.linear.bias.data.add_(1.0)
        y = self.linear(self.second(self.first(x)))
        y = self.batch(y.flatten(0, 1)).view_as(y)
        y = fusedops.layer_norm(self.drop(self.third(y)), 24, backend="reference")  # named: not the table's business
        return {"logits": y * scale, "ids": torch.arange(3), "more": [y.mean()]}


@pytest.fixture
def net() -> Net:
    model = fusedops.patch(Net(), verbose=False)
    model.eval()
    model.drop.train()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    return model


def test_a_models_calls_are_measured_once_each_and_its_state_is_as_before(
    home: Path, net: Net, clock: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = clock(native=100.0, reference=20.0)
    x = torch.randn(4, 5, 16, requires_grad=True)
    grads, steps = [p.grad for p in net.parameters()], net.steps
    before, passes = everything(net), []
    net.first.register_forward_hook(lambda *_: passes.append(1))
    report = fusedops.tune(net, x, budget=5)
    assert same(before, everything(net))
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert net.steps is steps
    assert x.grad is None
    assert len(passes) == 13
    assert seen == ["layer_norm fp32 20x16", "rms_norm fp32 20x24"]
    assert [(cell.op, order([cell])[0]) for cell in report.cells] == [
        ("layer_norm", "reference"),
        ("rms_norm", "reference"),
    ]
    assert report.not_reached == ()
    assert report.file == str(tuned_file())
    assert report.before_ms > 0
    assert report.after_ms > 0
    assert capsys.readouterr().out.strip() == str(report)
    assert ("ms saved" in str(report)) == (fusedops.backends("cpu")["native"] is None)  # else nothing changes
    assert fusedops.explain("layer_norm", x, 16, net.first.weight, net.first.bias).chosen == "reference"
    again = fusedops.tune(net, x)
    assert len(seen) == 2
    assert [cell.key for cell in again.cells] == [cell.key for cell in report.cells]
    assert again.before_ms == again.after_ms  # no choice has changed


def test_a_model_is_tuned_for_real(home: Path, net: Net) -> None:
    with torch.autocast("cpu", BF16), torch.no_grad():
        report = fusedops.tune(net, {"x": torch.randn(4, 5, 16), "scale": 2.0})
    assert [cell.op for cell in report.cells] == ["layer_norm", "layer_norm", "rms_norm"]  # the second reads bf16
    dtypes = [(cell.arguments["input"], cell.arguments["output"]) for cell in report.cells]
    assert dtypes == [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")]
    for cell in report.cells:
        assert not any(text.startswith("FAIL") for text in cell.problems.values())
        assert cell.times["reference"][0] > 0
    with torch.autocast("cpu", BF16):
        explained = fusedops.explain("layer_norm", torch.randn(4, 5, 16), 16, net.first.weight, net.first.bias)
    assert explained.row.source == f"tuned: {tuned_file()}"


@pytest.mark.parametrize("residual_dtype", [None, BF16])
def test_residuals_and_their_dtypes_are_recorded(home: Path, residual_dtype: torch.dtype | None) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = fusedops.nn.AddLayerNorm(32, dropout_p=0.1, bias=False, residual_dtype=residual_dtype)

        def forward(self, x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.norm(x, r)

    report = fusedops.tune(Block(), (torch.randn(6, 32), torch.randn(6, 32)))
    (cell,) = report.cells
    assert cell.arguments["residual_out"] == ("bfloat16" if residual_dtype else "float32")
    assert "bias" not in cell.arguments
    assert set(cell.times) == {"reference"} | ({"native"} if fusedops.backends("cpu")["native"] is None else set())


def test_a_budget_too_small_is_told(home: Path, net: Net, clock: Callable[..., list[str]]) -> None:
    clock(seconds=4.0)
    report = fusedops.tune(net, torch.randn(4, 5, 16), budget=5)
    assert [cell.op for cell in report.cells] == ["layer_norm"]
    assert report.not_reached == ("rms_norm fp32 20x24",)
    assert "not reached within the budget: rms_norm fp32 20x24" in str(report)


def test_a_model_without_calls_of_ours(home: Path) -> None:
    report = fusedops.tune(nn.Linear(3, 3), torch.ones(2, 3))
    assert (report.cells, report.file) == ((), None)
    assert "nothing to measure" in str(report)


def test_a_forced_backend_is_not_the_tables_business(home: Path, net: Net) -> None:
    with fusedops.use_backend("reference"):
        assert fusedops.tune(net, torch.randn(4, 5, 16)).cells == ()


class Loss(nn.Module):
    """As Hugging Face's models: an object with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = fusedops.nn.LayerNorm(8), []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        y.register_hook(lambda grad: self.seen.append(grad))
        return type("Output", (), {"loss": (3 * y).sum(), "logits": y})()


def test_a_models_own_loss_is_taken() -> None:
    model = Loss()
    fusedops.warmup(model, torch.randn(2, 8))
    assert torch.equal(model.seen[0], torch.full((2, 8), 3.0))


def test_backward_runs_outside_of_autocast() -> None:
    """As in training, where only forward is within."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Identity.apply(super().forward(x))

    seen: list[bool] = []
    with torch.autocast("cpu", BF16):
        fusedops.warmup(Model(2, 2), torch.ones(2, 2))
    assert seen == [True, False]


def test_warmup_leaves_all_as_it_was(net: Net) -> None:
    before = everything(net)
    for batch in (torch.randn(4, 5, 16), (torch.randn(4, 5, 16), 2.0), {"x": torch.randn(4, 5, 16)}):
        random = torch.get_rng_state()
        before[-1 - len(list(net.modules()))] = random
        assert fusedops.warmup(net, batch) is None
        assert same(before, everything(net))


@pytest.mark.parametrize("function", [fusedops.warmup, fusedops.tune])
def test_after_an_error_all_is_as_it_was(home: Path, net: Net, function: Callable[..., object]) -> None:
    batch = (torch.randn(4, 5, 16), "no number")
    before = everything(net)
    with pytest.raises(TypeError):
        function(net, batch)
    assert same(before, everything(net))
    assert dispatch.recorder is None


class Restless(nn.Module):
    """Does to its tensors what a step seldom does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = fusedops.nn.LayerNorm(16)
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("signed", torch.zeros(3))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.scripted = torch.jit.script(nn.Linear(16, 16))
        self.batch = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.grown.resize_(5).fill_(1.0)
        self.signed.neg_()
        return self.batch(self.scripted(self.norm(x)))


@pytest.mark.parametrize("wrong", [False, True], ids=["as it should", "with an error"])
def test_odd_tensors_and_modules_are_as_before(wrong: bool) -> None:
    model = Restless().eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    if wrong:
        model.batch.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fusedops.warmup(model, torch.randn(8, 16))
    else:
        fusedops.warmup(model, torch.randn(8, 16))
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        want = before[name]
        assert t.shape == want.shape, name
        assert torch.equal(t.to_dense(), want.to_dense()), name
        assert torch.equal(torch.signbit(t.to_dense()), torch.signbit(want.to_dense())), name
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert not any(module.training for module in model.modules())


Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Held:
    """A part of a batch."""

    value: torch.Tensor
    name: str = "held"


def in_many_ways(x: torch.Tensor) -> dict[str, Any]:
    return {
        "argument": (x,),
        "named": {"x": x},
        "user dict": UserDict(x=x),
        "proxy": MappingProxyType({"x": x}),
        "tuple": [(3, x)],
        "list": [[x]],
        "named tuple": (Pair("text", x),),
        "mapping": ({"deep": UserDict(x=[x])},),
        "dataclass": (Held(x),),
    }


class Taking(nn.Module):
    """Finds the tensor anywhere, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = fusedops.nn.LayerNorm(8), []

    def forward(self, x: Any) -> torch.Tensor:
        self.seen.append(x)
        while not isinstance(x, torch.Tensor):
            parts = [x.value] if isinstance(x, Held) else [*x.values()] if isinstance(x, Mapping) else x
            x = parts[-1]
        with torch.no_grad():
            x.mul_(2)
        return self.norm(x)


WAYS = [*in_many_ways(torch.ones(()))]


@pytest.mark.parametrize("way", WAYS)
def test_the_graph_behind_a_batch_is_left_alone(way: str) -> None:
    linear, model = nn.Linear(8, 8), Taking()
    x = linear(torch.randn(3, 8))
    value = x.detach().clone()
    batch = in_many_ways(x)[way]
    for _ in range(2):
        fusedops.warmup(model, batch)
    assert linear.weight.grad is None
    assert torch.equal(x, value)
    x.sum().backward()  # the graph is still there
    assert linear.weight.grad is not None
    kinds = {type(given) for given in model.seen}
    assert kinds == {type(batch["x"] if isinstance(batch, Mapping) else batch[0])}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grad", [None, torch.full((3, 8), 7.0)])
def test_leaves_of_a_batch_are_left_alone(way: str, grad: torch.Tensor | None) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    x.grad, value = grad, x.detach().clone()
    fusedops.warmup(Taking(), in_many_ways(x)[way])
    assert x.grad is grad
    assert grad is None or torch.equal(grad, torch.full((3, 8), 7.0))
    assert torch.equal(x, value)


def test_a_model_is_tuned_on_what_another_computed(home: Path, clock: Callable[..., list[str]]) -> None:
    seen, linear = clock(), nn.Linear(8, 8)
    fusedops.tune(fusedops.nn.LayerNorm(8), linear(torch.randn(3, 8)))
    assert seen == ["layer_norm fp32 3x8"]
    assert linear.weight.grad is None


def test_a_batch_is_given_as_it_is_but_for_its_memory() -> None:
    """Whether it has a gradient, may be written to in place, and is there twice."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, computed: torch.Tensor, again: torch.Tensor, leaf: torch.Tensor, ids: torch.Tensor) -> Any:
            seen.append((computed is again, computed.requires_grad, computed.is_leaf, leaf.requires_grad, leaf.is_leaf))
            return computed.relu_() * self.weight * leaf * ids

    seen: list[tuple[bool, ...]] = []
    computed = torch.ones(8, requires_grad=True) * 1
    with torch.no_grad():
        fusedops.warmup(Model(), [computed, computed, torch.ones(8, requires_grad=True), torch.arange(8)])
    assert seen == [(True, True, False, True, True)]


@pytest.mark.parametrize("function", [fusedops.tune, fusedops.warmup], ids=["tune", "warmup"])
def test_inference_mode_is_named(function: Callable[..., object], home: Path, net: Net) -> None:
    with torch.inference_mode():
        x = torch.randn(4, 5, 16)
        with pytest.raises(RuntimeError, match=r"torch\.inference_mode\(\) is on"):
            function(net, x)
    function(net, x)  # what was made in it may be a batch


@pytest.mark.parametrize("function", [fusedops.tune, fusedops.warmup], ids=["tune", "warmup"])
def test_bad_arguments_are_named(function: Callable[..., object], home: Path) -> None:
    with pytest.raises(ValueError, match=r"model: expected a module, got 3"):
        function(3, torch.ones(2))
    with pytest.raises(ValueError, match="model: expected a floating-point result with a gradient, got none"):
        function(nn.Identity(), torch.ones(2))
    if function is fusedops.tune:
        for bad in (0, -1, float("nan"), "soon", True):
            with pytest.raises(ValueError, match="tune: budget: expected a finite number > 0"):
                function(nn.Linear(2, 2), torch.ones(2, 2), budget=bad)


def test_a_cache_that_cannot_be_written_is_an_error(home: Path, net: Net) -> None:
    home.write_text("no folder")
    x = torch.randn(4, 5, 16)
    before = everything(net)
    with pytest.raises(OSError, match=str(home)):
        fusedops.tune(net, x)
    assert same(before, everything(net))


@NEEDS_GPU
def test_a_model_is_tuned_on_a_gpu(home: Path, need_backend: Callable[[str], None]) -> None:
    need_backend("native")
    model = nn.Sequential(fusedops.nn.LayerNorm(256), nn.Linear(256, 256), fusedops.nn.RMSNorm(256)).cuda()
    x = torch.randn(64, 128, 256, device="cuda")
    before, random = everything(model), torch.cuda.get_rng_state()
    with torch.autocast("cuda", BF16):
        report = fusedops.tune(model, x)
    assert same(before, everything(model))
    assert torch.equal(random, torch.cuda.get_rng_state())
    assert report.not_reached == ()
    for cell in report.cells:
        assert {"native", "triton", "reference"} <= cell.times.keys() | cell.problems.keys()
        assert not any(text.startswith("FAIL") for text in cell.problems.values()), cell.problems
        assert all(0 < device_us < 1e5 and 0 < host_us < 1e5 for device_us, host_us in cell.times.values())
    with torch.autocast("cuda", BF16):
        row = fusedops.explain("layer_norm", x, 256, model[0].weight, model[0].bias).row
    major, minor = torch.cuda.get_device_capability()
    assert row.source.startswith("tuned: ")
    assert row.capability == (10 * major + minor,) * 2


class Rearranging(nn.Module):
    """Registers its tensors anew in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = (nn.Parameter(torch.ones(3)) for _ in range(2))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight * self.frozen + self.cache
        self.weight = nn.Parameter(self.weight.detach() / 2)
        self.extra = nn.Parameter(torch.ones(1))
        self.frozen.requires_grad_(False)
        del self.cache
        self.register_buffer("cache", torch.ones(3))
        self.register_buffer("kept", torch.ones(3), persistent=False)
        return y


@pytest.mark.parametrize("function", [fusedops.warmup, fusedops.tune])
def test_a_model_has_the_tensors_that_it_had(home: Path, function: Callable[..., object]) -> None:
    model = Rearranging()
    before = {name: (t, t.clone()) for name, t in (*model.named_parameters(), *model.named_buffers())}
    function(model, torch.randn(2, 3))
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert after.keys() == before.keys()
    assert all(after[name] is t and torch.equal(t, value) for name, (t, value) in before.items())
    assert list(model.state_dict()) == ["weight", "frozen", "kept"]
    assert model.frozen.requires_grad


@pytest.mark.parametrize("function", [fusedops.warmup, fusedops.tune])
def test_a_lazy_model_is_refused(home: Path, function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"model: expected initialised parameters, .*call the model once before"):
        function(nn.LazyLinear(3), torch.randn(2, 3))
