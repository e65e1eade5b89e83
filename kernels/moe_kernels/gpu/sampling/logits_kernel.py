"""Changes and reads single logits, and makes the random numbers that tokens are drawn with.

S rows, V tokens, N blocks of a row.
"""

import triton
import triton.language as tl

PHILOX_A = tl.constexpr(0xD2E7470EE14C6C93)
PHILOX_B = tl.constexpr(0xCA5A826395121157)
WEYL_A = tl.constexpr(0x9E3779B97F4A7C15)
WEYL_B = tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit(do_not_specialize=["num_entries"])
def adjust_logits(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, tokens_ptr, biases_ptr, counts_ptr, is_seen_ptr,
    repetitions_ptr, presences_ptr, frequencies_ptr, num_entries,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bias and penalties of single tokens, in place. An entry is one token of one row, once.

    logits [S, V]; entries [M] of row, token, bias, count in the answer, whether seen in prompt or
    answer; penalties [S]. A bias of -inf bans the token, NaN or not. Grid (blocks of entries,).
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = i < num_entries
    row = tl.load(rows_ptr + i, mask=is_there, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + i, mask=is_there, other=0).to(tl.int64)
    count = tl.load(counts_ptr + i, mask=is_there, other=0).to(tl.float32)
    is_seen = tl.load(is_seen_ptr + i, mask=is_there, other=0) != 0
    repetition = tl.load(repetitions_ptr + row, mask=is_there, other=1.0)
    presence = tl.load(presences_ptr + row, mask=is_there, other=0.0)
    frequency = tl.load(frequencies_ptr + row, mask=is_there, other=0.0)
    at = logits_ptr + row * VOCAB + token
    x = tl.load(at, mask=is_there, other=0.0)
    bias = tl.load(biases_ptr + i, mask=is_there, other=0.0)
    x += bias
    repeated = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
    x = tl.where(is_seen & (repetition != 1.0), repeated, x)
    x = tl.where(count > 0, x - (frequency * count + presence), x)
    tl.store(at, tl.where(bias == float("-inf"), float("-inf"), x), mask=is_there)


@triton.jit
def block_logprobs(  # type: ignore[no-untyped-def]
    logits_ptr, tokens_ptr, tops_ptr, sums_ptr, counts_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each block's top, sum of exp(x - top), and how many logits exceed the token's; [S, N] each.

    logits [S, V], tokens [S]. Grid (S, N). Sums run in the order of the block's layout.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    chosen = tl.load(logits_ptr + row * VOCAB + tl.load(tokens_ptr + row))
    top = tl.max(x, axis=0)
    shifted = tl.where(x == float("-inf"), float("-inf"), x - top)
    out = row * tl.num_programs(1) + block
    tl.store(tops_ptr + out, top)
    tl.store(sums_ptr + out, tl.sum(tl.exp(shifted), axis=0))
    tl.store(counts_ptr + out, tl.sum((x > chosen).to(tl.int32), axis=0))


@triton.jit
def join_logprobs(  # type: ignore[no-untyped-def]
    logits_ptr, tokens_ptr, tops_ptr, sums_ptr, counts_ptr, logprobs_ptr, ranks_ptr,
    row_tops_ptr, log_totals_ptr,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The blocks' parts -> each token's log probability (fp32), its rank from 1 on, the row's
    largest logit and the logarithm of its total. Grid (S,).
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    at = row * NUM_BLOCKS + n
    tops = tl.load(tops_ptr + at, mask=n < NUM_BLOCKS, other=float("-inf"))
    sums = tl.load(sums_ptr + at, mask=n < NUM_BLOCKS, other=0.0)
    counts = tl.load(counts_ptr + at, mask=n < NUM_BLOCKS, other=0)
    top = tl.max(tops, axis=0)
    total = tl.sum(tl.where(tops == float("-inf"), 0.0, sums * tl.exp(tops - top)), axis=0)
    chosen = tl.load(logits_ptr + row * VOCAB + tl.load(tokens_ptr + row))
    tl.store(row_tops_ptr + row, top)
    tl.store(log_totals_ptr + row, tl.log(total))
    tl.store(logprobs_ptr + row, chosen - top - tl.log(total))
    tl.store(ranks_ptr + row, tl.sum(counts, axis=0) + 1)


@triton.jit(do_not_specialize=["num_rows"])
def draw_uniform(  # type: ignore[no-untyped-def]
    seeds_ptr, choices_ptr, positions_ptr, draws_ptr, num_rows, BLOCK: tl.constexpr
):
    """One number in [0, 1) from (seed, choice, position): the first 53 bits of Philox 4x64-10.

    All int64 [S] -> fp64 [S]. Grid (blocks of rows,). The key is (seed, choice); the counter is the
    position + 1, since numpy's generator steps it before its first number.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = i < num_rows
    key_a = tl.load(seeds_ptr + i, mask=is_there, other=0).to(tl.uint64, bitcast=True)
    key_b = tl.load(choices_ptr + i, mask=is_there, other=0).to(tl.uint64, bitcast=True)
    c0 = (tl.load(positions_ptr + i, mask=is_there, other=0) + 1).to(tl.uint64, bitcast=True)
    c1 = tl.zeros((BLOCK,), dtype=tl.uint64)
    c2, c3 = c1, c1
    times_a = tl.full((BLOCK,), PHILOX_A, tl.uint64)
    times_b = tl.full((BLOCK,), PHILOX_B, tl.uint64)
    step_a = tl.full((BLOCK,), WEYL_A, tl.uint64)
    step_b = tl.full((BLOCK,), WEYL_B, tl.uint64)
    for _ in tl.static_range(10):
        high_a, high_b = tl.umulhi(times_a, c0), tl.umulhi(times_b, c2)
        low_a, low_b = times_a * c0, times_b * c2
        c0, c1, c2, c3 = high_b ^ c1 ^ key_a, low_b, high_a ^ c3 ^ key_b, low_a
        key_a += step_a
        key_b += step_b
    draw = (c0 >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)
    tl.store(draws_ptr + i, draw, mask=is_there)
