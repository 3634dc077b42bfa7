"""Is a kernel right? Every op and backend is held to the same plain-PyTorch truth in float64.

    outcome = check(OPS["layer_norm"], case, backend="native", device="cuda")
    assert outcome.passed, str(outcome)

An element passes if ``|got - t| <= 1 ulp(t) + 4·u·sqrt(log2 N)·cond``: one rounding of the result, and the error of
fp32 arithmetic (u = 2^-24) on a sum of N terms whose sizes add up to ``cond``, which the op's record derives from the
truth. In fp64 (u = 2^-53) the truth has as large an error as what it judges, so twice that arithmetic is allowed there.
The bound is elementwise: a bound on the largest error passes a gradient that is all zero.
Errors in ULPs, ours and PyTorch's own in the same dtype, are reported and never judged.
"""

from .bound import Comparison, compare, first_infinite, ulp
from .parity import (
    EXTRA_ULPS,
    UNTESTABLE,
    Outcome,
    Truth,
    Untestable,
    check,
    describe,
    judge,
    poisoned,
    refused,
    run,
    same_random_numbers,
    truth,
    untestable,
)
from .samples import Noise, lay_out, make_grad, make_sample, normal, outputs_of, shape_of

__all__ = [
    "EXTRA_ULPS",
    "UNTESTABLE",
    "Comparison",
    "Noise",
    "Outcome",
    "Truth",
    "Untestable",
    "check",
    "compare",
    "describe",
    "first_infinite",
    "judge",
    "lay_out",
    "make_grad",
    "make_sample",
    "normal",
    "outputs_of",
    "poisoned",
    "refused",
    "run",
    "same_random_numbers",
    "shape_of",
    "truth",
    "ulp",
    "untestable",
]
