"""Estimates of answer lengths: cut answers are lower bounds, and never make estimates short."""

from __future__ import annotations

import random

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.service.lengths.answer_lengths import TierLengths
from tests.support.engine.timed_engine import FLEX, request, service_of


def answered(num_tokens: int, max_tokens: int = 1000) -> Sequence:
    made = request("r", service_of(FLEX), num_prompt=2, num_answer=max_tokens, token=1)
    sequence = Sequence(0, made)
    for _ in range(num_tokens):
        sequence.append(1)
    return sequence


def test_answers_that_were_cut_short_do_not_make_the_estimate_short() -> None:
    """ForeLen's remark: a predictor that learns from truncated answers predicts truncated ones."""
    rng, lengths = random.Random(0), TierLengths(1)
    for _ in range(300):
        lengths.note(answered(rng.randrange(100, 201)), 0, is_complete=True)
        lengths.note(answered(8, max_tokens=8), 0, is_complete=False)
    assert 180 <= lengths.p90(answered(0), 0) <= 200
    assert lengths.p90(answered(0, max_tokens=50), 0) == 50, "never more than is allowed"


def test_answers_that_were_cut_late_make_it_longer() -> None:
    lengths = TierLengths(1)
    for _ in range(40):
        lengths.note(answered(20), 0, is_complete=True)
    assert lengths.p90(answered(0), 0) == 20
    for _ in range(40):
        lengths.note(answered(600, max_tokens=600), 0, is_complete=False)
    assert lengths.p90(answered(0), 0) > 500


def test_tiers_are_estimated_apart() -> None:
    lengths = TierLengths(2)
    for _ in range(40):
        lengths.note(answered(20), 0, is_complete=True)
    assert lengths.p90(answered(0), 1) > 100
