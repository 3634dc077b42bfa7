# mypy: disable-error-code="no-untyped-def"
"""Triton kernels over lists of tensors: the Adam update, the gradient norm, scaling. `adam.py` launches them.

A list reaches a kernel as tables in device memory: addresses as int64, one row a kind of tensor, one column a tensor.
A program works on one chunk of one tensor; `owner` names the tensor of each chunk, `first` the first chunk of each
tensor. Element types are compile-time, so tensors that differ in them are served by separate launches.

Bytes per element moved by the update: gradient + 2 × (parameter or master, both states), + parameter written beside a
master, 2 × compensation (fp32: 28). Nothing is atomic; every result is the same on every run.
"""

import triton
import triton.language as tl

from . import launch

# What becomes of the part of a weight that the parameter's dtype can't hold; as Rounding in csrc/adam.h.
NEAREST = tl.constexpr(0)
MASTER = tl.constexpr(1)
KAHAN = tl.constexpr(2)
STOCHASTIC = tl.constexpr(3)
OCTET = tl.constexpr(8)  # elements that one call of Philox serves with sixteen bits each


@triton.jit
def _chunk(owner_ptr, first_ptr, numel_ptr, CHUNK: tl.constexpr):
    """This program's tensor, the offset of its chunk and how many elements the chunk has."""
    program = tl.program_id(0)
    tensor = tl.load(owner_ptr + program)
    start = (program - tl.load(first_ptr + tensor)) * CHUNK
    return tensor, start, tl.minimum(tl.load(numel_ptr + tensor) - start, CHUNK)


