# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of LayerNorm and RMSNorm. Launches and their configurations are in `norm.py`.

    x̂ = (x - mean) · rstd     y = x̂ · (weight + weight_offset) + bias
    dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)),  g = dy · (weight + weight_offset)
    dweight = Σ_rows dy · x̂     dbias = Σ_rows dy

RMSNorm is the same without mean, mean(g) and bias (`CENTER=False`).

An add + norm has x = residual + dropout(input), rounded and stored in `sum_ptr`'s dtype before it is normalised; its
backward adds `dsum`, the gradient that x has from elsewhere, to dx. In post-norm mode y is stored twice, the second
time in the sum's dtype, and has two gradients, which are added first. What is None costs nothing.

A row that fits one program is one or two power-of-two tiles (`MAIN`, `TAIL`; 5120 is 4096 + 1024), so that common
widths waste no threads. Folded to [rows, N / (LANES · VEC), LANES, VEC] a tile shows what each of the row's LANES
threads holds, along axes 1 and 3, when each loads VEC columns at a time: sums of a lane cost no exchange, whatever the
number of tiles, and those of a row one exchange between lanes. Wider rows are walked in blocks. Every value is
converted to fp32 as it is loaded.

Bytes per element moved: forward input + output; backward input + dy + dx (rows wider than one program: one more read
of input and dy). Nothing is atomic: the parameter gradients are summed by each program over its rows, then by
`sum_partials_kernel` over programs, always in the same order.
"""

import triton
import triton.language as tl

from . import launch
from .dropout import dropout_factor

INTERPRETED = tl.constexpr(launch.INTERPRETED)


@triton.jit
def _load_rows(ptr, row, stride, cols, mask):
    return tl.load(ptr + row[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_summand(ptr, row, stride, cols, mask, into: tl.constexpr):
    """Rows of a summand of what is rounded to `into`.

    LLVM makes of an fp32 sum of 16-bit numbers, rounded to fp16, an fp16 sum of the numbers in fp16, having counted
    their digits only: 1e12 - 1e12 is inf - inf. Of bits moved to fp32's place it does not know that they were bf16.
    """
    values = tl.load(ptr + row[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    if values.dtype == tl.bfloat16 and into == tl.float16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def _load_dy(dy_ptr, more_dy_ptr, row, dy_stride, more_dy_stride, cols, mask):
    """Rows of the gradient of y, from both that it has in post-norm mode."""
    dy = _load_rows(dy_ptr, row, dy_stride, cols, mask)
    if more_dy_ptr is not None:
        dy += _load_rows(more_dy_ptr, row, more_dy_stride, cols, mask)
    return dy


@triton.jit
def _load_sum(
    x_ptr, residual_ptr, sum_ptr, again_ptr, row, x_stride, residual_stride, start, cols, mask, hidden,
    seed_ptr, threshold, keep_scale,
):  # fmt: skip
    """Rows of x; of an add + norm rows of residual + dropout(x) as they are rounded and, where wanted, stored."""
    if residual_ptr is None:
        return _load_rows(x_ptr, row, x_stride, cols, mask)
    else:
        into: tl.constexpr = (again_ptr if sum_ptr is None else sum_ptr).dtype.element_ty
        x = _load_summand(x_ptr, row, x_stride, cols, mask, into)
        if seed_ptr is not None:
            x = x * dropout_factor(seed_ptr, threshold, keep_scale, row, start, cols.shape[0])
        rounded = (x + _load_summand(residual_ptr, row, residual_stride, cols, mask, into)).to(into)
        if sum_ptr is not None:
            tl.store(sum_ptr + row[:, None] * hidden + cols[None, :], rounded, mask=mask)
        return rounded.to(tl.float32)


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
def _row_mask(live, cols, hidden, MASKED: tl.constexpr):
    """Rows that exist, and columns that exist where the tile overruns the row."""
    mask = live[:, None]
    if MASKED:
        mask = mask & (cols < hidden)[None, :]
    return mask


@triton.jit
def _load_param(ptr, cols, hidden, default, VEC: tl.constexpr, MASKED: tl.constexpr):
    """A weight or bias tile as fp32 `[1, len(cols)]`; a missing parameter is the constant `default`.

    Loaded in two dimensions like the rows, so that Triton gives it the rows' layout and converts nothing. Where rows
    begin anywhere (VEC 1) it is told that parameters do as well: they would come in vectors, in another layout.
    """
    cols = cols[None, :]
    if VEC == 1:
        cols = tl.multiple_of(cols, [1, 1])
    if ptr is None:
        return tl.full(cols.shape, default, tl.float32)
    elif MASKED:
        return tl.load(ptr + cols, mask=cols < hidden, other=0.0).to(tl.float32)
    else:
        return tl.load(ptr + cols).to(tl.float32)


@triton.jit
def _load_weight(ptr, cols, hidden, weight_offset, VEC: tl.constexpr, MASKED: tl.constexpr):
    return _load_param(ptr, cols, hidden, 1.0, VEC, MASKED) + tl.cast(weight_offset, tl.float32)


@triton.jit
def _store_norm(xhat, y_ptr, again_ptr, w_ptr, b_ptr, row, cols, mask, hidden, weight_offset, CENTER: tl.constexpr,
                VEC: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    weight = _load_param(w_ptr, cols, hidden, 1.0, VEC, MASKED)
    if not CENTER:  # LayerNorm has no offset
        weight += tl.cast(weight_offset, tl.float32)
    y = xhat * weight + _load_param(b_ptr, cols, hidden, 0.0, VEC, MASKED)
    at = row[:, None] * hidden + cols[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if again_ptr is not None:
        tl.store(again_ptr + at, y.to(again_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fold(tile, LANES: tl.constexpr, VEC: tl.constexpr):
    """[rows, N] as [rows, N / (LANES · VEC), LANES, VEC]."""
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] // (LANES * VEC), LANES, VEC])


@triton.jit
def _unfold(tile):
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] * tile.shape[2] * tile.shape[3]])


@triton.jit
def _lane_sums(tile):
    return tl.sum(tl.sum(tile, axis=3, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def _store_stat(ptr, value, row, live, LANES: tl.constexpr):
    """A row's statistic, by its first lane.

    As a tile of rows without contiguous elements, so that it has the rows' layout. Rows alone have another, for which
    all threads write the number that they share to one place in shared memory.
    """
    lane = tl.arange(0, LANES)[None, None, :, None]
    at = tl.max_contiguous(row[:, None, None, None] + tl.zeros_like(lane), [1, 1, 1, 1])
    tl.store(ptr + at, tl.broadcast_to(value, at.shape), mask=live[:, None, None, None] & (lane == 0))


@triton.jit
def _only_inside(tile, cols, hidden, MASKED: tl.constexpr):
    """A folded tile, zero past the row's end."""
    if MASKED:
        tile = tl.where(_fold((cols < hidden)[None, :], tile.shape[2], tile.shape[3]), tile, 0.0)
    return tile


