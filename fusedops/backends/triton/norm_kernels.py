# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the forward of LayerNorm and RMSNorm, and what `norm_bwd_kernels.py` shares with them.

Launches and their configurations are in `norm.py`.

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


launch.refuse_to_compile_while_capturing(list(globals().values()))
