"""A row: the residual addition and RMSNorm, each optional, in one pass."""

import triton
import triton.language as tl


@triton.jit
def add_and_norm_rows(  # type: ignore[no-untyped-def]
    hidden_ptr, out_ptr, more_ptr, gate_ptr, weight_ptr, sum_ptr, normed_ptr,
    hidden_step, out_step, more_step, multiplier, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_OUT: tl.constexpr, HAS_MORE: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """sum = hidden + multiplier (out + sigmoid(gate) more), normed = RMSNorm(sum) weight.

    hidden, out, more [T, D] with a step between rows; gate [T]; weight [D]; sum and normed [T, D].
    Grid (T,): a program computes one row. The addends are added in fp32, rounded to hidden's dtype,
    added to hidden and rounded again; the norm takes that rounded sum. The sum of squares runs over
    the block in the order of its layout, which depends on D only.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_there = d < WIDTH
    dtype = hidden_ptr.dtype.element_ty
    x = tl.load(hidden_ptr + row * hidden_step + d, mask=is_there, other=0.0).to(tl.float32)
    if HAS_OUT:
        added = tl.load(out_ptr + row * out_step + d, mask=is_there, other=0.0).to(tl.float32)
        if HAS_MORE:
            more = tl.load(more_ptr + row * more_step + d, mask=is_there, other=0.0).to(tl.float32)
            if HAS_GATE:
                gate = tl.load(gate_ptr + row).to(tl.float32)
                more *= tl.math.div_rn(1.0, 1.0 + tl.exp(-gate))
            added += more
        added = (added * multiplier).to(dtype).to(tl.float32)
        total = (x + added).to(dtype)
        tl.store(sum_ptr + row * WIDTH + d, total, mask=is_there)
        x = total.to(tl.float32)
    if HAS_NORM:
        scale = tl.math.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) / WIDTH + eps))
        weight = tl.load(weight_ptr + d, mask=is_there, other=0.0).to(tl.float32)
        normed = (x * scale).to(dtype).to(tl.float32) * weight
        tl.store(normed_ptr + row * WIDTH + d, normed, mask=is_there)
