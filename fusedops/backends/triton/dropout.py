# mypy: disable-error-code="no-untyped-def"
"""What dropout multiplies elements with, in Triton: bit for bit what ``fusedops.ops.dropout`` says."""

import triton
import triton.language as tl


@triton.jit
def _philox(c0, c1, c2, c3, key0, key1):
    """Philox-4x32-10; all are uint32."""
    even = tl.full([1, 1], 0xD2511F53, tl.uint32)
    odd = tl.full([1, 1], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        even_high, odd_high = tl.umulhi(even, c0), tl.umulhi(odd, c2)
        even_low, odd_low = even * c0, odd * c2
        c0, c1 = odd_high ^ c1 ^ key0, odd_low
        c2, c3 = even_high ^ c3 ^ key1, even_low
        key0 += tl.full([1, 1], 0x9E3779B9, tl.uint32)
        key1 += tl.full([1, 1], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def dropout_factor(seed_ptr, threshold, scale, row, start, COLUMNS: tl.constexpr):
    """[len(row), COLUMNS] fp32 from column ``start`` on, which is a multiple of 4; ``row`` is int64.

    ``threshold`` holds the bits of a uint32.
    """
    GROUPS: tl.constexpr = COLUMNS // 4 if COLUMNS >= 4 else 1
    group = (start // 4 + tl.arange(0, GROUPS)).to(tl.uint32)[None, :]
    key = tl.load(seed_ptr + tl.zeros([1, 1], tl.int32))
    zero = tl.zeros([row.shape[0], GROUPS], tl.uint32)
    w0, w1, w2, w3 = _philox(
        zero + group,
        zero + row.to(tl.uint32)[:, None],
        zero + (row >> 32).to(tl.uint32)[:, None],
        zero + tl.load(seed_ptr + tl.full([1, 1], 1, tl.int32)).to(tl.uint32),
        key.to(tl.uint32),
        (key >> 32).to(tl.uint32),
    )
    if COLUMNS >= 4:
        word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(row.shape[0], COLUMNS)
    else:
        word = tl.where(tl.arange(0, COLUMNS)[None, :] == 0, w0, w1)
    least = tl.cast(threshold, tl.int32).to(tl.uint32, bitcast=True)
    return tl.where(word >= least, tl.cast(scale, tl.float32), 0.0)  # Inductor may declare it as fp64