@triton.jit
def _lane_counts(hidden, COLUMNS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """How many of the first `hidden` of COLUMNS columns each lane holds, [1, 1, LANES, 1] fp32."""
    turn = tl.arange(0, COLUMNS // (LANES * VEC))[None, :, None, None]
    first = (turn * LANES + tl.arange(0, LANES)[None, None, :, None]) * VEC
    return tl.sum(tl.minimum(tl.maximum(hidden - first, 0), VEC), axis=1, keep_dims=True).to(tl.float32)


@triton.jit
def _merge_moments(n, mean, squares, other_n, other_mean, other_squares):
    """Of two sets of numbers: their count, mean and sum of squares about it (Chan, Golub, LeVeque 1979)."""
    total = n + other_n
    share = other_n / tl.maximum(total, 1.0)
    apart = other_mean - mean
    # In this order a lane without an element adds no 0 · inf.
    return total, mean + apart * share, squares + other_squares + apart * (apart * (n * share))


@triton.jit
def _row_moments(count, mean, squares):
    """Mean and sum of squares about it of each row, from those of its lanes: one exchange between warps.

    The lanes of a warp merge moments in different orders and would end with different bits; sums are the same in all.
    """
    if INTERPRETED or mean.shape[2] <= 32:  # interpreted, a merge would call Python for every lane
        total = tl.sum(count, axis=2, keep_dims=True)
        row_mean = tl.sum(count * mean, axis=2, keep_dims=True) / total
        apart = mean - row_mean
        return row_mean, tl.sum(squares + apart * (apart * count), axis=2, keep_dims=True)
    else:
        count = tl.broadcast_to(count, mean.shape)
        _, mean, squares = tl.reduce((count, mean, squares), 2, _merge_moments, keep_dims=True)
        return mean, squares


@triton.jit
def _row_sums(g, gx, CENTER: tl.constexpr):
    """Sums of each row from those of its lanes, both in one exchange; the first is zero for RMSNorm."""
    if CENTER:
        return tl.split(tl.sum(tl.join(g, gx), axis=2, keep_dims=True))
    else:
        total = tl.sum(gx, axis=2, keep_dims=True)
        return tl.zeros_like(total), total


@triton.jit(do_not_specialize=["rows", "threshold"])
def norm_fwd_kernel(
    x_ptr,  # [rows, hidden], row stride x_stride
    w_ptr,  # [hidden] or None
    b_ptr,  # [hidden] or None
    y_ptr,  # [rows, hidden]
    mean_ptr,  # [rows] fp32, None for RMSNorm
    rstd_ptr,  # [rows] fp32
    rows,
    hidden,
    x_stride,
    eps,
    weight_offset,
    residual_ptr,  # [rows, hidden], row stride residual_stride; None: a plain norm, and so are all below
    sum_ptr,  # [rows, hidden], or None where again_ptr is given and no one reads the sum
    again_ptr,  # [rows, hidden]: the second y of post-norm mode, or None
    seed_ptr,  # [2] int64 or None
    residual_stride,
    threshold,
    keep_scale,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    MASKED: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    """One program normalises ROWS whole rows held in registers.

    Each lane has a mean of its own and squares about that, so that the row needs one exchange only.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    cols = tl.arange(0, MAIN)
    MASK_MAIN: tl.constexpr = MASKED and TAIL == 0
    mask = _row_mask(live, cols, hidden, MASK_MAIN)
    x = _fold(_load_sum(x_ptr, residual_ptr, sum_ptr, again_ptr, row, x_stride, residual_stride, 0, cols, mask, hidden,
                        seed_ptr, threshold, keep_scale), LANES, VEC)  # fmt: skip
    if TAIL > 0:
        tail_cols = MAIN + tl.arange(0, TAIL)
        tail_mask = _row_mask(live, tail_cols, hidden, MASKED)
        tail = _fold(_load_sum(x_ptr, residual_ptr, sum_ptr, again_ptr, row, x_stride, residual_stride, MAIN, tail_cols,
                               tail_mask, hidden, seed_ptr, threshold, keep_scale), LANES, VEC)  # fmt: skip

    if CENTER:
        count = tl.full([1, 1, LANES, 1], (MAIN + TAIL) // LANES, tl.float32)
        if MASKED:
            count = _lane_counts(hidden, MAIN, LANES, VEC)
            if TAIL > 0:
                count += _lane_counts(hidden - MAIN, TAIL, LANES, VEC)
        some = tl.maximum(count, 1.0)
        lane_mean = _lane_sums(x)
        if TAIL > 0:
            lane_mean += _lane_sums(tail)
        lane_mean = lane_mean / some
        x = _only_inside(x - lane_mean, cols, hidden, MASK_MAIN)
        rest = _lane_sums(x)
        if TAIL > 0:
            tail = _only_inside(tail - lane_mean, tail_cols, hidden, MASKED)
            rest += _lane_sums(tail)
    squares = _lane_sums(x * x)
    if TAIL > 0:
        squares += _lane_sums(tail * tail)
    if CENTER:  # the mean of what is left is what the mean was off by: in rows of tiny spread it counts
        rest = rest / some
        # Squares that add up to inf stay that: rest², of a mean of 1e30, may be inf as well, and inf - inf is NaN.
        squares = tl.where(squares < float("inf"), tl.maximum(squares - count * (rest * rest), 0.0), squares)
        mean, squares = _row_moments(count, lane_mean + rest, squares)
        _store_stat(mean_ptr, mean, row, live, LANES)
    else:
        squares = tl.sum(squares, axis=2, keep_dims=True)
    rstd = 1.0 / tl.sqrt_rn(squares / hidden + tl.cast(eps, tl.float32))  # Inductor may declare eps as fp64
    _store_stat(rstd_ptr, rstd, row, live, LANES)

    x = x * rstd
    if CENTER:
        shift = (lane_mean - mean) * rstd
        x += shift
    _store_norm(_unfold(x), y_ptr, again_ptr, w_ptr, b_ptr, row, cols, mask, hidden, weight_offset, CENTER, VEC,
                MASK_MAIN)  # fmt: skip
    if TAIL > 0:
        tail = tail * rstd
        if CENTER:
            tail += shift
        _store_norm(_unfold(tail), y_ptr, again_ptr, w_ptr, b_ptr, row, tail_cols, tail_mask, hidden, weight_offset,
                    CENTER, VEC, MASKED)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "threshold"])
def norm_fwd_wide_kernel(
    x_ptr,  # [rows, hidden], row stride x_stride
    w_ptr,  # [hidden] or None
    b_ptr,  # [hidden] or None
    y_ptr,  # [rows, hidden]
    mean_ptr,  # [rows] fp32, None for RMSNorm
    rstd_ptr,  # [rows] fp32
    rows,
    hidden,
    x_stride,
    eps,
    weight_offset,
    residual_ptr,  # [rows, hidden], row stride residual_stride; None: a plain norm, and so are all below
    sum_ptr,  # [rows, hidden], or None where again_ptr is given and no one reads the sum
    again_ptr,  # [rows, hidden]: the second y of post-norm mode, or None
    seed_ptr,  # [2] int64 or None
    residual_stride,
    threshold,
    keep_scale,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program walks one row twice; the second read comes from the cache.

    Each lane keeps a running mean and sum of squared deviations (Welford), and the lanes are merged once: no
    cancellation at a large mean and no reduction inside the loop.
    """
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lane = tl.arange(0, BLOCK)

    lane_mean = tl.zeros([1, BLOCK], tl.float32)
    lane_squares = tl.zeros([1, BLOCK], tl.float32)
    for start in tl.range(0, hidden, BLOCK, num_stages=STAGES):
        inside = (start + lane < hidden)[None, :]
        x = _load_sum(x_ptr, residual_ptr, sum_ptr, again_ptr, row, x_stride, residual_stride, start, start + lane,
                      inside, hidden, seed_ptr, threshold, keep_scale)  # fmt: skip
        if CENTER:
            step = tl.where(inside, x - lane_mean, 0.0)
            lane_mean += step / (start // BLOCK + 1)
            lane_squares += step * (x - lane_mean)
        else:
            lane_squares += x * x
    if sum_ptr is not None:
        tl.debug_barrier()  # the sum is read back below, perhaps by other threads than wrote it

    mean = tl.zeros([1], tl.float32)
    if CENTER:
        count = ((hidden - lane + BLOCK - 1) // BLOCK).to(tl.float32)[None, :]
        mean = tl.sum(lane_mean * count, axis=1) / hidden
        lane_squares += count * (lane_mean - mean[:, None]) * (lane_mean - mean[:, None])
        tl.store(mean_ptr + row, mean)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(lane_squares, axis=1) / hidden + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd)

    for start in tl.range(0, hidden, BLOCK, num_stages=STAGES):
        cols = start + lane
        mask = (cols < hidden)[None, :]
        if sum_ptr is not None:
            x = _load_rows(sum_ptr, row, hidden, cols, mask)
        else:
            x = _load_sum(x_ptr, residual_ptr, sum_ptr, again_ptr, row, x_stride, residual_stride, start, cols, mask,
                          hidden, seed_ptr, threshold, keep_scale)  # fmt: skip
        xhat = (x - mean[:, None]) * rstd[:, None]
        _store_norm(xhat, y_ptr, again_ptr, w_ptr, b_ptr, row, cols, mask, hidden, weight_offset, CENTER, 16, True)


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
