"""LayerNorm and RMSNorm on Triton: which kernel of `norm_kernels.py` or `norm_bwd_kernels.py` runs, and how.

Functions take 2-D tensors whose last dimension is contiguous and whose row stride is free. Input, weight, bias and
output may each be fp32, fp16 or bf16.

Numerics: fp32 throughout, one rounding to the output's dtype; means and sums of squares about them are taken lane by
lane, in two passes (Welford's way for rows wider than one program), and merged; deterministic.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import norm_bwd_kernels as bwd_kernels
from . import norm_kernels as kernels
from .launch import Launch, ceil_div, device_limits, launch


class RowConfig(NamedTuple):
    """How rows of up to `width` elements are given to programs."""

    width: int
    rows: int  # rows a program works on at once
    warps: int
    stages: int = 1  # groups of rows in flight
    per_sm: int = 1  # persistent programs per multiprocessor


# Narrow rows: one warp a row needs no exchange between warps; wider ones keep 8 to 48 elements a lane in registers.
FORWARD = (
    RowConfig(256, rows=4, warps=1),
    RowConfig(512, rows=2, warps=1),
    RowConfig(768, rows=1, warps=1),
    RowConfig(1536, rows=1, warps=2),
    RowConfig(6144, rows=1, warps=4),
    RowConfig(12288, rows=1, warps=8),
    RowConfig(16384, rows=1, warps=16),
    RowConfig(32768, rows=1, warps=32),
)
# x̂, g, weight and both sums live in registers: 8 to 24 columns a lane. Few warps a multiprocessor, whose sums are few
# as well, suffice: groups of rows on their way to shared memory keep the memory busy.
BACKWARD = (
    RowConfig(512, rows=4, warps=1, stages=4, per_sm=4),
    RowConfig(768, rows=2, warps=1, stages=4, per_sm=4),
    RowConfig(1536, rows=2, warps=2, stages=4, per_sm=2),
    RowConfig(3072, rows=2, warps=4, stages=4, per_sm=1),
    RowConfig(6144, rows=1, warps=8, stages=4, per_sm=1),
    RowConfig(12288, rows=1, warps=16, stages=3, per_sm=1),
)
# Wider rows are walked in blocks of `width`.
FORWARD_WIDE = RowConfig(8192, rows=1, warps=16, stages=2)
BACKWARD_WIDE_MEANS = RowConfig(2048, rows=1, warps=8, stages=3)
BACKWARD_WIDE = RowConfig(1024, rows=2, warps=4, stages=3, per_sm=4)
SUM_PARTIALS = RowConfig(16, rows=256, warps=4)  # most programs' sums in one turn: its loads are all under way at once
# Groups of rows whose dweight and dbias a program adds up one after another. Where all gradients are alike, so are the
# rounding errors: those of n additions come to as much as n/4 units, of 13 and more that a sum of so many rows may be
# off by.
MOST_ADDITIONS = 48


class _Rows(NamedTuple):
    """What every backward kernel takes first, in its order."""

    dy: Tensor
    more_dy: Tensor | None  # of a post-norm call, which has two
    x: Tensor
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class Sum(NamedTuple):
    """What a forward kernel takes last, in its order: the rows to add, where sums and a second y go, and dropout."""

    residual: Tensor | None = None
    sum: Tensor | None = None
    again: Tensor | None = None
    seed: Tensor | None = None
    residual_stride: int = 0
    threshold: int = 0
    keep_scale: float = 0.0


class Summands(NamedTuple):
    """What the backward kernels of an add + norm take last, in their order."""

    dsum: Tensor | None = None
    dinput: Tensor | None = None
    seed: Tensor | None = None
    dsum_stride: int = 0
    threshold: int = 0
    keep_scale: float = 0.0


class RowTiles(NamedTuple):
    """A row as one or two power-of-two tiles; `masked` when the last of them overruns the row."""

    main: int
    tail: int
    masked: bool
    lanes: int  # threads that share a row
    vec: int  # columns that each loads at a time


@functools.cache
def row_tiles(hidden: int, warps: int, itemsize: int) -> RowTiles:
    """Cover `hidden` columns with one tile, or with two where that saves lanes.

    Args:
        hidden: columns.
        warps: of a program.
        itemsize: bytes of an element, the smallest of all that are read or written.
    """
    padded = triton.next_power_of_2(hidden)
    lanes, vec = _lanes(hidden, padded, warps, itemsize)
    main = padded // 2
    tail = max(triton.next_power_of_2(hidden - main), lanes * vec)
    if padded == hidden or tail >= main:
        return RowTiles(padded, 0, padded != hidden, lanes, vec)
    return RowTiles(main, tail, main + tail != hidden, lanes, vec)


def _lanes(hidden: int, width: int, warps: int, itemsize: int) -> tuple[int, int]:
    """Return how many threads Triton gives a row of a tile, and how many columns each loads at a time."""
    vec = min(16 // itemsize if hidden % 16 == 0 else 1, width)  # rows may begin anywhere where 16 does not divide
    return min(32 * warps, width // vec), vec


@functools.cache
def row_config(configs: tuple[RowConfig, ...], hidden: int) -> RowConfig | None:
    """Pick the first config wide enough for a row, None when none is: the row must be walked."""
    return next((config for config in configs if hidden <= config.width), None)


def stages_that_fit(config: RowConfig, columns: int, bytes_per_column: int, shared_bytes: int) -> int:
    """Lower `config.stages` to what shared memory holds: every group in flight but the one being worked on."""
    group = config.rows * columns * bytes_per_column
    exchange = 4096  # what the warps use between themselves
    return max(1, min(config.stages, 1 + (shared_bytes // config.per_sm - exchange) // group))


def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each row: y = (x - mean) · rstd · weight + bias.

    Args:
        x (rows, hidden): fp32 | fp16 | bf16, last dimension contiguous.
        weight (hidden): fp32 | fp16 | bf16, or None for ones.
        bias (hidden): fp32 | fp16 | bf16, or None for zeros.
        eps: added to the variance.
        out_dtype: dtype of y.

    Returns:
        y (rows, hidden) contiguous in `out_dtype`, mean (rows,) and rstd (rows,) in fp32.
    """
    if torch.compiler.is_compiling():
        from . import traced

        return traced.layer_norm_fwd(x, weight, bias, eps, out_dtype)
    return _layer_norm_fwd(launch, x, weight, bias, eps, out_dtype)


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    need: tuple[bool, bool, bool],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `layer_norm_fwd`; each is None where `need` (dx, dweight, dbias) says so.

    Args:
        dy (rows, hidden): gradient of y, last dimension contiguous.
        x (rows, hidden): the input of forward.
        weight (hidden): the weight of forward, or None.
        mean (rows,): fp32, from forward.
        rstd (rows,): fp32, from forward.
        need: which of dx, dweight, dbias to compute.
        bias_dtype: dtype of dbias.

    Returns:
        dx in x's dtype, dweight in weight's, dbias in `bias_dtype`.
    """
    if torch.compiler.is_compiling():
        from . import traced

        grads = traced.layer_norm_bwd(dy, x, weight, mean, rstd, list(need), bias_dtype)
        dx, dweight, dbias = (grad if wanted else None for grad, wanted in zip(grads, need, strict=True))
        return dx, dweight, dbias
    return norm_bwd(launch, dy, x, weight, mean, rstd, 0.0, make_dx(x, need[0]), need[1], need[2], bias_dtype)


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale each row: y = x · rstd · (weight + weight_offset), rstd = 1 / sqrt(mean(x²) + eps).

    Args:
        x (rows, hidden): fp32 | fp16 | bf16, last dimension contiguous.
        weight (hidden): fp32 | fp16 | bf16, or None for ones (`weight_offset` then plays no part).
        eps: added to the mean square.
        weight_offset: added to the weight in fp32.
        out_dtype: dtype of y.

    Returns:
        y (rows, hidden) contiguous in `out_dtype` and rstd (rows,) in fp32.
    """
    if torch.compiler.is_compiling():
        from . import traced

        return traced.rms_norm_fwd(x, weight, eps, weight_offset, out_dtype)
    return _rms_norm_fwd(launch, x, weight, eps, weight_offset, out_dtype)


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, need: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `rms_norm_fwd`; each is None where `need` (dx, dweight) says so.

    Args:
        dy (rows, hidden): gradient of y, last dimension contiguous.
        x (rows, hidden): the input of forward.
        weight (hidden): the weight of forward, or None.
        rstd (rows,): fp32, from forward.
        weight_offset: as in forward.
        need: which of dx, dweight to compute.

    Returns:
        dx in x's dtype, dweight in weight's.
    """
    if torch.compiler.is_compiling():
        from . import traced

        grads = traced.rms_norm_bwd(dy, x, weight, rstd, weight_offset, list(need))
        dx, dweight = (grad if wanted else None for grad, wanted in zip(grads, need, strict=True))
        return dx, dweight
    dx = make_dx(x, need[0])
    _, dweight, _ = norm_bwd(launch, dy, x, weight, None, rstd, weight_offset, dx, need[1], False, None)
    return dx, dweight


def make_dx(x: Tensor, wanted: bool) -> Tensor | None:
    """Allocate x's gradient."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted else None