@triton.jit
def _at(address, start, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """An address of the tables as a pointer to the chunk's first element; `VECTOR` promises 16-byte alignment."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if VECTOR:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _load(pointer, offsets, mask):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, offsets, value, mask):
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _number(hyper_ptr, number_ptr, row, group, groups):
    """A group's number `row` (lr, beta1, beta2): of the table, or read where a device tensor holds it."""
    address = tl.load(number_ptr + 2 * row * groups + group)
    width = tl.load(number_ptr + (2 * row + 1) * groups + group)
    single = tl.load(address.to(tl.pointer_type(tl.float32)), mask=width == 4, other=0.0)
    double = tl.load(address.to(tl.pointer_type(tl.float64)), mask=width == 8, other=0.0)
    number = tl.load(hyper_ptr + row * groups + group)
    return tl.where(width == 4, single.to(tl.float64), tl.where(width == 8, double, number))


@triton.jit
def _power(base, exponent):
    """A base ≥ 0 to a positive power, in fp64."""
    return tl.where(base > 0.0, tl.exp(tl.log(tl.where(base > 0.0, base, 1.0)) * exponent), 0.0)


# Compiled once for a combination of scale, inf check and clipping, so that it can be compiled ahead.
@triton.jit(
    do_not_specialize=["groups", "tensors"],
    do_not_specialize_on_alignment=["grad_scale_ptr", "found_inf_ptr", "grad_norm_ptr"],
)
def adam_prologue_kernel(
    hyper_ptr,  # [7, groups] fp64: lr, beta1, beta2, eps, weight_decay, decoupled, sign
    number_ptr,  # [6, groups] int64: address and bytes (4 or 8) of a device lr, beta1, beta2, else 0
    group_ptr,  # [tensors] int64
    step_ptr,  # [tensors] int64: addresses of fp32 step counters
    grad_ptr,  # [tensors] int64: 0 where a tensor has no gradient
    scalars_ptr,  # [11, tensors] fp32, written: what adam_kernel reads
    grad_scale_ptr,  # [1] fp32 or None
    found_inf_ptr,  # [1] fp32 or None
    grad_norm_ptr,  # [1] fp32 or None
    max_grad_norm,
    groups,
    tensors,
    BLOCK: tl.constexpr,
):
    """Per tensor: advance its step, and work out in fp64 every scalar of the update; each is rounded to fp32 once."""
    tensor = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = tensor < tensors
    active = tl.load(grad_ptr + tensor, mask=inside, other=0) != 0
    if found_inf_ptr is not None:
        active = active & (tl.load(found_inf_ptr + tl.zeros_like(tensor)) == 0.0)

    group = tl.load(group_ptr + tensor, mask=inside, other=0)
    lr = _number(hyper_ptr, number_ptr, 0, group, groups)
    beta1 = _number(hyper_ptr, number_ptr, 1, group, groups)
    beta2 = _number(hyper_ptr, number_ptr, 2, group, groups)
    hyper = hyper_ptr + group
    eps = tl.load(hyper + 3 * groups)
    weight_decay = tl.load(hyper + 4 * groups)
    decoupled = tl.load(hyper + 5 * groups) != 0.0
    factor = tl.load(hyper + 6 * groups)
    if grad_scale_ptr is not None:
        factor = factor / tl.load(grad_scale_ptr).to(tl.float64)
    if grad_norm_ptr is not None:
        clip = max_grad_norm / (tl.load(grad_norm_ptr).to(tl.float64) + 1e-6)
        factor = factor * tl.where(clip >= 1.0, 1.0, clip)  # a NaN norm reaches the gradients

    step_address = tl.load(step_ptr + tensor, mask=active, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_address, mask=active, other=0.0) + 1.0
    tl.store(step_address, step, mask=active)
    correction1 = 1.0 - _power(beta1, step.to(tl.float64))
    correction2 = 1.0 - _power(beta2, step.to(tl.float64))

    out = scalars_ptr + tensor
    tl.store(out, factor.to(tl.float32), mask=inside)
    tl.store(out + tensors, (1.0 - beta1).to(tl.float32), mask=inside)
    tl.store(out + 2 * tensors, beta2.to(tl.float32), mask=inside)
    tl.store(out + 3 * tensors, (1.0 - beta2).to(tl.float32), mask=inside)
    tl.store(out + 4 * tensors, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=inside)
    tl.store(out + 5 * tensors, tl.where(decoupled, 0.0, weight_decay).to(tl.float32), mask=inside)
    tl.store(out + 6 * tensors, (lr / correction1).to(tl.float32), mask=inside)
    tl.store(out + 7 * tensors, tl.sqrt(correction2).to(tl.float32), mask=inside)
    tl.store(out + 8 * tensors, eps.to(tl.float32), mask=inside)
    tl.store(out + 9 * tensors, active.to(tl.float32), mask=inside)
    tl.store(out + 10 * tensors, step, mask=inside)


@triton.jit
def _sixteen_bits(first, key0, key1, index, step, BLOCK: tl.constexpr):
    """The random bits of elements `first` (a multiple of OCTET) and on, as csrc/adam.h counts them: [BLOCK] uint32."""
    octet = first // OCTET + tl.arange(0, BLOCK // OCTET)
    low = (octet & 0xFFFFFFFF).to(tl.uint32)
    zero = low & 0
    w0, w1, w2, w3 = tl.philox_impl(low, (octet >> 32).to(tl.uint32), zero + index, zero + step, key0, key1)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return tl.interleave(words & 0xFFFF, words >> 16)


@triton.jit
def _round_stochastic(value, bits):
    """Fp32 to fp32 numbers that bf16 holds, away from zero where lower half and random bits add up to 2^16."""
    rounded = ((value.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(value == value, rounded, value)


@triton.jit
def _update_chunk(
    grad,
    param,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    companion,
    first,
    limit,
    scalars_ptr,
    dither_ptr,
    tensors,
    AMSGRAD: tl.constexpr,
    ROUNDING: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(scalars_ptr)
    beta1_weight = tl.load(scalars_ptr + tensors)
    beta2 = tl.load(scalars_ptr + 2 * tensors)
    beta2_weight = tl.load(scalars_ptr + 3 * tensors)
    decay = tl.load(scalars_ptr + 4 * tensors)
    l2 = tl.load(scalars_ptr + 5 * tensors)
    step_size = tl.load(scalars_ptr + 6 * tensors)
    correction2_sqrt = tl.load(scalars_ptr + 7 * tensors)
    eps = tl.load(scalars_ptr + 8 * tensors)
    if ROUNDING == STOCHASTIC:
        step = tl.load(scalars_ptr + 10 * tensors).to(tl.int64).to(tl.uint32)
        key0 = tl.load(dither_ptr).to(tl.uint32)
        key1 = tl.load(dither_ptr + tensors).to(tl.uint32)
        index = tl.load(dither_ptr + 2 * tensors).to(tl.uint32)
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < limit
        g = _load(grad, at, mask) * factor
        p = _load(companion if ROUNDING == MASTER else param, at, mask)
        if ROUNDING == KAHAN:
            p += _load(companion, at, mask)
        m = _load(exp_avg, at, mask)
        v = _load(exp_avg_sq, at, mask)
        g = tl.where(l2 != 0.0, g + l2 * p, g)
        p = p * decay
        gap = g - m  # torch's lerp: from the nearer end, so that beta1 = 0 gives exactly g
        m = tl.where(beta1_weight < 0.5, m + beta1_weight * gap, g - (1.0 - beta1_weight) * gap)
        v = v * beta2 + beta2_weight * g * g
        largest = v
        if AMSGRAD:
            largest = tl.maximum(_load(max_exp_avg_sq, at, mask), v, propagate_nan=tl.PropagateNan.ALL)
            _store(max_exp_avg_sq, at, largest, mask)
        denominator = tl.div_rn(tl.sqrt_rn(largest), tl.zeros_like(largest) + correction2_sqrt) + eps
        p = p - step_size * tl.div_rn(m, denominator)
        _store(exp_avg, at, m, mask)
        _store(exp_avg_sq, at, v, mask)
        if ROUNDING == MASTER:
            _store(companion, at, p, mask)
        if ROUNDING == KAHAN:
            rest = p - p.to(param.dtype.element_ty).to(tl.float32)
            _store(companion, at, tl.where(rest - rest == 0.0, rest, 0.0), mask)  # inf - inf would be NaN for good
        if ROUNDING == STOCHASTIC:
            p = _round_stochastic(p, _sixteen_bits(first + start, key0, key1, index, step, BLOCK))
        _store(param, at, p, mask)


@triton.jit(do_not_specialize=["tensors"])
def adam_kernel(
    owner_ptr,  # [chunks] int64
    first_ptr,  # [tensors] int64
    numel_ptr,  # [tensors] int64
    address_ptr,  # [5, tensors] int64: param, exp_avg, exp_avg_sq, max_exp_avg_sq, master or compensation
    grad_ptr,  # [tensors] int64
    scalars_ptr,  # [11, tensors] fp32, from adam_prologue_kernel
    dither_ptr,  # [3, tensors] int64: halves of the seed, the parameter's index; read where rounding is stochastic
    tensors,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    AMSGRAD: tl.constexpr,  # dtype of max_exp_avg_sq, or None
    ROUNDING: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adam on one chunk. Addresses and length decide here whether 16-byte accesses are allowed."""
    tensor, start, limit = _chunk(owner_ptr, first_ptr, numel_ptr, CHUNK)
    if tl.load(scalars_ptr + 9 * tensors + tensor) == 0.0:
        return
    grad = tl.load(grad_ptr + tensor)
    param = tl.load(address_ptr + tensor)
    exp_avg = tl.load(address_ptr + tensors + tensor)
    exp_avg_sq = tl.load(address_ptr + 2 * tensors + tensor)
    maximum = tl.load(address_ptr + 3 * tensors + tensor)
    companion = tl.load(address_ptr + 4 * tensors + tensor)
    MAXIMUM: tl.constexpr = EXP_AVG_SQ if AMSGRAD is None else AMSGRAD
    COMPANION: tl.constexpr = PARAM if ROUNDING == KAHAN else tl.float32
    bits = grad | param | exp_avg | exp_avg_sq | maximum | companion | limit
    if bits % 16 == 0:
        _update_chunk(
            _at(grad, start, GRAD, True),
            _at(param, start, PARAM, True),
            _at(exp_avg, start, EXP_AVG, True),
            _at(exp_avg_sq, start, EXP_AVG_SQ, True),
            _at(maximum, start, MAXIMUM, True),
            _at(companion, start, COMPANION, True),
            start,
            limit // 16 * 16,
            scalars_ptr + tensor,
            dither_ptr + tensor,
            tensors,
            AMSGRAD is not None,
            ROUNDING,
            CHUNK,
            BLOCK,
        )
    else:
        _update_chunk(
            _at(grad, start, GRAD, False),
            _at(param, start, PARAM, False),
            _at(exp_avg, start, EXP_AVG, False),
            _at(exp_avg_sq, start, EXP_AVG_SQ, False),
            _at(maximum, start, MAXIMUM, False),
            _at(companion, start, COMPANION, False),
            start,
            limit,
            scalars_ptr + tensor,
            dither_ptr + tensor,
            tensors,
            AMSGRAD is not None,
            ROUNDING,
            CHUNK,
            BLOCK,
        )


@triton.jit
def _chunk_sum_squares(grad, limit, factor, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = _load(grad, at, at < limit) * factor
        total += g * g
    return tl.sum(total, axis=0)


@triton.jit
def _count_nonfinite(grad, limit, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        count += (tl.abs(_load(grad, at, at < limit)) < float("inf")).to(tl.int32)
    return CHUNK - tl.sum(count, axis=0)


@triton.jit
def grad_norm_kernel(
    owner_ptr,  # [chunks] int64
    first_ptr,  # [tensors] int64
    numel_ptr,  # [tensors] int64
    grad_ptr,  # [tensors] int64
    partial_ptr,  # [chunks] fp32, written: sum of squares of each chunk
    grad_scale_ptr,  # [1] fp32 or None
    found_inf_ptr,  # [1] fp32 or None; set to 1 where a gradient is inf or NaN, left alone elsewhere
    GRAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of squares of one chunk. Only where that is not finite are single elements looked at."""
    tensor, start, limit = _chunk(owner_ptr, first_ptr, numel_ptr, CHUNK)
    address = tl.load(grad_ptr + tensor)
    factor = 1.0
    if grad_scale_ptr is not None:
        factor = 1.0 / tl.load(grad_scale_ptr)
    if (address | limit) % 16 == 0:
        total = _chunk_sum_squares(_at(address, start, GRAD, True), limit // 16 * 16, factor, CHUNK, BLOCK)
    else:
        total = _chunk_sum_squares(_at(address, start, GRAD, False), limit, factor, CHUNK, BLOCK)
    tl.store(partial_ptr + tl.program_id(0), total)
    if found_inf_ptr is not None:
        nonfinite = 0
        if not (total < float("inf")):  # finite gradients too can have squares that overflow
            nonfinite = _count_nonfinite(_at(address, start, GRAD, False), limit, CHUNK, BLOCK)
        if nonfinite > 0:
            tl.store(found_inf_ptr, 1.0)


@triton.jit(do_not_specialize=["chunks"])
def grad_norm_finish_kernel(partial_ptr, norm_ptr, chunks, BLOCK: tl.constexpr):
    """Square root of the sum of all partial sums, in fp64, by one program in a fixed order."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, chunks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + at, mask=at < chunks, other=0.0).to(tl.float64)
    tl.store(norm_ptr, tl.sqrt(tl.sum(total, axis=0)).to(tl.float32))


@triton.jit
def _scale_chunk(grad, limit, coef, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        _store(grad, at, _load(grad, at, at < limit) * coef, at < limit)


@triton.jit
def scale_kernel(
    owner_ptr,  # [chunks] int64
    first_ptr,  # [tensors] int64
    numel_ptr,  # [tensors] int64
    grad_ptr,  # [tensors] int64
    coef_ptr,  # [1] fp32
    GRAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply one chunk in place; a coefficient of one touches nothing."""
    coef = tl.load(coef_ptr).to(tl.float32)
    if coef == 1.0:
        return
    tensor, start, limit = _chunk(owner_ptr, first_ptr, numel_ptr, CHUNK)
    address = tl.load(grad_ptr + tensor)
    if (address | limit) % 16 == 0:
        _scale_chunk(_at(address, start, GRAD, True), limit // 16 * 16, coef, CHUNK, BLOCK)
    else:
        _scale_chunk(_at(address, start, GRAD, False), limit, coef, CHUNK, BLOCK)


@triton.jit(do_not_specialize=[f"v{i}" for i in range(16)])
def upload_kernel(
    out_ptr,  # [16] int64
    v0: tl.int64,
    v1: tl.int64,
    v2: tl.int64,
    v3: tl.int64,
    v4: tl.int64,
    v5: tl.int64,
    v6: tl.int64,
    v7: tl.int64,
    v8: tl.int64,
    v9: tl.int64,
    v10: tl.int64,
    v11: tl.int64,
    v12: tl.int64,
    v13: tl.int64,
    v14: tl.int64,
    v15: tl.int64,
):
    """Write sixteen values given as arguments, which a CUDA graph records with the launch."""
    values = (v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15)
    for i in tl.static_range(16):
        tl.store(out_ptr + i, values[i])


launch.refuse_to_compile_while_capturing(list(globals().values()))
