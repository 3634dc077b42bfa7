"""Cases drawn at random: a short slice of the sweep, and proof that it can fail."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops import testing
from fusedops.cli import main
from fusedops.fuzz import draw, optimizers, run, sweep
from fusedops.fuzz.draw import Cell, Drawn
from fusedops.registry import OPS, OPTIMS, VALUES, Memory

LAYER_NORM = OPS["layer_norm"]
NAMES = [*OPS, *OPTIMS]
F32, BF16 = torch.float32, torch.bfloat16
SMALL = draw.Size(elements=2**12, rows=64, width=2**12)


def small(cells: list[sweep.Target]) -> list[sweep.Target]:
    return [dataclasses.replace(target, size=SMALL, large_every=0) for target in cells]


# ---------------------------------------------------------------- the slice


@pytest.mark.parametrize("name", NAMES)
def test_slice(name: str, backend: str, device: str) -> None:
    """The first cases of every cell; few where each is a kernel to compile."""
    per_cell = 2 if backend == "triton" else 6
    found = sweep.sweep(small(sweep.targets(device, [name], [backend])), seed=0, per_cell=per_cell)
    assert not found.failures, "\n".join(found.messages)
    assert found.complete
    assert found.cases or backend == "apex", "nothing was judged"


# ---------------------------------------------------------------- planted faults

Norm = Callable[..., Tensor]


def planted(fault: Norm, budget: int = 300) -> sweep.Sweep:
    """Sweep an op whose function is faulty."""
    spec = dataclasses.replace(LAYER_NORM, function=fault)
    cells = sweep.targets("cpu", chosen=["reference"], specs={"layer_norm": spec})
    cells = [target for target in cells if target.cell.name.endswith("fp32-bf16")]
    return sweep.sweep(cells, seed=0, per_cell=budget, until_failure=True)


def faulty(change: Callable[[Tensor, Tensor], Tensor]) -> Norm:
    """Make a layer_norm whose result went through ``change(input, result)``."""

    def layer_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5, *, out_dtype: torch.dtype | None = None, backend: str | None = None,
    ) -> Tensor:  # fmt: skip
        return change(input, LAYER_NORM.reference(input, normalized_shape, weight, bias, eps, out_dtype))

    return layer_norm


def rows_beyond_a_grid(x: Tensor, y: Tensor) -> Tensor:
    width = max(x.shape[-1], 1)
    return torch.cat([y.flatten()[: 65535 * width], y.flatten()[65535 * width :] * 0]).view_as(y)


def misread_when_shifted(x: Tensor, y: Tensor) -> Tensor:
    return y.roll(1, -1) if x.data_ptr() % 16 and x.shape[-1] > 1 else y


def strides_ignored(x: Tensor, y: Tensor) -> Tensor:
    return (
        y
        if x.is_contiguous() or not x.numel()
        else y + torch.as_strided(x.detach(), x.shape, x.contiguous().stride()) * 0
    )


def tail_dropped(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([y[..., :-1], y[..., -1:] * 0], -1) if x.shape[-1] % 4 and x.shape[-1] > 4 else y


def nan_of_one_row_in_all(x: Tensor, y: Tensor) -> Tensor:
    return y + (x.detach().sum() * 0).to(y.dtype)


FAULTS = [rows_beyond_a_grid, misread_when_shifted, strides_ignored, tail_dropped, nan_of_one_row_in_all]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_sweep_finds_planted_faults(fault: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = planted(faulty(fault))
    assert found.failures
    assert all(name in "".join(found.messages) for name in found.failures[:5])


class _Lost(torch.autograd.Function):
    """The identity, which loses a gradient of many rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (ctx.rows < 4096), None