def _layer_norm_fwd(
    run: Launch, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    mean = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    norm_fwd(run, x, weight, bias, y, mean, rstd, eps, 0.0)
    return y, mean, rstd


def _rms_norm_fwd(
    run: Launch, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    rstd = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    norm_fwd(run, x, weight, None, y, None, rstd, eps, weight_offset if weight is not None else 0.0)
    return y, rstd


def norm_fwd(
    run: Launch,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
    weight_offset: float,
    added: Sum = Sum(),  # noqa: B008  # a constant
) -> None:
    """Fill y, mean (LayerNorm only), rstd and, of an add + norm, ``added.sum``."""
    rows, hidden = x.shape[0], int(x.shape[1])  # kernels are chosen by width: a symbolic one is fixed
    if not x.numel():
        return
    args = (x, weight, bias, y, mean, rstd, rows, hidden, x.stride(0), eps, weight_offset, *added)
    config = row_config(FORWARD, hidden)
    if config is None:
        wide = FORWARD_WIDE
        rows_read = (x, added.residual) if added.sum is None else (added.sum,)
        read = [t for t in (*rows_read, weight, bias) if t is not None]
        shared_bytes = device_limits(x.device).shared_bytes
        stages = stages_that_fit(wide, wide.width, sum(t.element_size() for t in read), shared_bytes)
        meta = {"CENTER": mean is not None, "BLOCK": wide.width, "STAGES": stages}
        run(kernels.norm_fwd_wide_kernel, (rows,), x.device, args, meta, wide.warps)
        return
    itemsize = _smallest(x, y, weight, bias, added.residual, added.sum, added.again)
    meta = {"CENTER": mean is not None, "ROWS": config.rows, **_tile_meta(row_tiles(hidden, config.warps, itemsize))}
    run(kernels.norm_fwd_kernel, (ceil_div(rows, config.rows),), x.device, args, meta, config.warps)


def _tile_meta(tiles: RowTiles) -> dict[str, Any]:
    return {"MAIN": tiles.main, "TAIL": tiles.tail, "MASKED": tiles.masked, "LANES": tiles.lanes, "VEC": tiles.vec}


def _rows_side_by_side(config: RowConfig, lanes: int) -> int:
    return min(config.rows, 32 * config.warps // lanes)


def _smallest(*tensors: Tensor | None) -> int:
    """Return the bytes of the smallest element: Triton gives each thread 16 bytes of those, and as many of others."""
    return min(tensor.element_size() for tensor in tensors if tensor is not None)


def norm_bwd(
    run: Launch,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    dx: Tensor | None,
    need_dweight: bool,
    need_dbias: bool,
    bias_dtype: torch.dtype | None,
    summands: Summands = Summands(),  # noqa: B008  # a constant
    more_dy: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Fill dx and, of an add + norm, ``summands.dinput``; return dx, dweight and dbias."""
    rows, hidden = x.shape[0], int(x.shape[1])
    if weight is None:
        weight_offset = 0.0
    make = torch.empty if x.numel() else torch.zeros
    dweight = make(hidden, dtype=weight.dtype, device=x.device) if need_dweight and weight is not None else None
    dbias = make(hidden, dtype=bias_dtype, device=x.device) if need_dbias else None
    if not x.numel():
        return dx, dweight, dbias

    config = row_config(BACKWARD, hidden)
    programs = _bwd_programs(config, rows, hidden, x.device)
    dw_partial, db_partial = (  # flat: of two dimensions tracing would tell one program from several
        torch.empty(programs * hidden, dtype=torch.float32, device=x.device) if wanted else None
        for wanted in (need_dweight, need_dbias)
    )
    tensors = _Rows(dy, more_dy, x, weight, mean, rstd)
    outputs = (dx, dw_partial, db_partial)
    sizes = (rows, hidden, dy.stride(0), 0 if more_dy is None else more_dy.stride(0), x.stride(0), weight_offset)
    if config is not None:
        _bwd_in_registers(run, config, tensors, outputs, sizes, summands, programs)
    else:
        _bwd_in_blocks(run, tensors, outputs, sizes, summands, programs)
    if need_dweight or need_dbias:
        grid = (ceil_div(hidden, SUM_PARTIALS.width), 2 if need_dbias else 1)
        args = (dw_partial, db_partial, dweight, dbias, programs, hidden)
        meta = {"PARTS": SUM_PARTIALS.rows, "BLOCK": SUM_PARTIALS.width}
        run(bwd_kernels.sum_partials_kernel, grid, x.device, args, meta, SUM_PARTIALS.warps)
    return dx, dweight, dbias


def _bwd_programs(config: RowConfig | None, rows: int, hidden: int, device: torch.device) -> int:
    """Persistent programs along the rows: as many rounds of what fills the device as `MOST_ADDITIONS` asks for."""
    columns = 1
    if config is None:
        config = BACKWARD_WIDE
        columns = ceil_div(hidden, config.width)
    at_once = ceil_div(device_limits(device).multiprocessors * config.per_sm, columns)
    groups = ceil_div(rows, config.rows)
    rounds = ceil_div(groups, at_once * MOST_ADDITIONS)
    return torch.sym_min(rounds * at_once, groups)  # min would fix symbolic rows


def _bwd_in_registers(
    run: Launch,
    config: RowConfig,
    tensors: _Rows,
    outputs: tuple[Tensor | None, ...],
    sizes: tuple[Any, ...],
    summands: Summands,
    programs: int,
) -> None:
    dy, more_dy, x, weight, mean, _ = tensors
    staged = (dy, more_dy, x, summands.dsum)
    tiles = row_tiles(int(x.shape[1]), config.warps, _smallest(*staged, weight, outputs[0], summands.dinput))
    bytes_per_column = sum(0 if tensor is None else tensor.element_size() for tensor in staged)
    shared_bytes = device_limits(x.device).shared_bytes
    stages = stages_that_fit(config, tiles.main + tiles.tail, bytes_per_column, shared_bytes)
    meta = {"CENTER": mean is not None, "ROWS": config.rows, **_tile_meta(tiles), "STAGES": stages}
    meta["PARTS"] = _rows_side_by_side(config, tiles.lanes)
    run(bwd_kernels.norm_bwd_kernel, (programs,), x.device, (*tensors, *outputs, *sizes, *summands), meta, config.warps)


def _bwd_in_blocks(
    run: Launch,
    tensors: _Rows,
    outputs: tuple[Tensor | None, ...],
    sizes: tuple[Any, ...],
    summands: Summands,
    programs: int,
) -> None:
    dy, more_dy, x, weight, mean, rstd = tensors
    rows, hidden = x.shape[0], int(x.shape[1])
    center = mean is not None
    means: tuple[Tensor | None, Tensor | None] = (None, None)
    if outputs[0] is not None or summands.dinput is not None:
        means = (torch.empty_like(rstd) if center else None, torch.empty_like(rstd))
        config = BACKWARD_WIDE_MEANS
        bytes_per_column = sum(0 if tensor is None else tensor.element_size() for tensor in (dy, more_dy, x, weight))
        shared_bytes = device_limits(x.device).shared_bytes
        stages = stages_that_fit(config, config.width, bytes_per_column, shared_bytes)
        meta = {"CENTER": center, "BLOCK": config.width, "STAGES": stages}
        run(bwd_kernels.norm_bwd_wide_means_kernel, (rows,), x.device, (*tensors, *means, *sizes), meta, config.warps)
    config = BACKWARD_WIDE
    rows_moved = (dy, more_dy, x, outputs[0], summands.dsum, summands.dinput)
    lanes, vec = _lanes(hidden, config.width, config.warps, _smallest(*rows_moved, weight))
    meta = {"CENTER": center, "ROWS": config.rows, "BLOCK": config.width, "LANES": lanes, "VEC": vec}
    meta |= {"PARTS": _rows_side_by_side(config, lanes), "STAGES": config.stages}
    grid = (ceil_div(hidden, config.width), programs)
    args = (*tensors, *means, *outputs, *sizes, *summands)
    run(bwd_kernels.norm_bwd_wide_kernel, grid, x.device, args, meta, config.warps)
