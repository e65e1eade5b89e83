"""One row of the router: scores, the best experts of the best groups, their weights, counts."""

import triton
import triton.language as tl


@triton.jit
def route_rows(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, logits_step, renorm_floor, scaling,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_KEPT: tl.constexpr, IS_TOP2: tl.constexpr, IS_SIGMOID: tl.constexpr,
    IS_RENORMALISED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_COUNTS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Logits [T, E] in fp32 -> ids and weights [T, K], counts [E] += 1 for each choice.

    Grid (T,): a program computes one row. Place i of the block stands for expert i % BLOCK_S of
    group i // BLOCK_S, so places ascend with expert ids and a group is a row of the block. Sums
    run over the block in the order of its layout, which depends on the router's shape only.
    A NaN is never chosen before a number, but ids are valid and distinct whatever the logits.
    """
    BLOCK: tl.constexpr = BLOCK_G * BLOCK_S
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    NEVER: tl.constexpr = float("-inf")
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    within = place % BLOCK_S
    is_expert = (place // BLOCK_S < NUM_GROUPS) & (within < GROUP_SIZE)
    expert = place // BLOCK_S * GROUP_SIZE + within
    logits = tl.load(logits_ptr + row * logits_step + expert, mask=is_expert, other=NEVER)
    if IS_SIGMOID:
        scores = tl.math.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        top = tl.max(tl.where(logits == logits, logits, NEVER), axis=0)
        raised = tl.exp(logits - top)  # a NaN stays one, and makes the row's weights NaN
        raised = tl.where(is_expert, raised, 0.0)
        scores = tl.math.div_rn(raised, tl.sum(raised, axis=0))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    choice = tl.where(is_expert & (choice == choice), choice, NEVER)
    if NUM_GROUPS > 1:
        choice = keep_best_groups(choice, NUM_GROUPS, NUM_GROUPS_KEPT, IS_TOP2, BLOCK_G, BLOCK_S)
    is_chosen = mark_largest(choice, is_expert, place, TOP_K, BLOCK)
    rank = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    weights = scores
    if IS_RENORMALISED:
        total = tl.sum(tl.where(is_chosen, scores, 0.0), axis=0)
        weights = tl.math.div_rn(scores, tl.maximum(total, renorm_floor))
    at = row * TOP_K + rank
    tl.store(ids_ptr + at, expert.to(ids_ptr.dtype.element_ty), mask=is_chosen)
    tl.store(weights_ptr + at, weights * scaling, mask=is_chosen)
    if HAS_COUNTS:  # integers: any order gives the same counts
        tl.atomic_add(counts_ptr + expert, 1, mask=is_chosen, sem="relaxed")


@triton.jit
def mark_largest(values, is_there, place, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Marks the COUNT largest values of those that are there, the lower place where equal."""
    is_marked = place < 0
    is_left = is_there
    for _ in range(COUNT):
        top = tl.max(tl.where(is_left, values, float("-inf")), axis=0)
        best = tl.min(tl.where(is_left & (values == top), place, BLOCK), axis=0)
        is_marked = is_marked | (place == best)
        is_left = is_left & (place != best)
    return is_marked


@triton.jit
def keep_best_groups(  # type: ignore[no-untyped-def]
    choice,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    IS_TOP2: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """-inf for the experts of groups that are not among the best."""
    NEVER: tl.constexpr = float("-inf")
    choice_GS = tl.reshape(choice, (BLOCK_G, BLOCK_S))
    group_score = tl.max(choice_GS, axis=1)
    if IS_TOP2:
        within = tl.arange(0, BLOCK_S)[None, :]
        first = tl.min(tl.where(choice_GS == group_score[:, None], within, BLOCK_S), axis=1)
        others = tl.where(within == first[:, None], NEVER, choice_GS)
        group_score += tl.max(others, axis=1)
    group = tl.arange(0, BLOCK_G)
    is_kept = mark_largest(group_score, group < NUM_GROUPS, group, NUM_KEPT, BLOCK_G)
    return tl.reshape(tl.where(is_kept[:, None], choice_GS, NEVER), (BLOCK_G * BLOCK_S,))