@pytest.mark.parametrize("kind", ["weight gradient of many rows", "eps", "bf16 statistics"])
def test_sweep_finds_planted_faults_of_numbers(kind: str) -> None:
    def layer_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5, *, out_dtype: torch.dtype | None = None, backend: str | None = None,
    ) -> Tensor:  # fmt: skip
        if kind == "eps":
            return LAYER_NORM.reference(input, normalized_shape, weight, bias, 1e-5, out_dtype)
        if kind == "bf16 statistics":
            dims = tuple(range(-len(normalized_shape), 0))
            mean = input.mean(dims, keepdim=True).bfloat16().float()
            rstd = ((input - mean).square().mean(dims, keepdim=True) + eps).rsqrt()
            y = (input - mean) * rstd * (1 if weight is None else weight.float())
            return (y + (0 if bias is None else bias.float())).to(out_dtype or input.dtype)
        rows = input.numel() // max(math.prod(normalized_shape), 1)
        weight = None if weight is None else _Lost.apply(weight, rows)
        return LAYER_NORM.reference(input, normalized_shape, weight, bias, eps, out_dtype)

    assert planted(layer_norm).failures


def test_fp64_gradients_of_equal_rows_are_drawn() -> None:
    """Whoever adds up one after another drifts there; the truth does not."""
    cell = Cell(LAYER_NORM, "reference", torch.float64, torch.float64)
    variants = [draw.draw_variant(Random(i), cell, "cpu", SMALL, irregular=True) for i in range(100)]
    assert any("grad" in variant.memory and variant.memory["grad"].expand for variant in variants if variant)


