"""Finds the cut of min_p, top-k and top-p without sorting: the least probability a row keeps.

Probabilities are compared by their bits, which ascend with them. A histogram over eighths of an
octave tells which of a row's largest values fit into a small buffer; the cut is then searched among
those, and over the whole row only if it turns out to lie below them.
"""

import triton
import triton.language as tl

from moe_kernels.gpu.sampling.kernel import fixed_point

NUM_BINS = tl.constexpr(256)
FIRST_BIN_BITS = tl.constexpr((127 - 32) << 23)  # of 2^-32; smaller values are in bin 0
BIN_SHIFT = tl.constexpr(20)  # eight bins per octave


@triton.jit
def bits_of(p):  # type: ignore[no-untyped-def]
    """Returns the bits of values of at least 0: integers in the order of the values."""
    return p.to(tl.int32, bitcast=True)


@triton.jit
def count_probabilities(  # type: ignore[no-untyped-def]
    probs_ptr, top_probs_ptr, min_ps_ptr, bins_ptr, masses_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """probs [S, V] -> bins [S, 256] += tokens of each size, masses [S, N] of those above min_p.

    Grid (S, N). Counts and masses are integers: any order of additions gives the same.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    is_there = at < VOCAB
    p = tl.load(probs_ptr + row * VOCAB + at, mask=is_there, other=0.0)
    floor = tl.load(min_ps_ptr + row) * tl.load(top_probs_ptr + row)
    mass = tl.sum(tl.where(p >= floor, fixed_point(p), 0), axis=0)
    tl.store(masses_ptr + row * tl.num_programs(1) + block, mass)
    place = tl.maximum(bits_of(p) - FIRST_BIN_BITS, 0) >> BIN_SHIFT
    counts = tl.histogram(tl.minimum(place, NUM_BINS - 1), NUM_BINS, mask=is_there)
    b = tl.arange(0, NUM_BINS)
    tl.atomic_add(bins_ptr + row * NUM_BINS + b, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def candidate_edge(bins_ptr, row, CAPACITY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of the lowest bin's edge such that all tokens from there on fit into the buffer."""
    b = tl.arange(0, NUM_BINS)
    counts = tl.load(bins_ptr + row * NUM_BINS + b)
    from_here = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    first = tl.sum((from_here > CAPACITY).to(tl.int32), axis=0)
    edge = FIRST_BIN_BITS + (first << BIN_SHIFT)
    return tl.where(first == 0, 0, tl.where(first == NUM_BINS, 2147483647, edge))


@triton.jit
def gather_candidates(  # type: ignore[no-untyped-def]
    probs_ptr, bins_ptr, nums_ptr, candidates_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The largest probabilities of each row [S, C] in any order, and nums [S] += how many.

    Grid (S, N). The use of the values does not depend on their order.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    edge = candidate_edge(bins_ptr, row, CAPACITY)
    at = block * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(probs_ptr + row * VOCAB + at, mask=at < VOCAB, other=0.0)
    is_large = ((bits_of(p) >= edge) & (at < VOCAB)).to(tl.int32)
    num = tl.sum(is_large, axis=0)
    if num > 0:
        start = tl.atomic_add(nums_ptr + row, num, sem="relaxed")
        place = row * CAPACITY + start + tl.cumsum(is_large, axis=0) - 1
        tl.store(candidates_ptr + place, p, mask=is_large > 0)


@triton.jit
def find_cuts(  # type: ignore[no-untyped-def]
    probs_ptr, candidates_ptr, nums_ptr, bins_ptr, masses_ptr, top_probs_ptr,
    min_ps_ptr, top_ks_ptr, top_ps_ptr, least_ptr,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """least [S]: the cut by min_p, then top-k, then top-p of what is left. Grid (S,).

    min_p [S] in fp32, top-k [S] in int32 (0: all), top-p [S] in fp64 (1: all). The likeliest token
    always stays, and so does what ties with the last one kept.
    """
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_ps_ptr + row)
    k = tl.load(top_ks_ptr + row)
    has_top_k = (k > 0) & (k < VOCAB)
    top_prob = tl.load(top_probs_ptr + row)
    top = bits_of(top_prob)
    floor = bits_of(tl.load(min_ps_ptr + row) * top_prob)
    n = tl.arange(0, BLOCK_N)
    masses = tl.load(masses_ptr + row * NUM_BLOCKS + n, mask=n < NUM_BLOCKS, other=0)
    total = tl.sum(masses, axis=0)
    num = tl.load(nums_ptr + row)
    largest_ptr = candidates_ptr + row * CAPACITY
    _, _, _, mass, _, _ = at_least(largest_ptr, num, floor, floor, floor, CAPACITY)
    is_enough = mass.to(tl.float64) >= top_p * total.to(tl.float64)
    is_enough = tl.where(has_top_k, k <= num, is_enough & (num > 0))
    if is_enough | (candidate_edge(bins_ptr, row, CAPACITY) <= floor):
        data_ptr, size = largest_ptr, num
    else:
        data_ptr, size = probs_ptr + row * VOCAB, num * 0 + VOCAB
    cut = floor
    if has_top_k:
        cut = kth_largest(data_ptr, size, k, floor, top, CAPACITY)
        num_at, num_above, _, _, mass_above, _ = at_least(
            data_ptr, size, cut, cut + 1, cut + 1, CAPACITY
        )
        num_equal = tl.minimum(k, num_at) - num_above
        total = mass_above + num_equal * fixed_point(cut.to(tl.float32, bitcast=True))
    if top_p < 1.0:
        cut = nucleus(data_ptr, size, top_p * total.to(tl.float64), cut, top, CAPACITY)
    tl.store(least_ptr + row, cut.to(tl.float32, bitcast=True))


@triton.jit
def at_least(data_ptr, size, t1, t2, t3, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts the values with at least the bits t1, t2 and t3, and sums them; no value is
    negative."""
    n1 = tl.zeros((CHUNK,), dtype=tl.int32)
    n2, n3 = n1, n1
    m1 = tl.zeros((CHUNK,), dtype=tl.int64)
    m2, m3 = m1, m1
    for start in range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        p = tl.load(data_ptr + at, mask=at < size, other=-1.0)
        mass = fixed_point(p)
        n1, m1 = n1 + (bits_of(p) >= t1).to(tl.int32), m1 + tl.where(bits_of(p) >= t1, mass, 0)
        n2, m2 = n2 + (bits_of(p) >= t2).to(tl.int32), m2 + tl.where(bits_of(p) >= t2, mass, 0)
        n3, m3 = n3 + (bits_of(p) >= t3).to(tl.int32), m3 + tl.where(bits_of(p) >= t3, mass, 0)
    return (
        tl.sum(n1, axis=0), tl.sum(n2, axis=0), tl.sum(n3, axis=0),
        tl.sum(m1, axis=0), tl.sum(m2, axis=0), tl.sum(m3, axis=0),
    )  # fmt: skip


@triton.jit
def kth_largest(data_ptr, size, k, floor, top, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest bits that k values reach, or bits between the k-th and the next; at least floor.

    k values reach lo, or lo is the floor; fewer reach hi. Each round looks at three places between.
    """
    lo, hi = floor, top + 1
    num_lo = k + 1
    while (hi - lo > 1) & (num_lo != k):
        step = tl.maximum((hi - lo) // 4, 1)
        t1, t2, t3 = lo + step, tl.minimum(lo + 2 * step, hi), tl.minimum(lo + 3 * step, hi)
        n1, n2, n3, _, _, _ = at_least(data_ptr, size, t1, t2, t3, CHUNK)
        below_1, below_2, below_3 = n1 < k, n2 < k, n3 < k
        hi = tl.where(below_1, t1, tl.where(below_2, t2, tl.where(below_3, t3, hi)))
        lo = tl.where(below_1, lo, tl.where(below_2, t1, tl.where(below_3, t2, t3)))
        num_lo = tl.where(below_1, num_lo, tl.where(below_2, n1, tl.where(below_3, n2, n3)))
    return lo


@triton.jit
def nucleus(data_ptr, size, goal, cut, top, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest bits, from `cut` on, above which less than `goal` lies; at most top.

    That holds for hi, and not for lo or lo is below the cut. Once a single value lies in (lo, hi],
    it is the last one kept: what is above it is above hi.
    """
    goal = tl.maximum(goal, 1.0)  # nothing lies above the top: it stays even with top_p 0
    lo, hi = cut - 1, top
    num_lo, num_hi = size + 1, size * 0
    while (hi - lo > 1) & (num_lo - num_hi > 1):
        step = tl.maximum((hi - lo) // 4, 1)
        t1, t2, t3 = lo + step, tl.minimum(lo + 2 * step, hi), tl.minimum(lo + 3 * step, hi)
        n1, n2, n3, m1, m2, m3 = at_least(data_ptr, size, t1 + 1, t2 + 1, t3 + 1, CHUNK)
        is_1, is_2 = m1.to(tl.float64) < goal, m2.to(tl.float64) < goal
        is_3 = m3.to(tl.float64) < goal
        hi = tl.where(is_1, t1, tl.where(is_2, t2, tl.where(is_3, t3, hi)))
        num_hi = tl.where(is_1, n1, tl.where(is_2, n2, tl.where(is_3, n3, num_hi)))
        lo = tl.where(is_1, lo, tl.where(is_2, t1, tl.where(is_3, t2, t3)))
        num_lo = tl.where(is_1, num_lo, tl.where(is_2, n1, tl.where(is_3, n2, n3)))
    return lo + 1
