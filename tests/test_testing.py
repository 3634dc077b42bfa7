"""The harness itself: what is wrong must fail, what is sound must pass, and a ULP is a ULP."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops import testing
from fusedops.registry import OPS, VALUES, Case, Memory

LAYER_NORM = OPS["layer_norm"]
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAMES = ("input", "weight", "bias")


def a_case(shape: tuple[int, ...], dtype: torch.dtype, **more: object) -> Case:
    return Case(shape, 1, dict.fromkeys(NAMES, dtype), **more)


def outcome_of(
    case: Case, damage: Callable[[dict[str, Tensor]], None], function: Callable[..., Tensor] = LAYER_NORM.reference
) -> testing.Outcome:
    """Judge a function's results after some damage was done to them."""
    sample = testing.make_sample(LAYER_NORM, case)
    grad = testing.make_grad(case, LAYER_NORM.reference(**sample.kwargs))
    results = testing.run(function, sample, lambda output: grad)
    damage(results)
    return testing.judge(LAYER_NORM, case, sample, grad, results, backend="planted")


def two_pass(
    input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over one dimension, as the formula has it."""
    centred = input - input.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias


def red(outcome: testing.Outcome) -> set[str]:
    return {comparison.name for comparison in outcome.comparisons if not comparison.passed}


# ---------------------------------------------------------------- planted faults


def test_zero_dweight_over_many_rows_fails() -> None:
    outcome = outcome_of(a_case((65536, 8), BF16), lambda results: results["weight"].zero_())
    assert red(outcome) == {"weight"}


@pytest.mark.parametrize("name", ["output", *NAMES])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_all_but_the_largest_zeroed_fails(name: str, dtype: torch.dtype) -> None:
    def keep_largest(results: dict[str, Tensor]) -> None:
        flat = results[name].view(-1)
        largest = flat.abs().argmax()
        value = flat[largest].clone()
        flat.zero_()[largest] = value

    assert red(outcome_of(a_case((64, 256), dtype), keep_largest)) == {name}


def test_an_override_allows_what_its_reason_says_and_no_more() -> None:
    """PyTorch adds up the rows of a bias one after another on a CPU: equal ones drift, each to the same side."""
    case = a_case((23020, 8), F32, memory={"grad": Memory(expand=True)})
    sample = testing.make_sample(LAYER_NORM, case)
    grad = testing.make_grad(case, sample.kwargs["input"])
    results = testing.run(LAYER_NORM.reference, sample, lambda output: grad)

    def judged(backend: str) -> set[str]:
        return red(testing.judge(LAYER_NORM, case, sample, grad, results, backend=backend))

    assert judged("reference") == set()
    results["bias"] *= 0.99
    assert judged("reference") == {"bias"}
    results["bias"].zero_()
    assert judged("reference") == {"bias"}


def test_an_override_of_plain_pytorchs_dx() -> None:
    case = a_case((100_000, 4), F32, values="tiny_spread", options={"eps": 3e-9})
    sample = testing.make_sample(LAYER_NORM, case)
    grad = testing.make_grad(case, sample.kwargs["input"].detach())
    results = testing.run(LAYER_NORM.reference, sample, lambda output: grad)
    judged = partial(testing.judge, LAYER_NORM, case, sample, grad, results)
    assert red(judged(backend="planted")) == {"input"}
    assert red(judged(backend="reference")) == set()
    results["input"] *= 1.01
    assert red(judged(backend="reference")) == {"input"}


@pytest.mark.parametrize("name", ["output", "input"])
def test_one_row_swapped_fails(name: str) -> None:
    def swap(results: dict[str, Tensor]) -> None:
        results[name][[3, 4]] = results[name][[4, 3]]

    assert red(outcome_of(a_case((64, 256), BF16), swap)) == {name}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bf16_statistics_fail(dtype: torch.dtype) -> None:
    def layer_norm(
        input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float = 1e-5
    ) -> Tensor:
        x = input.float()
        mean = x.mean(-1, keepdim=True).bfloat16().float()
        rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt().bfloat16().float()
        return ((x - mean) * rstd * weight.float() + bias.float()).to(input.dtype)

    assert "output" in red(outcome_of(a_case((64, 768), dtype), lambda results: None, layer_norm))


@pytest.mark.parametrize("name", ["output", *NAMES])
def test_dropped_tail_fails(name: str) -> None:
    """The last columns, those after the last whole block, are left as they were: zero."""
    assert red(outcome_of(a_case((33, 136), BF16), lambda results: results[name][..., 128:].zero_())) == {name}


def test_dropped_tail_of_rows_in_dweight_fails() -> None:
    case = a_case((65, 64), F32)
    sample = testing.make_sample(LAYER_NORM, case)

    def without_last_row(results: dict[str, Tensor]) -> None:
        xhat = F.layer_norm(sample.kwargs["input"].detach()[-1], (64,))
        grad = testing.make_grad(case, results["output"])
        results["weight"] -= grad[-1] * xhat

    assert red(outcome_of(case, without_last_row)) == {"weight"}


@pytest.mark.parametrize("scale", [1.001, 1 + 1e-5])
def test_small_relative_error_fails_in_fp32(scale: float) -> None:
    outcome = outcome_of(a_case((64, 256), F32), lambda results: [r.mul_(scale) for r in results.values()])
    assert red(outcome) == {"output", *NAMES}


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [1e-5, 1.0])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_projection_left_out_of_dx_fails_in_rows_of_one_column(op: str, eps: float, dtype: torch.dtype) -> None:
    """What is taken off dy there is nearly all of it."""
    spec = OPS[op]
    case = Case((40, 1), 1, dict.fromkeys(spec.grads, dtype), options={"eps": eps})
    sample = testing.make_sample(spec, case)
    grad = testing.make_grad(case, spec.reference(**sample.kwargs))
    results = testing.run(spec.reference, sample, lambda output: grad)
    assert testing.judge(spec, case, sample, grad, results).passed
    x, w = (sample.kwargs[name].detach().float() for name in ("input", "weight"))
    rstd = (eps + (x.square() if op == "rms_norm" else 0.0 * x)).rsqrt()
    results["input"] = (grad.float() * w * rstd).to(dtype)
    assert red(testing.judge(spec, case, sample, grad, results)) == {"input"}


def test_unwritten_element_fails() -> None:
    assert red(outcome_of(a_case((5, 7), F32), lambda results: results["output"][2, 3].fill_(math.nan))) == {"output"}


def test_wrong_dtype_and_shape_fail() -> None:
    def spoil(results: dict[str, Tensor]) -> None:
        results["output"] = results["output"].float()
        results["weight"] = results["weight"][:-1]

    outcome = outcome_of(a_case((5, 7), BF16), spoil)
    assert red(outcome) == {"output", "weight"}
    assert "expected torch.bfloat16 (5, 7), got torch.float32 (5, 7)" in str(outcome)


def test_a_finite_result_where_the_truth_is_nan_fails() -> None:
    case = a_case((6, 64), F32, values="inf_nan_rows")
    assert outcome_of(case, lambda results: None).passed
    assert red(outcome_of(case, lambda results: results["output"].nan_to_num_())) == {"output"}


RMS_NORM = OPS["rms_norm"]


def rms_outcome_of(case: Case, damage: Callable[[dict[str, Tensor]], None]) -> testing.Outcome:
    sample = testing.make_sample(RMS_NORM, case)
    grad = testing.make_grad(case, RMS_NORM.reference(**sample.kwargs))
    results = testing.run(RMS_NORM.reference, sample, lambda output: grad)
    damage(results)
    return testing.judge(RMS_NORM, case, sample, grad, results, backend="planted")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["output", *NAMES])
def test_what_rows_of_equal_numbers_leave_open_is_a_size(name: str, bad: float) -> None:
    """Their variance is lost, but not their eps: x̂ is at most what the mean was off by, over its root."""
    case = a_case((6, 64), F32, values="constant_rows", options={"eps": 1e-18})
    assert outcome_of(case, lambda results: None).passed
    assert red(outcome_of(case, lambda results: results[name].view(-1)[3].fill_(bad))) == {name}


@pytest.mark.parametrize("name", ["output", "input", "weight"])
def test_nan_of_squares_that_add_up_to_inf_fails(name: str) -> None:
    """Those of 1e30 do: rstd is 0 there, which no bound knows of, so that any number passes, but a number it is."""

    def last_row(results: dict[str, Tensor], value: float) -> None:
        results[name].view(-1, 64)[-1, 5].fill_(value)

    rms, centred = Case((6, 64), 1, {"input": F32, "weight": F32}, values="huge"), a_case((6, 64), F32, values="huge")
    assert rms_outcome_of(rms, lambda results: None).passed
    assert red(rms_outcome_of(rms, lambda results: last_row(results, math.nan))) == {name}
    assert outcome_of(centred, lambda results: last_row(results, 7.0), two_pass).passed
    assert red(outcome_of(centred, lambda results: last_row(results, math.nan), two_pass)) == {name}


def test_zeros_for_rows_far_from_zero_fail() -> None:
    """Their squares add up to more than fp32 holds, but not once they are centred."""
    case = a_case((6, 64), F32)
    sample = testing.make_sample(LAYER_NORM, case)
    sample.kwargs["input"] = (1e20 + 1e17 * sample.kwargs["input"].detach()).requires_grad_()
    grad = testing.make_grad(case, sample.kwargs["input"].detach())
    exact = testing.truth(LAYER_NORM, sample, grad, {}, "").values
    right = {name: value.float() for name, value in exact.items()}
    assert testing.judge(LAYER_NORM, case, sample, grad, right).passed
    for name in ("output", "input", "weight"):
        wrong = {**right, name: torch.zeros_like(right[name])}
        assert red(testing.judge(LAYER_NORM, case, sample, grad, wrong)) == {name}


def test_numbers_that_say_nothing_are_those_of_an_op_a_backend_and_a_dtype() -> None:
    def why(op: str, backend: str, input: torch.dtype, weight: torch.dtype = F32, device: str = "cpu") -> str | None:
        return testing.untestable(OPS[op], {"input": input, "weight": weight}, None, {}, "huge", backend, device)

    assert "LayerNorm makes NaN" in str(why("layer_norm", "reference", F32))
    assert why("rms_norm", "reference", F32) is why("layer_norm", "reference", F32, device="cuda") is None
    assert why("rms_norm", "reference", BF16) is why("layer_norm", "native", F32) is None
    assert why("layer_norm", "reference", F16) is None  # its 6e4 are not huge
    streams = {"input": F16, "residual": F32}
    assert testing.untestable(OPS["add_layer_norm"], streams, None, {}, "huge", "reference", "cpu")
    streams, stored = {"input": F32, "residual": F32}, {"residual_dtype": BF16}
    assert testing.untestable(OPS["add_rms_norm"], streams, None, stored, "subnormal", "triton", "cpu")
    assert testing.untestable(OPS["rms_norm"], {"input": F32}, BF16, {}, "subnormal", "triton", "cpu")
    case = a_case((6, 7), F32, values="huge")
    assert "LayerNorm makes NaN" in str(testing.refused(LAYER_NORM, case, "reference"))


def test_a_row_without_bound_leaves_others_and_dbias_judged() -> None:
    def spoil(results: dict[str, Tensor]) -> None:
        results["bias"][3] = math.nan
        results["output"][0, 3] *= 1.001  # 1e12: its squares fit

    assert red(outcome_of(a_case((2, 64), F32, values="huge"), spoil, two_pass)) == {"output", "bias"}
    equal = a_case((6, 64), F32, values="constant_rows", options={"eps": 0.0})
    for anything in (0.0, math.inf, math.nan):  # rstd is inf
        assert outcome_of(equal, lambda results, value=anything: results["output"].fill_(value)).passed
    assert red(outcome_of(equal, lambda results: results["bias"].zero_())) == {"bias"}


def test_where_there_is_no_bound_pytorchs_number_is_none() -> None:
    """Of rows whose spread is lost beside an eps of 0, PyTorch's rstd is as good as an inf."""
    want, condition = torch.tensor([-0.116], dtype=F64), torch.tensor([math.inf], dtype=F64)
    for got in (math.inf, math.nan, 3.0):
        assert testing.compare(torch.tensor([got]), want, condition, 64, baseline=torch.tensor([-0.116])).passed


@pytest.mark.parametrize(("units", "passes"), [(6, True), (7, False)])
def test_in_fp64_the_truth_errs_as_well(units: int, passes: bool) -> None:
    """1 ULP, and of four terms 4·√2·2^-53 for each of both: 6.7 ULP."""
    one, got = torch.ones(1, dtype=F64), torch.full((1,), 1 + units * 2.0**-52, dtype=F64)
    assert testing.compare(got, one, one, 4, wide=True).passed is passes


@pytest.mark.parametrize(("units", "passes"), [(29, True), (30, False)])
def test_two_terms_are_rounded_as_often_as_four(units: int, passes: bool) -> None:
    one, got = torch.ones(1, dtype=F64), torch.tensor([1 + units * 2.0**-23])
    assert testing.compare(got, one, 10 * one, 2).passed is testing.compare(got, one, 10 * one, 4).passed is passes


def test_message_names_everything() -> None:
    message = str(outcome_of(a_case((5, 7), F32), lambda results: results["input"][2, 3].add_(1.0)))
    for part in ("layer_norm on planted (cpu)", "5x7-fp32", "seed 0", "input[2, 3]: got", "want", "±", "of the bound"):
        assert part in message


# ---------------------------------------------------------------- what is sound


@pytest.mark.parametrize("values", [v for v in VALUES if v != "huge"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_pytorch_itself_passes(dtype: torch.dtype, values: str) -> None:
    """All of it in fp32; in 16 bits the output, for PyTorch's CPU kernel rounds within its gradients."""

    def layer_norm(input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(input, normalized_shape, weight, bias)

    outcome = outcome_of(a_case((40, 1000), dtype, values=values), lambda results: None, layer_norm)
    assert red(outcome) <= (set() if dtype is F32 else set(NAMES)), str(outcome)


def test_two_pass_kernel_passes() -> None:
    for values in ("normal", "large_mean", "constant_rows", "tiny_spread"):
        outcome = outcome_of(a_case((40, 1000), F32, values=values), lambda results: None, two_pass)
        assert outcome.passed, str(outcome)


def test_naive_variance_fails_on_a_large_mean() -> None:
    """E[x²] − E[x]² cancels."""

    def layer_norm(input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor) -> Tensor:
        mean = input.mean(-1, keepdim=True)
        variance = (input.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        return (input - mean) * (variance + 1e-5).rsqrt() * weight + bias

    case = a_case((40, 1000), F32, values="large_mean")
    assert "output" in red(outcome_of(case, lambda results: None, layer_norm))


# ---------------------------------------------------------------- ULPs


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = torch.tensor(
        [1.0, 1.5, 2.0, 3.0, 4.0, 0.5, info.smallest_normal, info.smallest_normal / 2, 0.0, 1e-3, 100.0], dtype=dtype
    )
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    after = (values.view(bits) + 1).view(dtype)
    assert torch.equal(testing.ulp(values, dtype), after.double() - values.double())
    assert torch.equal(testing.ulp(-values, dtype), testing.ulp(values, dtype))


def test_ulp_just_below_a_power_of_two_is_half_of_that_at_it() -> None:
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
    assert 2 * testing.ulp(below, F32) == testing.ulp(torch.tensor(2.0), F32) == 2.0**-22


def test_ulp_beyond_the_largest_number_is_that_of_the_largest() -> None:
    for dtype in (F16, BF16, F32):
        largest = torch.tensor(torch.finfo(dtype).max, dtype=F64)
        assert testing.ulp(torch.tensor(math.inf), dtype) == testing.ulp(largest, dtype)
        assert testing.ulp(largest * 10, dtype) == testing.ulp(largest, dtype)


@pytest.mark.parametrize(
    ("got", "want", "passes"),
    [
        (math.inf, 65520.0, True),  # halfway to 2^16: rounds to inf
        (math.inf, 7e4, True),
        (math.inf, 6e4, False),
        (-math.inf, 7e4, False),
        (65504.0, 65520.0, True),  # within 1 ULP (32)
        (65504.0, 7e4, False),
        (math.nan, 7e4, False),
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
        (math.inf, math.nan, False),
        (65504.0, math.inf, False),
    ],
)
def test_overflow_of_the_result(got: float, want: float, passes: bool) -> None:
    comparison = testing.compare(
        torch.tensor([got], dtype=F16), torch.tensor([want], dtype=F64), torch.zeros(1, dtype=F64), 1
    )
    assert comparison.passed is passes, str(comparison)


@pytest.mark.parametrize(("size", "passes"), [(1e12, True), (1e10, False)])
def test_an_inf_of_either_sign_is_the_first_that_rounds_to_it(size: float, passes: bool) -> None:
    """What cancels to 0 may be off by more than fp16 holds, to any side."""
    zero, condition = torch.zeros(2, dtype=F64), torch.full((2,), size, dtype=F64)
    assert testing.compare(torch.tensor([-math.inf, math.inf], dtype=F16), zero, condition, 2).passed is passes


def test_zero_truth_allows_one_subnormal() -> None:
    zero = torch.zeros(1, dtype=F64)
    assert testing.compare(torch.tensor([2.0**-149]), zero, zero, 1).passed
    assert not testing.compare(torch.tensor([2.0**-148]), zero, zero, 1).passed