def test_sweep_finds_a_planted_fault_of_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that forgets the last element of tensors of more than one block."""
    spec = OPTIMS["adamw"]
    right = spec.optimizer._update

    def forgetful(self: Any) -> None:
        kept = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]
        right(self)
        for p, old in kept:
            if p.numel() > 1024:
                p.data.view(-1)[-1] = old.view(-1)[-1] if p.is_contiguous() else p.data.view(-1)[-1]

    monkeypatch.setattr(spec.optimizer, "_update", forgetful)
    cells = [t for t in sweep.targets("cpu", ["adamw"], ["reference"]) if t.cell.name.endswith("fp32-fp32")]
    assert sweep.sweep(cells, seed=0, per_cell=30, until_failure=True).failures


# ---------------------------------------------------------------- draws


def test_a_name_makes_the_same_case_again() -> None:
    name = "layer_norm/reference/bf16-fp32/5/1"
    target = sweep.find(name, "cpu")
    first, again, other = (target.attempt(n) for n in (name + "7", name + "7", name + "8"))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm/native/bf16-fp32/5/x", "norm/native/bf16-fp32/5/1", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="case: expected op/backend/dtypes/seed/number"):
        sweep.find(name, "cpu")


def drawn_cases(count: int = 400) -> list[Drawn]:
    cell = Cell(LAYER_NORM, "reference", BF16, F32)
    found = []
    for number in range(count):
        random = Random(number)
        variant = draw.draw_variant(random, cell, "cpu", draw.Size(2**14, 2**14), bool(number % 2))
        assert variant is not None
        found.append(draw.draw(random, cell, variant, "cpu", draw.Size(2**14, 2**14)))
    return found


def test_draws_reach_everything() -> None:
    cases = [drawn.case for drawn in drawn_cases()]
    widths = [math.prod(case.shape[len(case.shape) - case.normalized :]) for case in cases]
    assert min(widths) == 1
    assert max(widths) > 2**18
    assert any(0 in case.shape for case in cases)
    assert {case.normalized for case in cases} == {1, 2, 3}
    assert {case.values for case in cases} == set(VALUES) - {"huge"}  # which PyTorch's LayerNorm makes NaN of
    assert {frozenset(case.dtypes) for case in cases} >= {frozenset(("input",)), frozenset(("input", "weight", "bias"))}
    assert {case.options["eps"] for case in cases} >= {0.0, 1e-12, 1e-5}
    assert {name for case in cases for name in case.memory} == {"input", "weight", "bias", "grad"}


def test_no_case_is_drawn_that_its_backend_refuses_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(spec: Any, case: Any, backend: str, device: str) -> str | None:
        return "too many rows" if math.prod(case.shape[: len(case.shape) - case.normalized]) > 3 else None

    assert any(refused(None, drawn.case, "", "") for drawn in drawn_cases())
    monkeypatch.setattr(testing, "refused", refused)
    assert not any(refused(None, drawn.case, "", "") for drawn in drawn_cases())


def test_a_cell_of_variants_has_few_kinds_of_kernels() -> None:
    cell = Cell(LAYER_NORM, "reference", BF16, F32)
    kinds = set()
    for number in range(40):
        variant = draw.draw_variant(Random(number % 4), cell, "cpu", SMALL, True)
        assert variant is not None
        case = draw.draw(Random(number), cell, variant, "cpu", SMALL).case
        kinds.add(str((case.dtypes, math.prod(case.shape[len(case.shape) - case.normalized :]), case.memory)))
    assert len(kinds) == 4


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_pooled_noise_is_the_same_everywhere(device: str) -> None:
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    here, there = (run.pooled(d)((3, 700_000), g) for d, g in zip(("cpu", device), generators, strict=True))
    assert torch.equal(here, there.cpu())
    assert abs(float(here.mean())) < 0.01
    assert abs(float(here.std()) - 1) < 0.01
    assert not torch.equal(here[0], here[1])


@pytest.mark.parametrize(
    ("memory", "strides", "offset"),
    [
        (Memory(), (12, 4, 1), 0),
        (Memory(offset=3), (12, 4, 1), 3),
        (Memory(gaps=(2,)), (18, 6, 1), 0),
        (Memory(gaps=(0, 5)), (17, 4, 1), 0),
        (Memory(step=2), (24, 8, 2), 0),
        (Memory(roll=1), (3, 1, 6), 0),
        (Memory(expand=True), (0, 4, 1), 0),
    ],
    ids=str,
)
def test_memory_is_what_it_says(memory: Memory, strides: tuple[int, ...], offset: int) -> None:
    values = torch.arange(24.0).view(2, 3, 4)
    stored = testing.lay_out(values, memory)
    assert stored.stride() == strides
    assert stored.storage_offset() == offset
    assert torch.equal(stored, values[:1].expand(2, 3, 4) if memory.expand else values)
    if not memory.expand:
        every = stored.new_empty(0).set_(stored.untyped_storage())
        assert int(every.isnan().sum()) == every.numel() - 24


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0, 3)])
@pytest.mark.parametrize(
    "memory", [Memory(offset=3, gaps=(2, 1)), Memory(roll=2, step=3), Memory(expand=True)], ids=str
)
def test_memory_of_odd_shapes(shape: tuple[int, ...], memory: Memory) -> None:
    assert testing.lay_out(torch.ones(shape), memory).shape == shape


def test_optimizer_draws_reach_everything() -> None:
    found = [
        optimizers.run(
            Random(n), optimizers.OptimCell(OPTIMS["adamw"], "reference", F32, F32, "plain"), "cpu", 2**10, True, False
        )
        for n in range(20)
    ]
    judged = [f for f in found if f is not None]
    assert len(judged) >= 15
    assert sum(f.irregular for f in judged) >= 15
    assert not any(f.problem for f in judged)


# ---------------------------------------------------------------- the command


def test_command_writes_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "fuzz.jsonl"
    status = main(["parity", "--fuzz", "1", "--per-cell", "0", "--op", "rms_norm", "--backend", "reference", "--device",
                   "cpu", "--seed", "4", "--out", str(file)])  # fmt: skip
    assert status == 0
    run_line, *cells = map(json.loads, file.read_text().splitlines())
    assert (run_line["seed"], run_line["shard"], run_line["cases"]) == (4, [0, 1], len(draw.MIXES))
    assert {cell["cell"] for cell in cells} >= {"rms_norm/reference/bf16-fp32", "rms_norm/reference/fp64-fp64"}
    assert all(cell["forward"] == 1 and not cell["failures"] for cell in cells)
    assert "0 failed" in capsys.readouterr().out


def test_shards_are_a_partition() -> None:
    cells = small(sweep.targets("cpu", ["rms_norm"], ["reference"]))
    whole = sweep.sweep(cells, 0, 9)
    parts = [sweep.sweep(cells, 0, 9, shard=(i, 3)) for i in range(3)]
    for name, tally in whole.tallies.items():
        assert sum(part.tallies[name].forward for part in parts) == tally.forward == 9


@pytest.mark.parametrize("parts", [1, 12, 14])
def test_every_shard_has_its_part_of_every_kind(parts: int) -> None:
    """Large cases above all: they take the time."""
    (target,) = sweep.targets("cpu", ["layer_norm"], ["reference"], large_every=10)[:1]
    mine = [[target.name(0, number) for number, _ in sweep._mine([target] * 36, 334, (i, parts))] for i in range(parts)]
    large = [sum(name.endswith("/large") for name in names) for names in mine]
    assert sum(map(len, mine)) == 36 * 334
    assert sum(large) == pytest.approx(36 * 33.4, rel=0.05)
    assert max(large) < 1.1 * min(large)


def test_a_draw_that_shows_nothing_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = small(sweep.targets("cpu", ["adamw"], ["reference"]))[:1]
    right, lost = optimizers.run, iter([])

    def run(*args: Any) -> Any:
        return None if next(lost, True) else right(*args)

    monkeypatch.setattr(optimizers, "run", run)
    lost = iter([True, False] * 6)
    assert not sweep.sweep(cells, 0, 6).short
    lost = iter([False, True] * 3)
    assert sweep.sweep(cells, 0, 6).short == [f"{cells[0].cell.name} (3 of 6)"]


def test_a_killed_sweep_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.jsonl"
    monkeypatch.setattr(sweep, "_SAVED", 0.0)
    cells = small(sweep.targets("cpu", ["rms_norm"], ["reference"]))
    right, left = sweep.runs.run, iter(range(7))

    def killed(*args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(sweep.runs, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(cells, 0, 9, save=lambda result: result.write(file, {"seed": 0}))
    first, *rest = map(json.loads, file.read_text().splitlines())
    assert (first["complete"], first["cases"], sum(cell["forward"] for cell in rest)) == (False, 7, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["f.jsonl"]


def test_a_sweep_out_of_time_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--fuzz", "99", "--op", "rms_norm", "--device", "cpu", "--minutes", "0"]) == 1
    assert "stopped before its end" in capsys.readouterr().out


def test_a_failure_prints_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = OPS["rms_norm"].function

    @functools.wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs) * 1.5

    monkeypatch.setitem(OPS, "rms_norm", dataclasses.replace(OPS["rms_norm"], function=wrong))
    monkeypatch.setattr(sweep, "_CPU", dataclasses.replace(SMALL, large=2**18))
    sweeps = ["--per-cell", "0", "--large-every", "2", "--seed", "-3", "--op", "rms_norm", "--backend", "reference"]
    assert main(["parity", "--fuzz", "20", *sweeps, "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    shown = re.findall(r"fusedops (parity --case (\S+) --device cpu)\n  (.*)", out)
    names = [name for _, name, _ in shown]
    large = [name for name in names if name.endswith("/-3/1/large")]
    assert names[0].endswith("/-3/0")
    for command, name, problem in [shown[0], shown[names.index(large[0])]]:
        assert main(command.split()) == 1
        assert f"{name}: {problem}" in capsys.readouterr().out
    assert main(["parity", "--case", "rms_norm/reference/fp32-fp32/0", "--device", "cpu"]) == 2
