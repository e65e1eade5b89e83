"""Turns logits into probabilities, and probabilities and a draw into a token.

S rows, V tokens, N blocks of a row. A row's probabilities are summed as integers, in units of
2^-52: integers add up to the same in any order, and those of 2^-29 and more are exact.
"""

import triton
import triton.language as tl

FIXED_ONE = tl.constexpr(4503599627370496.0)  # 2^52


@triton.jit
def fixed_point(p):  # type: ignore[no-untyped-def]
    """A probability in fp32 -> int64, in units of 2^-52."""
    return (p.to(tl.float64) * FIXED_ONE).to(tl.int64)


@triton.jit
def block_tops(logits_ptr, tops_ptr, places_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """logits [S, V] -> each block's largest value and its lowest place, [S, N] each.

    Grid (S, N). The top of a block that holds a NaN is NaN.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    place = tl.min(tl.where((x == top) & (at < VOCAB), at, VOCAB - 1), axis=0)
    out = row * tl.num_programs(1) + block
    tl.store(tops_ptr + out, tl.where(has_nan, float("nan"), top))
    tl.store(places_ptr + out, place)


@triton.jit
def top_of_row(tops_ptr, places_ptr, row, NUM_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit of a row, NaN if one is, and its lowest place."""
    n = tl.arange(0, BLOCK_N)
    is_there = n < NUM_BLOCKS
    tops = tl.load(tops_ptr + row * NUM_BLOCKS + n, mask=is_there, other=float("-inf"))
    places = tl.load(places_ptr + row * NUM_BLOCKS + n, mask=is_there, other=2147483647)
    has_nan = tl.max((tops != tops).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)
    first = tl.min(tl.where((tops == top) | (tops != tops), places, 2147483647), axis=0)
    return tl.where(has_nan, float("nan"), top), first


@triton.jit
def pick_tops(  # type: ignore[no-untyped-def]
    tops_ptr, places_ptr, tokens_ptr, is_valid_ptr, NUM_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The likeliest token of each row, and whether its logit is finite. Grid (S,)."""
    row = tl.program_id(0).to(tl.int64)
    top, place = top_of_row(tops_ptr, places_ptr, row, NUM_BLOCKS, BLOCK_N)
    tl.store(tokens_ptr + row, place.to(tl.int64))
    tl.store(is_valid_ptr + row, (tl.abs(top) < float("inf")).to(tl.uint8))


@triton.jit
def weight_of(logits_ptr, temperatures_ptr, top, row, at, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp((logit - top) / temperature) of one block: 1 at the top, 0 beyond the end."""
    x = tl.load(logits_ptr + row * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    temperature = tl.load(temperatures_ptr + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)  # greedy: not drawn from
    return tl.where(at < VOCAB, tl.exp(tl.math.div_rn(x - top, temperature)), 0.0)


@triton.jit
def block_weights(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, tops_ptr, places_ptr, sums_ptr,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of each block's weights [S, N] in fp32, in the order of its layout. Grid (S, N)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    top, _ = top_of_row(tops_ptr, places_ptr, row, NUM_BLOCKS, BLOCK_N)
    weight = weight_of(logits_ptr, temperatures_ptr, top, row, at, VOCAB)
    tl.store(sums_ptr + row * NUM_BLOCKS + block, tl.sum(weight, axis=0))


@triton.jit
def block_probabilities(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, tops_ptr, places_ptr, sums_ptr, probs_ptr, top_probs_ptr,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Probabilities [S, V] in fp32 and each row's largest [S]; all 0 in a faulty row. Grid (S, N).

    A row's total is the sum of its blocks' sums, in the order of their layout.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    top, _ = top_of_row(tops_ptr, places_ptr, row, NUM_BLOCKS, BLOCK_N)
    n = tl.arange(0, BLOCK_N)
    sums = tl.load(sums_ptr + row * NUM_BLOCKS + n, mask=n < NUM_BLOCKS, other=0.0)
    total = tl.sum(sums, axis=0)
    weight = weight_of(logits_ptr, temperatures_ptr, top, row, at, VOCAB)
    p = tl.math.div_rn(weight, total)
    is_valid = (tl.abs(top) < float("inf")) & (total == total)
    tl.store(probs_ptr + row * VOCAB + at, tl.where(is_valid, p, 0.0), mask=at < VOCAB)
    if block == 0:
        tl.store(top_probs_ptr + row, tl.where(is_valid, tl.math.div_rn(1.0, total), 0.0))


@triton.jit
def block_masses(  # type: ignore[no-untyped-def]
    probs_ptr, least_ptr, masses_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, HAS_CUT: tl.constexpr,
):  # fmt: skip
    """The mass of each block's kept tokens, int64 [S, N]. least [S] or null. Grid (S, N)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(probs_ptr + row * VOCAB + at, mask=at < VOCAB, other=0.0)
    if HAS_CUT:
        p = tl.where(p >= tl.load(least_ptr + row), p, 0.0)
    tl.store(masses_ptr + row * tl.num_programs(1) + block, tl.sum(fixed_point(p), axis=0))


@triton.jit
def draw_tokens(  # type: ignore[no-untyped-def]
    probs_ptr, least_ptr, masses_ptr, draws_ptr, tokens_ptr,
    tops_ptr, places_ptr, temperatures_ptr, is_valid_ptr,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CUT: tl.constexpr, HAS_LOGITS: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative mass exceeds draw * total, int64 [S]. Grid (S,).

    draws [S] in fp64 within [0, 1). With logits (`tops` and `places` of their blocks), rows whose
    temperature is 0 take the likeliest token, and is_valid [S] tells whether that is finite.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    masses = tl.load(masses_ptr + row * NUM_BLOCKS + n, mask=n < NUM_BLOCKS, other=0)
    ends = tl.cumsum(masses, axis=0)
    goal = tl.load(draws_ptr + row) * tl.sum(masses, axis=0).to(tl.float64)
    block = tl.min(tl.where(ends.to(tl.float64) > goal, n, NUM_BLOCKS - 1), axis=0)
    start = tl.sum(tl.where(n < block, masses, 0), axis=0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(probs_ptr + row * VOCAB + at, mask=at < VOCAB, other=0.0)
    if HAS_CUT:
        p = tl.where(p >= tl.load(least_ptr + row), p, 0.0)
    cumulative = start + tl.cumsum(fixed_point(p), axis=0)
    is_past = (cumulative.to(tl.float64) > goal) & (at < VOCAB)
    token = tl.min(tl.where(is_past, at, VOCAB - 1), axis=0)
    if HAS_LOGITS:
        top, place = top_of_row(tops_ptr, places_ptr, row, NUM_BLOCKS, BLOCK_N)
        token = tl.where(tl.load(temperatures_ptr + row) > 0, token, place)
        tl.store(is_valid_ptr + row, (tl.abs(top) < float("inf")).to(tl.uint8))
    tl.store(tokens_ptr + row, token.to(tl.int64))
