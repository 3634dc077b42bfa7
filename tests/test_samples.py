"""The samples that tests are made of: layouts and values are what they say, and uninitialised memory is NaN."""

from __future__ import annotations

import pytest
import torch
from op_helpers import small_case
from torch import Tensor

from fusedops import testing
from fusedops.registry import LAYOUTS, OPS, OpSpec

LAYER_NORM = OPS["layer_norm"]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_layouts_are_what_they_say() -> None:
    def made(layout: str) -> tuple[dict[str, Tensor], Tensor]:
        case = small_case(LAYER_NORM, BF16, shape=(6, 16), layout=layout)
        sample = testing.make_sample(LAYER_NORM, case)
        return sample.kwargs, testing.make_grad(case, sample.kwargs["input"].detach())

    kwargs, grad = made("rows_strided")
    assert kwargs["input"].stride() == (24, 1)
    kwargs, grad = made("transposed")
    assert kwargs["input"].stride() == (1, 6)
    kwargs, grad = made("misaligned")
    assert {t.storage_offset() for t in (*(kwargs[name] for name in LAYER_NORM.grads), grad)} == {1}
    kwargs, grad = made("expanded_grad")
    assert grad.stride() == (0, 0)
    kwargs, grad = made("strided_grad")
    assert grad.stride() == (21, 1)
    numbers = [made(layout)[0]["input"] for layout in LAYOUTS]
    assert all(torch.equal(numbers[0], other) for other in numbers[1:])


def test_values_are_what_they_say() -> None:
    def made(values: str, dtype: torch.dtype = F32) -> Tensor:
        sample = testing.make_sample(LAYER_NORM, small_case(LAYER_NORM, dtype, shape=(6, 512), values=values))
        return sample.kwargs["input"].detach()

    assert ((made("large_mean") - 1e4).abs() < 10).all()
    assert made("large_mean", BF16).unique().numel() > 10
    assert made("tiny_spread", F16).std() < 0.1
    assert (made("constant_rows").std(-1) == 0).all()
    assert made("huge").abs().max() > 1e30
    assert made("huge", F16).isfinite().all()
    assert made("huge", F16).abs().max() == 6e4
    assert (made("subnormal") != 0).any()
    assert (made("subnormal").abs() < torch.finfo(F32).tiny).float().mean() > 0.9
    assert (~made("inf_nan_rows").isfinite().all(-1)).tolist() == [True] * 3 + [False] * 3


def test_seeds() -> None:
    case = small_case(LAYER_NORM, F32, shape=(6, 16))
    first, again, other = (testing.make_sample(LAYER_NORM, case, seed=seed).kwargs["input"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("spec", OPS.values(), ids=OPS)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_case_ids_are_unique_and_quick_is_part_of_full(spec: OpSpec, level: str) -> None:
    ids = [case.id for case in spec.cases(level)]
    assert len(set(ids)) == len(ids)
    assert set(ids) >= {case.id for case in spec.cases("quick")}


@pytest.mark.usefixtures("poison")
def test_poison_fills_uninitialised_memory() -> None:
    assert torch.empty(100).isnan().all()
