# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of cross-entropy. Launches and their configurations are in `cross_entropy.py`.

    z = softcap · tanh(x / softcap), or x;  m = max z;  s = Σ exp(z - m);  lse = m + ln s
    loss = (1 - smoothing) · w_t · (lse - z_t) + smoothing/classes · Σ_c w_c · (lse - z_c) + z_loss · lse²
    dz_c = g · (a · exp(z_c - m - ln s) - smoothing/classes · w_c - [c = t] · (1 - smoothing) · w_t)
    a = (1 - smoothing) · w_t + smoothing/classes · Σ_c w_c + 2 · z_loss · lse,  dx = dz · (1 - (z / softcap)²)

A program walks a row in blocks. Rows of an odd number of classes begin anywhere: their body begins at a multiple of
`VEC` elements and has a multiple of them, so that it moves 16 bytes at a time; what stands before and behind it is one
small block of its own. Bytes per element moved: forward x; backward x + dx. Arithmetic is fp32; values are converted as
they are loaded. A row whose target is ignored is not read.
"""

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _tanh(y):
    """Taylor's series where 1 - 2 / (exp(2y) + 1) would cancel."""
    square = y * y
    series = 62 / 2835 - square * (1382 / 155925)
    series = 2 / 15 + square * (-17 / 315 + square * series)
    series = y * (1 + square * (-1 / 3 + square * series))
    size = 1 - 2 / (_exp(2 * tl.abs(y)) + 1)
    return tl.where(tl.abs(y) < 0.35, series, tl.where(y < 0, -size, size))


@triton.jit
def _parts(row, stride, classes, VEC: tl.constexpr):
    """Where a row's body begins in memory, in the row, and its length."""
    at = row * stride
    begin = (at + VEC - 1) // VEC * VEC
    head = tl.minimum(begin - at, classes).to(tl.int32)
    return begin, head, (classes - head) // VEC * VEC


@triton.jit
def _edges(head, body, classes, VEC: tl.constexpr):
    """Columns before and behind the body, and which of them there are."""
    lane = tl.arange(0, 2 * VEC)
    cols = tl.where(lane < VEC, lane, head + body + lane - VEC)
    return cols, tl.where(lane < VEC, lane < head, cols < classes)


@triton.jit
def _load_logits(ptr, mask, softcap, CAPPED: tl.constexpr):
    z = tl.load(ptr, mask=mask, other=-float("inf")).to(tl.float32)
    if CAPPED:
        return tl.where(mask, softcap * _tanh(z / softcap), -float("inf"))
    else:
        return z


