"""Parameters that share memory, which no optimizer takes: the update of one would meet the other's."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor

from ..backends.memory import memory_layout
from .checks import is_frozen, is_plain

_Place = tuple[int, int, Tensor, bool]  # a parameter's first byte, its number, itself, and whether it has no gaps
Places = dict[torch.device, list[_Place]]  # in the order of their starts
_Step = tuple[int, int, int]  # a stride, and how many elements lie along it in either tensor
_ADDRESSED = ("cpu", "cuda")  # elsewhere a pointer need not be a place in memory
_order = itemgetter(0, 1)


def check_overlaps(owner: str, params: Iterable[Tensor]) -> Places:
    """Raise ValueError where two parameters, or two elements of one, share memory: an update would meet another.

    Views side by side in one buffer share nothing, nor do those with gaps that interleave, as columns of one matrix do.
    In the order of their starts each parameter is compared with the next: one without gaps by where it ends, two of the
    same strides element by element. Of other pairs with gaps nothing is certain, and nothing is said. Frozen parameters
    without a gradient are not written, hence may lie anywhere.

    Returns:
        Where the parameters lie, for ``check_added``.
    """
    places: Places = {}
    for device, place in _places(owner, params, 0):
        places.setdefault(device, []).append(place)
    for here in places.values():
        here.sort(key=_order)
        if _shared(here) and (pair := _shared([place for place in here if place[2].untyped_storage().nbytes()])):
            raise ValueError(
                f"{owner}: params: parameter {pair[1]}: expected memory of its own, got memory of parameter {pair[0]}"
            )
    return places


def check_added(owner: str, params: Sequence[Tensor], added: Iterable[Tensor], places: Places | None) -> Places:
    """Check parameters that are to join others, as ``check_overlaps`` does all: each between its neighbours only.

    Args:
        owner: name of the optimizer, for the message.
        params: those that are there.
        added: those to join them.
        places: where ``params`` lay when this was asked last, which now holds ``added`` too; None: not known.

    Returns:
        Where all lie.
    """
    added = list(added)
    if places is None:
        return check_overlaps(owner, (*params, *added))
    for device, place in _places(owner, added, len(params)):
        here = places.setdefault(device, [])
        at = bisect(here, _order(place), key=_order)
        if _shared([*here[max(0, at - 1) : at], place, *here[at : at + 1]]):
            return check_overlaps(owner, (*params, *added))  # or one of them has moved since, or was freed
        insort(here, place, key=_order)
    return places


def _places(owner: str, params: Iterable[Tensor], first: int) -> Iterator[tuple[torch.device, _Place]]:
    """Yield device and place of every parameter that may be written, the first one's number being ``first``."""
    for i, p in enumerate(params, first):
        if not is_plain(p) or p.layout is not torch.strided or not p.numel():
            continue
        device = p.device
        if device.type not in _ADDRESSED or (is_frozen(p) and p.grad is None):
            continue
        dense = p.is_contiguous()
        if not dense:
            dense = memory_layout(p) == p.stride()
            if not dense and _meets_itself(p):
                raise ValueError(
                    f"{owner}: params: parameter {i}: expected memory for every element, got strides {p.stride()}"
                )
        yield device, (p.data_ptr(), i, p, dense)


def _shared(places: list[_Place]) -> tuple[int, int] | None:
    """Return the numbers of two parameters that share memory, if any do; of one that is listed twice torch tells."""
    for (begin, first, p, dense), (start, second, q, _) in pairwise(places):
        if p is not q and (start < begin + p.numel() * p.element_size() if dense else _interlock(p, q)):
            return first, second
    return None


def _meets_itself(p: Tensor) -> bool:
    """Tell whether two elements of a tensor share memory: some way along one axis leads back along the shorter ones."""
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        return True
    steps = _longest_first(p, p)
    return any(
        _reaches(steps[axis + 1 :], stride * k)
        for axis, (stride, size, _) in enumerate(steps)
        for k in range(1, min(size - 1, _extent(steps[axis + 1 :]) // stride) + 1)
    )


def _interlock(p: Tensor, q: Tensor) -> bool:
    """Tell whether tensors share an element for certain, as two slices of a matrix that have a column in common.

    Such an element has an index in each, and the strides times what these differ by are the distance of the starts.
    """
    distance, rest = divmod(q.data_ptr() - p.data_ptr(), p.element_size())
    if not distance:
        return True
    if rest or p.element_size() != q.element_size() or p.stride() != q.stride():
        return False
    return _reaches(_longest_first(p, q), distance)


def _longest_first(p: Tensor, q: Tensor) -> list[_Step]:
    return sorted((step for step in zip(p.stride(), p.shape, q.shape, strict=True) if step[0]), reverse=True)


def _extent(steps: Sequence[_Step]) -> int:
    return sum(stride * (size - 1) for stride, size, _ in steps)


def _reaches(steps: Sequence[_Step], distance: int) -> bool:
    """Tell whether an element of one tensor and one of another, of these strides, are ``distance`` elements apart."""
    if not steps:
        return distance == 0
    (stride, mine, others), rest = steps[0], steps[1:]
    ahead, behind = _extent(rest), sum(stride * (size - 1) for stride, _, size in rest)
    fewest, most = max(1 - others, -((ahead - distance) // stride)), min(mine - 1, (distance + behind) // stride)
    return any(_reaches(rest, distance - stride * k) for k in range(fewest, most + 1))
