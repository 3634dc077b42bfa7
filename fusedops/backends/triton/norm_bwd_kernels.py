# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the backward of LayerNorm and RMSNorm. Formulas and how rows are laid out: `norm_kernels.py`."""

import triton
import triton.language as tl

from . import launch
from .dropout import dropout_factor
from .norm_kernels import _fold, _lane_sums, _load_param, _load_rows, _only_inside, _row_mask, _unfold


@triton.jit
def _load_dy(dy_ptr, more_dy_ptr, row, dy_stride, more_dy_stride, cols, mask):
    """Rows of the gradient of y, from both that it has in post-norm mode."""
    dy = _load_rows(dy_ptr, row, dy_stride, cols, mask)
    if more_dy_ptr is not None:
        dy += _load_rows(more_dy_ptr, row, more_dy_stride, cols, mask)
    return dy


@triton.jit
def _store_dx(
    dx, dx_ptr, dsum_ptr, dinput_ptr, row, dsum_stride, start, cols, mask, hidden, seed_ptr, threshold, keep_scale
):
    """dx; of an add + norm the gradients of residual and input, where they are not one."""
    if dsum_ptr is not None:
        dx += _load_rows(dsum_ptr, row, dsum_stride, cols, mask)
    at = row[:, None] * hidden + cols[None, :]
    if dx_ptr is not None:
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dinput_ptr is not None:
        if seed_ptr is not None:
            dx = dx * dropout_factor(seed_ptr, threshold, keep_scale, row, start, cols.shape[0])
        tl.store(dinput_ptr + at, dx.to(dinput_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_weight(ptr, cols, hidden, weight_offset, VEC: tl.constexpr, MASKED: tl.constexpr):
    return _load_param(ptr, cols, hidden, 1.0, VEC, MASKED) + tl.cast(weight_offset, tl.float32)


@triton.jit
def _row_sums(g, gx, CENTER: tl.constexpr):
    """Sums of each row from those of its lanes, both in one exchange; the first is zero for RMSNorm."""
    if CENTER:
        return tl.split(tl.sum(tl.join(g, gx), axis=2, keep_dims=True))
    else:
        total = tl.sum(gx, axis=2, keep_dims=True)
        return tl.zeros_like(total), total


@triton.jit
def _store_partial(ptr, partial, program, cols, hidden, MASKED: tl.constexpr):
    tl.store(ptr + program * hidden + cols, partial, mask=(cols < hidden) if MASKED else None)


@triton.jit
def _no_sums(COLUMNS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    return tl.zeros([PARTS, COLUMNS // (LANES * VEC), LANES, VEC], tl.float32)


@triton.jit
def _over_rows(tile, PARTS: tl.constexpr):
    """Sums of every PARTS-th row: those that a thread holds, where PARTS rows lie side by side."""
    if tile.shape[0] == PARTS:
        return tile
    else:
        parts = tl.reshape(tile, [tile.shape[0] // PARTS, PARTS, tile.shape[1], tile.shape[2], tile.shape[3]])
        return tl.sum(parts, axis=0)


@triton.jit
def _store_sums(ptr, sums, program, cols, hidden, MASKED: tl.constexpr):
    _store_partial(ptr, tl.reshape(tl.sum(sums, axis=0), [cols.shape[0]]), program, cols, hidden, MASKED)


@triton.jit
def _xhat(x, mean, rstd, cols, hidden, CENTER: tl.constexpr, MASKED: tl.constexpr):
    """x̂, zero past the row's end: (0 - mean) · rstd may be inf there, and inf times a gradient of zero is NaN."""
    if CENTER:
        x = _only_inside(x - mean, cols, hidden, MASKED)
    return x * rstd


@triton.jit(do_not_specialize=["rows", "threshold"])
def norm_bwd_kernel(
    dy_ptr,  # [rows, hidden], row stride dy_stride
    more_dy_ptr,  # [rows, hidden], row stride more_dy_stride: another gradient of y, or None
    x_ptr,  # [rows, hidden], row stride x_stride
    w_ptr,  # [hidden] or None
    mean_ptr,  # [rows] fp32, None for RMSNorm
    rstd_ptr,  # [rows] fp32
    dx_ptr,  # [rows, hidden] or None
    dw_ptr,  # [programs, hidden] fp32 or None
    db_ptr,  # [programs, hidden] fp32 or None
    rows,
    hidden,
    dy_stride,
    more_dy_stride,
    x_stride,
    weight_offset,
    dsum_ptr,  # [rows, hidden], row stride dsum_stride, or None, as all below in a plain norm
    dinput_ptr,  # [rows, hidden] or None
    seed_ptr,  # [2] int64 or None
    dsum_stride,
    threshold,
    keep_scale,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    MASKED: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Persistent programs: each takes every num_programs-th group of ROWS rows and keeps its dweight and dbias.

    `STAGES` groups are in flight: the pipeliner copies the coming ones into shared memory while one is worked on.
    PARTS rows lie side by side in the program's threads; their dweight and dbias are added up after the last group.
    Rows and columns beyond the end load as zero, and a zero dy adds nothing to any sum, x̂ being finite there.
    """
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, MAIN)
    MASK_MAIN: tl.constexpr = MASKED and TAIL == 0
    weight = _fold(_load_weight(w_ptr, cols, hidden, weight_offset, VEC, MASK_MAIN), LANES, VEC)
    dweight = _no_sums(MAIN, PARTS, LANES, VEC)
    dbias = _no_sums(MAIN, PARTS, LANES, VEC)
    if TAIL > 0:
        tail_cols = MAIN + tl.arange(0, TAIL)
        tail_weight = _fold(_load_weight(w_ptr, tail_cols, hidden, weight_offset, VEC, MASKED), LANES, VEC)
        tail_dweight = _no_sums(TAIL, PARTS, LANES, VEC)
        tail_dbias = _no_sums(TAIL, PARTS, LANES, VEC)

    for group in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
        live = row < rows
        mask = _row_mask(live, cols, hidden, MASK_MAIN)
        x = _fold(_load_rows(x_ptr, row, x_stride, cols, mask), LANES, VEC)
        dy = _fold(_load_dy(dy_ptr, more_dy_ptr, row, dy_stride, more_dy_stride, cols, mask), LANES, VEC)
        if TAIL > 0:
            tail_mask = _row_mask(live, tail_cols, hidden, MASKED)
            tail_x = _fold(_load_rows(x_ptr, row, x_stride, tail_cols, tail_mask), LANES, VEC)
            tail_dy = _fold(_load_dy(dy_ptr, more_dy_ptr, row, dy_stride, more_dy_stride, tail_cols, tail_mask), LANES,
                            VEC)  # fmt: skip
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)[:, None, None, None]
        mean = 0.0
        if CENTER:
            mean = tl.load(mean_ptr + row, mask=live, other=0.0)[:, None, None, None]
        xhat = _xhat(x, mean, rstd, cols, hidden, CENTER, MASK_MAIN)
        if TAIL > 0:
            tail_xhat = _xhat(tail_x, mean, rstd, tail_cols, hidden, CENTER, MASKED)

        if dw_ptr is not None:
            dweight += _over_rows(dy * xhat, PARTS)
            if TAIL > 0:
                tail_dweight += _over_rows(tail_dy * tail_xhat, PARTS)
        if db_ptr is not None:
            dbias += _over_rows(dy, PARTS)
            if TAIL > 0:
                tail_dbias += _over_rows(tail_dy, PARTS)
        if dx_ptr is not None or dinput_ptr is not None:
            g = dy * weight
            sum_g, sum_gx = _lane_sums(g), _lane_sums(g * xhat)
            if TAIL > 0:
                tail_g = tail_dy * tail_weight
                sum_g += _lane_sums(tail_g)
                sum_gx += _lane_sums(tail_g * tail_xhat)
            sum_g, sum_gx = _row_sums(sum_g, sum_gx, CENTER)
            mean_g = sum_g / hidden
            mean_gx = sum_gx / hidden
            dx = _unfold(rstd * (g - mean_g - xhat * mean_gx))
            _store_dx(dx, dx_ptr, dsum_ptr, dinput_ptr, row, dsum_stride, 0, cols, mask, hidden,
                      seed_ptr, threshold, keep_scale)  # fmt: skip
            if TAIL > 0:
                tail_dx = _unfold(rstd * (tail_g - mean_g - tail_xhat * mean_gx))
                _store_dx(tail_dx, dx_ptr, dsum_ptr, dinput_ptr, row, dsum_stride, MAIN, tail_cols, tail_mask, hidden,
                          seed_ptr, threshold, keep_scale)  # fmt: skip

    if dw_ptr is not None:
        _store_sums(dw_ptr, dweight, program, cols, hidden, MASK_MAIN)
        if TAIL > 0:
            _store_sums(dw_ptr, tail_dweight, program, tail_cols, hidden, MASKED)
    if db_ptr is not None:
        _store_sums(db_ptr, dbias, program, cols, hidden, MASK_MAIN)
        if TAIL > 0:
            _store_sums(db_ptr, tail_dbias, program, tail_cols, hidden, MASKED)


@triton.jit
def _add_exactly(high, low, x):
    """Add x to `high`, and what rounding takes from it to `low` (Knuth, TAOCP 2, 4.2.2, theorem B)."""
    total = high + x
    added = total - high
    return total, low + ((high - (total - added)) + (x - added))


@triton.jit
def _total(high, low):
    return tl.where(low == low, high + low, high)  # of an infinite sum `low` is NaN


@triton.jit(do_not_specialize=["rows"])
def norm_bwd_wide_means_kernel(
    dy_ptr,  # [rows, hidden], row stride dy_stride
    more_dy_ptr,  # [rows, hidden], row stride more_dy_stride: another gradient of y, or None
    x_ptr,  # [rows, hidden], row stride x_stride
    w_ptr,  # [hidden] or None
    mean_ptr,  # [rows] fp32, None for RMSNorm
    rstd_ptr,  # [rows] fp32
    mean_g_ptr,  # [rows] fp32, None for RMSNorm
    mean_gx_ptr,  # [rows] fp32
    rows,
    hidden,
    dy_stride,
    more_dy_stride,
    x_stride,
    weight_offset,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """mean(g) and mean(g·x̂) of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    rstd = tl.load(rstd_ptr + row)
    g_high = tl.zeros([BLOCK], tl.float32)
    g_low = tl.zeros([BLOCK], tl.float32)
    gx_high = tl.zeros([BLOCK], tl.float32)
    gx_low = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, hidden, BLOCK, num_stages=STAGES):
        cols = start + lane
        inside = cols < hidden
        xhat = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * dy_stride + cols, mask=inside, other=0.0).to(tl.float32)
        if more_dy_ptr is not None:
            g += tl.load(more_dy_ptr + row * more_dy_stride + cols, mask=inside, other=0.0).to(tl.float32)
        if w_ptr is not None:
            g *= tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32) + tl.cast(weight_offset, tl.float32)
        else:
            g *= 1.0 + tl.cast(weight_offset, tl.float32)
        if CENTER:
            xhat -= tl.load(mean_ptr + row)
            g_high, g_low = _add_exactly(g_high, g_low, g)
        gx_high, gx_low = _add_exactly(gx_high, gx_low, g * xhat * rstd)
    if CENTER:
        tl.store(mean_g_ptr + row, tl.sum(_total(g_high, g_low), axis=0) / hidden)
    tl.store(mean_gx_ptr + row, tl.sum(_total(gx_high, gx_low), axis=0) / hidden)


@triton.jit(do_not_specialize=["rows", "threshold"])
def norm_bwd_wide_kernel(
    dy_ptr,  # [rows, hidden], row stride dy_stride
    more_dy_ptr,  # [rows, hidden], row stride more_dy_stride: another gradient of y, or None
    x_ptr,  # [rows, hidden], row stride x_stride
    w_ptr,  # [hidden] or None
    mean_ptr,  # [rows] fp32, None for RMSNorm
    rstd_ptr,  # [rows] fp32
    mean_g_ptr,  # [rows] fp32, None for RMSNorm
    mean_gx_ptr,  # [rows] fp32, None where dx is not wanted
    dx_ptr,  # [rows, hidden] or None
    dw_ptr,  # [grid axis 1, hidden] fp32 or None
    db_ptr,  # [grid axis 1, hidden] fp32 or None
    rows,
    hidden,
    dy_stride,
    more_dy_stride,
    x_stride,
    weight_offset,
    dsum_ptr,  # [rows, hidden], row stride dsum_stride, or None, as all below in a plain norm
    dinput_ptr,  # [rows, hidden] or None
    seed_ptr,  # [2] int64 or None
    dsum_stride,
    threshold,
    keep_scale,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A column tile over every grid-axis-1-th group of rows: with the row means known nothing is left to exchange."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.program_id(1).to(tl.int64)
    weight = _fold(_load_weight(w_ptr, cols, hidden, weight_offset, VEC, True), LANES, VEC)
    dweight = _no_sums(BLOCK, PARTS, LANES, VEC)
    dbias = _no_sums(BLOCK, PARTS, LANES, VEC)
    for group in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
        live = row < rows
        mask = _row_mask(live, cols, hidden, True)
        xhat = _fold(_load_rows(x_ptr, row, x_stride, cols, mask), LANES, VEC)
        dy = _fold(_load_dy(dy_ptr, more_dy_ptr, row, dy_stride, more_dy_stride, cols, mask), LANES, VEC)
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)[:, None, None, None]
        if CENTER:
            xhat -= tl.load(mean_ptr + row, mask=live, other=0.0)[:, None, None, None]
        xhat *= rstd
        dweight += _over_rows(dy * xhat, PARTS)
        dbias += _over_rows(dy, PARTS)
        if dx_ptr is not None or dinput_ptr is not None:
            dx = dy * weight - xhat * tl.load(mean_gx_ptr + row, mask=live, other=0.0)[:, None, None, None]
            if CENTER:
                dx -= tl.load(mean_g_ptr + row, mask=live, other=0.0)[:, None, None, None]
            dx *= rstd
            _store_dx(_unfold(dx), dx_ptr, dsum_ptr, dinput_ptr, row, dsum_stride, tl.program_id(0) * BLOCK, cols, mask,
                      hidden, seed_ptr, threshold, keep_scale)  # fmt: skip
    if dw_ptr is not None:
        _store_sums(dw_ptr, dweight, program, cols, hidden, True)
    if db_ptr is not None:
        _store_sums(db_ptr, dbias, program, cols, hidden, True)


@triton.jit
def _sum_column_tile(partial_ptr, out_ptr, programs, cols, hidden, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    high = tl.zeros([PARTS, BLOCK], tl.float32)
    low = tl.zeros([PARTS, BLOCK], tl.float32)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < programs)[:, None] & (cols < hidden)[None, :]
        at = partial_ptr + part.to(tl.int64)[:, None] * hidden + cols[None, :]
        high, low = _add_exactly(high, low, tl.load(at, mask=mask, other=0.0))
    total = tl.sum(_total(high, low), axis=0)
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=cols < hidden)


@triton.jit(do_not_specialize=["programs"])
def sum_partials_kernel(
    dw_partial_ptr,  # [programs, hidden] fp32 or None
    db_partial_ptr,  # [programs, hidden] fp32 or None
    dweight_ptr,  # [hidden] or None
    dbias_ptr,  # [hidden] or None
    programs,
    hidden,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finish both parameter gradients in one launch; grid axis 1 picks which."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        if dweight_ptr is not None:
            _sum_column_tile(dw_partial_ptr, dweight_ptr, programs, cols, hidden, PARTS, BLOCK)
    else:
        if dbias_ptr is not None:
            _sum_column_tile(db_partial_ptr, dbias_ptr, programs, cols, hidden, PARTS, BLOCK)


launch.refuse_to_compile_while_capturing(list(globals().values()))