@triton.jit
def _load_weight(ptr, cols, mask):
    return 1.0 if ptr is None else tl.load(ptr + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add(z, cols, mask, largest, total, logits, weight_ptr, SMOOTH: tl.constexpr):
    """The largest logit, the sum of exponentials and the sum of logits so far, with a block more."""
    raised = tl.maximum(largest, tl.max(z, axis=0))
    total = total * _exp(largest - raised) + tl.sum(_exp(z - raised), axis=0)
    if SMOOTH:
        logits += tl.sum(tl.where(mask, z * _load_weight(weight_ptr, cols, mask), 0.0), axis=0)
    return raised, total, logits


@triton.jit
def cross_entropy_fwd_kernel(
    x_ptr, target_ptr, weight_ptr, weights_ptr, losses_ptr, stats_ptr, classes, stride, ignore_index,
    smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, CAPPED: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, largest logit and ln s of a row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    loss, largest, log_sum = 0.0, 0.0, 0.0
    if target != ignore_index:
        begin, head, body = _parts(row, stride, classes, VEC)
        # The lowest number, not -inf: less that, a logit of -inf would be NaN.
        largest, total, logits = -3.4028234663852886e38, 0.0, 0.0
        for start in range(0, body, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = _load_logits(x_ptr + begin + cols, cols < body, softcap, CAPPED)
            largest, total, logits = _add(z, head + cols, cols < body, largest, total, logits, weight_ptr, SMOOTH)
        cols, mask = _edges(head, body, classes, VEC)
        z = _load_logits(x_ptr + row * stride + cols, mask, softcap, CAPPED)
        largest, total, logits = _add(z, cols, mask, largest, total, logits, weight_ptr, SMOOTH)

        log_sum = tl.log(total)
        at_target = tl.load(x_ptr + row * stride + target).to(tl.float32)
        if CAPPED:
            at_target = softcap * _tanh(at_target / softcap)
        weight = 1.0 if weight_ptr is None else tl.load(weight_ptr + target).to(tl.float32)
        loss = (1 - smoothing) * weight * (log_sum + (largest - at_target))
        lse = largest + log_sum
        if SMOOTH:
            weights = classes * 1.0 if weights_ptr is None else tl.load(weights_ptr)
            loss += smoothing / classes * (weights * lse - logits)
        loss += z_loss * lse * lse
    tl.store(losses_ptr + row, loss)
    tl.store(stats_ptr + 2 * row, largest)
    tl.store(stats_ptr + 2 * row + 1, log_sum)


@triton.jit
def _gradient(
    z, cols, mask, target, largest, log_sum, of_exp, even, own, softcap, weight_ptr,
    SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    d = of_exp * _exp((z - largest) - log_sum)
    if SMOOTH:
        d -= even * _load_weight(weight_ptr, cols, mask)
    d = tl.where(cols == target, d - own, d)
    if CAPPED:
        y = z / softcap
        d = d * (1 - y * y)
    return d


@triton.jit
def cross_entropy_bwd_kernel(
    x_ptr, target_ptr, weight_ptr, weights_ptr, stats_ptr, dloss_ptr, total_weight_ptr, dx_ptr, classes, stride,
    dx_stride, ignore_index, smoothing, z_loss, softcap,
    EACH: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, ALIKE: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of a row. `EACH`: each row has a dloss of its own; `ALIKE`: dx lies as x does, and may be x."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    begin, head, body = _parts(row, stride, classes, VEC)
    dx_begin = begin if ALIKE else row * dx_stride + head
    edge, edge_mask = _edges(head, body, classes, VEC)
    into = dx_ptr.dtype.element_ty
    if target == ignore_index:
        for start in range(0, body, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            tl.store(dx_ptr + dx_begin + cols, tl.zeros([BLOCK], into), mask=cols < body)
        tl.store(dx_ptr + row * dx_stride + edge, tl.zeros([2 * VEC], into), mask=edge_mask)
    else:
        g = tl.load(dloss_ptr + row * EACH)
        if total_weight_ptr is not None:
            g = g / tl.load(total_weight_ptr)
        largest, log_sum = tl.load(stats_ptr + 2 * row), tl.load(stats_ptr + 2 * row + 1)
        weight = 1.0 if weight_ptr is None else tl.load(weight_ptr + target).to(tl.float32)
        own, even = g * (1 - smoothing) * weight, g * smoothing / classes
        of_exp = own + 2 * g * z_loss * (largest + log_sum)
        if SMOOTH:
            of_exp += even * (classes * 1.0 if weights_ptr is None else tl.load(weights_ptr))
        for start in range(0, body, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = _load_logits(x_ptr + begin + cols, cols < body, softcap, CAPPED)
            d = _gradient(
                z, head + cols, cols < body, target, largest, log_sum, of_exp, even, own, softcap, weight_ptr, SMOOTH,
                CAPPED,
            )  # fmt: skip
            tl.store(dx_ptr + dx_begin + cols, d.to(into), mask=cols < body)
        z = _load_logits(x_ptr + row * stride + edge, edge_mask, softcap, CAPPED)
        d = _gradient(
            z, edge, edge_mask, target, largest, log_sum, of_exp, even, own, softcap, weight_ptr, SMOOTH, CAPPED
        )
        tl.store(dx_ptr + row * dx_stride + edge, d.to(into), mask=edge_mask)
