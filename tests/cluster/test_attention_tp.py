"""Attention ranks of several processes: the same tokens as one process, and one common end."""

from __future__ import annotations

from functools import cache

import pytest

from layouts import Answer, colocated, config, on_ranks, requests

VOCAB_SIZE = 4096  # of the demonstration model
NUM_REQUESTS = 7


@cache
def expected() -> dict[str, Answer]:
    return colocated(config(0, 0), requests(NUM_REQUESTS, VOCAB_SIZE))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("attention", "experts", "count"), [(1, 1, 2), (1, 1, 4), (2, 2, 2), (2, 1, 4), (1, 2, 2)]
)
def test_the_tokens_do_not_change(
    attention: int, experts: int, count: int, micro_batches: int
) -> None:
    of = config(attention, experts, micro_batches, attention_tp=count)
    answers = on_ranks(of, requests(NUM_REQUESTS, VOCAB_SIZE))
    assert answers == expected(), f"{attention}A{experts}E, {count} shards, m = {micro_batches}"


def test_experts_may_choose() -> None:
    of = config(1, 2, 2, attention_tp=2, router="experts")
    assert on_ranks(of, requests(NUM_REQUESTS, VOCAB_SIZE)) == expected()
