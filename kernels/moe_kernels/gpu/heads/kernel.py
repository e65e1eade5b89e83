"""Queries, keys and values of one token: norm, clip, rotate, scale, write into the pages."""

import triton
import triton.language as tl

NO_NORM = tl.constexpr(0)
NORM_BY_HEAD = tl.constexpr(1)
NORM_BY_ROW = tl.constexpr(2)
NORM_AFTER_ROTATION = tl.constexpr(3)


@triton.jit
def shape_heads(  # type: ignore[no-untyped-def]
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, query_scale_ptr, positions_ptr, kv_rows_ptr,
    q_ptr, keys_ptr, values_ptr, qkv_step, eps, clip,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NORM: tl.constexpr, HAS_CLIP: tl.constexpr,
    HAS_QUERY_SCALE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """qkv [T, (H + Hkv) D + Hkv Dv] -> q [T, H, D], and rows of keys [.., D] and values [.., Dv].

    kv_rows [T, Hkv]; a negative row is not written. cos and sin [P, R], the minus of the first half
    being in the sine. Grid (T, blocks of query heads + blocks of key heads + as many for values): a
    program takes BLOCK_H heads of one token. Sums of squares run over a head, or over the whole row
    block after block, in an order that depends on the attention's shape only.
    """
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    Q_SIZE: tl.constexpr = NUM_HEADS * HEAD_DIM
    K_SIZE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_ptr = qkv_ptr + token * qkv_step
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_ptr += position * ROTARY_DIM
    sin_ptr += position * ROTARY_DIM
    d = tl.arange(0, BLOCK_D)[None, :]
    if part < Q_BLOCKS:
        h = (part * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        q = shape_block(row_ptr, q_norm_ptr, cos_ptr, sin_ptr, h, d, eps, clip, NUM_HEADS,
                        HEAD_DIM, ROTARY_DIM, NORM, HAS_CLIP, BLOCK_H, BLOCK_D)  # fmt: skip
        if HAS_QUERY_SCALE:
            q *= tl.load(query_scale_ptr + position)
        is_there = (h < NUM_HEADS) & (d < HEAD_DIM)
        tl.store(q_ptr + token * Q_SIZE + h * HEAD_DIM + d, q, mask=is_there)
    elif part < Q_BLOCKS + K_BLOCKS:
        h = ((part - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        k = shape_block(row_ptr + Q_SIZE, k_norm_ptr, cos_ptr, sin_ptr, h, d, eps, clip,
                        NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, NORM, HAS_CLIP, BLOCK_H,
                        BLOCK_D)  # fmt: skip
        page_row = tl.load(kv_rows_ptr + token * NUM_KV_HEADS + h, mask=h < NUM_KV_HEADS, other=-1)
        is_there = (page_row >= 0) & (d < HEAD_DIM)
        tl.store(keys_ptr + page_row.to(tl.int64) * HEAD_DIM + d, k, mask=is_there)
    else:
        h = ((part - Q_BLOCKS - K_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        dv = tl.arange(0, BLOCK_V)[None, :]
        is_value = (h < NUM_KV_HEADS) & (dv < VALUE_DIM)
        at = row_ptr + Q_SIZE + K_SIZE + h * VALUE_DIM + dv
        v = tl.load(at, mask=is_value, other=0.0).to(tl.float32)
        if HAS_CLIP:
            v = clip_values(v, clip)
        page_row = tl.load(kv_rows_ptr + token * NUM_KV_HEADS + h, mask=h < NUM_KV_HEADS, other=-1)
        is_value = (page_row >= 0) & (dv < VALUE_DIM)
        tl.store(values_ptr + page_row.to(tl.int64) * VALUE_DIM + dv, v, mask=is_value)


@triton.jit
def shape_latents(  # type: ignore[no-untyped-def]
    q_latent_ptr, q_rope_ptr, latent_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, kv_rows_ptr,
    q_ptr, keys_ptr, q_latent_token_step, q_latent_head_step, q_rope_token_step, q_rope_head_step,
    latent_step, eps, NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Latent attention: latent [T, L + R] -> rows of keys [.., L + R]; q [T, H, L + R] is joined
    from q_latent [T, H, L] and the rotated q_rope [T, H, R].

    kv_rows [T]; a negative row is not written. Grid (T, 1 + blocks of heads): the first program of
    a token norms its latent and rotates the shared key, the others join BLOCK_H heads each. The
    sum of squares runs over the latent in the order of its layout, which depends on L only.
    """
    WIDTH: tl.constexpr = LATENT_DIM + ROPE_DIM
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_ptr += position * ROPE_DIM
    sin_ptr += position * ROPE_DIM
    r = tl.arange(0, BLOCK_R)[None, :]
    if part == 0:
        page_row = tl.load(kv_rows_ptr + token).to(tl.int64)
        row_ptr = latent_ptr + token * latent_step
        key_ptr = keys_ptr + page_row * WIDTH
        at = tl.arange(0, BLOCK_L)
        latent = tl.load(row_ptr + at, mask=at < LATENT_DIM, other=0.0).to(tl.float32)
        scale = tl.math.div_rn(1.0, tl.sqrt_rn(tl.sum(latent * latent, axis=0) / LATENT_DIM + eps))
        weight = tl.load(norm_ptr + at, mask=at < LATENT_DIM, other=0.0).to(tl.float32)
        latent = (latent * scale).to(latent_ptr.dtype.element_ty).to(tl.float32) * weight
        tl.store(key_ptr + at, latent, mask=(at < LATENT_DIM) & (page_row >= 0))
        is_rope = (r < ROPE_DIM) & (page_row >= 0)
        key_at = row_ptr + LATENT_DIM
        key = tl.load(key_at + r, mask=is_rope, other=0.0).to(tl.float32)
        key_pair = tl.load(key_at + partner(r, ROPE_DIM), mask=is_rope, other=0.0).to(tl.float32)
        key = rotate(key, key_pair, cos_ptr, sin_ptr, r, ROPE_DIM)
        tl.store(key_ptr + LATENT_DIM + r, key, mask=is_rope)
    else:
        h = ((part - 1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        is_there = (h < NUM_HEADS) & (r < ROPE_DIM)
        out_ptr = q_ptr + (token * NUM_HEADS + h) * WIDTH
        rope_ptr = q_rope_ptr + token * q_rope_token_step + h * q_rope_head_step
        q = tl.load(rope_ptr + r, mask=is_there, other=0.0).to(tl.float32)
        swapped = tl.load(rope_ptr + partner(r, ROPE_DIM), mask=is_there, other=0.0).to(tl.float32)
        q = rotate(q, swapped, cos_ptr, sin_ptr, r, ROPE_DIM)
        tl.store(out_ptr + LATENT_DIM + r, q, mask=is_there)
        from_ptr = q_latent_ptr + token * q_latent_token_step + h * q_latent_head_step
        for start in range(0, LATENT_DIM, BLOCK_R):
            is_copied = (h < NUM_HEADS) & (start + r < LATENT_DIM)
            part_of_q = tl.load(from_ptr + start + r, mask=is_copied)
            tl.store(out_ptr + start + r, part_of_q, mask=is_copied)


@triton.jit
def shape_block(  # type: ignore[no-untyped-def]
    row_ptr, weight_ptr, cos_ptr, sin_ptr, h, d, eps, clip,
    NUM: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NORM: tl.constexpr,
    HAS_CLIP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of query or key heads [BLOCK_H, BLOCK_D] in fp32, normed, clipped and rotated.

    Each value is loaded with the one that it is rotated with, and both go through the same steps.
    """
    dtype = row_ptr.dtype.element_ty
    is_there = (h < NUM) & (d < HEAD_DIM)
    pair = partner(d, ROTARY_DIM)
    x = tl.load(row_ptr + h * HEAD_DIM + d, mask=is_there, other=0.0).to(tl.float32)
    y = tl.load(row_ptr + h * HEAD_DIM + pair, mask=is_there, other=0.0).to(tl.float32)
    if NORM == NORM_BY_ROW:
        squares = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
        for start in range(0, NUM, BLOCK_H):
            head = start + tl.arange(0, BLOCK_H)[:, None]
            is_head = (head < NUM) & (d < HEAD_DIM)
            other = tl.load(row_ptr + head * HEAD_DIM + d, mask=is_head, other=0.0).to(tl.float32)
            squares += other * other
        mean = tl.sum(tl.sum(squares, axis=1), axis=0) / (NUM * HEAD_DIM)
        scale = tl.math.div_rn(1.0, tl.sqrt_rn(mean + eps))
        weight_x = tl.load(weight_ptr + h * HEAD_DIM + d, mask=is_there, other=0.0).to(tl.float32)
        weight_y = tl.load(weight_ptr + h * HEAD_DIM + pair, mask=is_there, other=0.0)
        x = ((x * scale).to(dtype).to(tl.float32) * weight_x).to(dtype).to(tl.float32)
        y = (y * scale).to(dtype).to(tl.float32) * weight_y.to(tl.float32)
        y = y.to(dtype).to(tl.float32)
    if HAS_CLIP:
        x, y = clip_values(x, clip), clip_values(y, clip)
    if NORM == NORM_BY_HEAD:
        weight_x = tl.load(weight_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        scale = tl.math.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) / HEAD_DIM + eps))[:, None]
        weight_y = tl.load(weight_ptr + pair, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * weight_x).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * weight_y).to(dtype).to(tl.float32)
    x = rotate(x, y, cos_ptr, sin_ptr, d, ROTARY_DIM)
    if NORM == NORM_AFTER_ROTATION:
        weight_x = tl.load(weight_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        scale = tl.math.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) / HEAD_DIM + eps))[:, None]
        x = x * scale * weight_x
    return x


@triton.jit
def partner(d, ROTARY_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the partner of each value in the rotation: the same place of the other half."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    return tl.where(d < HALF, d + HALF, tl.where(d < ROTARY_DIM, d - HALF, d))


@triton.jit
def rotate(x, y, cos_ptr, sin_ptr, d, ROTARY_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """x cos + y sin of the first ROTARY_DIM values; the rest of a head is left as it is."""
    cos = tl.load(cos_ptr + d, mask=d < ROTARY_DIM, other=1.0)
    sin = tl.load(sin_ptr + d, mask=d < ROTARY_DIM, other=0.0)
    return tl.where(d < ROTARY_DIM, x * cos + y * sin, x)


@triton.jit
def clip_values(x, bound):  # type: ignore[no-untyped-def]
    """Within [-bound, bound]; a NaN stays one."""
    x = tl.where(x > bound, bound, x)
    return tl.where(x < -bound, -bound, x)
