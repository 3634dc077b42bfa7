"""A tensor against the truth, element by element: each within its bound, or the worst of them named."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of ``dtype`` at each value, in float64.

    It is 2^e·eps for 2^e <= |value| < 2^(e+1), the smallest subnormal at and around zero, and that of the largest
    finite number beyond it.
    """
    info = torch.finfo(dtype)
    size = value.detach().double().abs().nan_to_num(info.max, info.max).clamp(info.smallest_normal, info.max)
    exponent = torch.frexp(size)[1].to(torch.int64) - 1
    power: Tensor = (exponent + 1023 << 52).view(torch.float64)
    return power * info.eps


@dataclass(frozen=True)
class Comparison:
    """One tensor against the truth, at the element that uses most of its bound.

    Attributes:
        name: ``"output"`` or the argument whose gradient it is.
        ratio: worst error over bound; at most 1 passes.
        index, got, want, bound: that element.
        ulps: largest error in ULPs of the tensor's dtype, at the size of the element or of 1/16 of what was added up to
            make it, so that a sum that cancels to nearly nothing does not drown the others.
        torch_ulps: the same for PyTorch's own result; NaN if it was not given.
        problem: why the tensor could not be compared at all, or None.
    """

    name: str
    ratio: float
    index: tuple[int, ...] = ()
    got: float = math.nan
    want: float = math.nan
    bound: float = math.nan
    ulps: float = math.nan
    torch_ulps: float = math.nan
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every element is within its bound."""
        return self.problem is None and self.ratio <= 1.0

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        where = f"[{', '.join(map(str, self.index))}]"
        return (
            f"{self.name}{where}: got {self.got:.9g}, want {self.want:.9g} ± {self.bound:.3g}, "
            f"{self.ratio:.3g} of the bound; worst {self.ulps:.3g} ULP, PyTorch's own {self.torch_ulps:.3g}"
        )


def compare(
    got: Tensor,
    want: Tensor,
    condition: Tensor,
    terms: int,
    *,
    name: str = "output",
    baseline: Tensor | None = None,
    dtype: torch.dtype | None = None,
    wide: bool = False,
    extra_ulps: float = 0.0,
    factor: float = 1.0,
) -> Comparison:
    """Judge a tensor elementwise.

    Args:
        got: the tensor, in its own dtype.
        want: the float64 truth.
        condition: size of what was added up to make each element. NaN: only inf and NaN are judged there; inf: there
            is no bound, and nothing is judged.
        terms: length N of the sum, counted as 4 where it is less.
        name: what to call it in messages.
        baseline: PyTorch's own result, whose ULPs are reported.
        dtype: what ``got`` has to have; None: the baseline's, or any.
        wide: arithmetic was fp64, as the truth's was.
        extra_ulps: further ULPs allowed; see ``EXTRA_ULPS``.
        factor: on what arithmetic may lose; see ``OpSpec.tolerance_overrides``.

    Returns:
        The worst element.

    inf and NaN must stand where the truth has them. A result may be inf where the truth is finite if the truth is
    within the bound of the first number that rounds to inf.
    """
    measured = measure(
        got, want, condition, terms, name, baseline, dtype, wide=wide, extra_ulps=extra_ulps, factor=factor
    )
    return read_back([measured])[0]


@dataclass(frozen=True)
class Measured:
    """A comparison whose numbers are still on the device."""

    name: str
    shape: torch.Size
    numbers: Tensor | None  # [7]; None: there is nothing to compare
    problem: str | None = None


def measure(
    got: Tensor, want: Tensor, condition: Tensor, terms: int, name: str, baseline: Tensor | None,
    dtype: torch.dtype | None, *, wide: bool, extra_ulps: float, factor: float,
) -> Measured:  # fmt: skip
    """Compare as ``compare`` does, and leave the numbers on the device for ``read_back``."""
    dtype = dtype or (got.dtype if baseline is None else baseline.dtype)
    if got.shape != want.shape or got.dtype != dtype:
        problem = f"expected {dtype} {tuple(want.shape)}, got {got.dtype} {tuple(got.shape)}"
        return Measured(name, want.shape, None, problem)
    if want.numel() == 0:
        return Measured(name, want.shape, None)
    got, want = got.detach().to(want.device).double(), want.detach()
    base = None if baseline is None else baseline.detach().to(want.device).double()
    spacing = ulp(want, dtype)
    units = 2 * 2.0**-53 if wide else 2.0**-24
    condition = condition.detach().expand(want.shape)
    boundless = condition.isinf()
    condition = condition.nan_to_num(math.inf, math.inf)
    # Of two terms as of four: RMSNorm's dx alone is rounded in x·rstd, dy·w, their product, the sum, the slope, its
    # product with x̂, the difference and that times rstd, which is itself off by some 3 units: 1.02 times 4 units once
    # in 10^8 elements.
    bound = (1.0 + extra_ulps) * spacing + factor * 4 * units * math.sqrt(math.log2(max(terms, 4))) * condition
    error = torch.where(boundless, 0.0, _error(got, want, dtype))
    share = torch.where(boundless, 0.0, error / bound).nan_to_num(math.inf, math.inf)
    worst = share.argmax()
    ulps = [want.new_tensor(math.nan)] * 2
    if base is not None:
        shown = ulp(torch.maximum(want.abs(), condition / 16), dtype)
        ulps = [(error / shown).max(), (torch.where(boundless, 0.0, _error(base, want, dtype)) / shown).max()]
    at = [t.flatten()[worst] for t in (share, got, want, bound)]
    return Measured(name, want.shape, torch.stack([*at, *ulps, worst.double()]))


def read_back(measured: Sequence[Measured]) -> list[Comparison]:
    """Read the numbers of all at once: on a GPU each read is a wait."""
    numbers = [one.numbers for one in measured if one.numbers is not None]
    read = iter(torch.stack(numbers).tolist() if numbers else ())
    found = []
    for one in measured:
        if one.problem is not None:
            found.append(Comparison(one.name, math.inf, problem=one.problem))
        elif one.numbers is None:
            found.append(Comparison(one.name, 0.0, ulps=0.0, torch_ulps=0.0))
        else:
            *values, place = next(read)
            keys = ("ratio", "got", "want", "bound", "ulps", "torch_ulps")
            found.append(
                Comparison(one.name, index=_unravel(int(place), one.shape), **dict(zip(keys, values, strict=True)))
            )
    return found


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element from its place in a flat tensor."""
    index = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.append(at)
    return tuple(reversed(index))


@functools.cache
def first_infinite(dtype: torch.dtype) -> float:
    """Return the first number that rounds to inf, half a spacing beyond the largest finite one."""
    largest = torch.finfo(dtype).max
    return largest + float(ulp(torch.tensor(largest, dtype=torch.float64, device="cpu"), dtype)) / 2


def _error(got: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |got − want|; an inf that stands for an overflow counts as the first number that rounds to it."""
    first = first_infinite(dtype)
    limit = torch.where(got.sign() == want.sign(), want.abs().clamp(min=first), first)
    error = (torch.where(got.isinf() & want.isfinite(), limit.copysign(got), got) - want).abs()
    same = (got == want) | (got.isnan() & want.isnan())
    return torch.where(same, 0.0, error.nan_to_num(math.inf, math.inf))
