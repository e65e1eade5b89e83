"""Predicted limits of answers: what recent answers of a tier say, and when they say nothing."""

from __future__ import annotations

import math

import pytest

from moe_serve.config.tiers import TierConfig
from moe_serve.engine.service.lengths.answer_lengths import OutputLimits

TIERS = (TierConfig(name="chat", predicted_output_limit=2.5), TierConfig(name="flex"))


def limits_after(*answers: tuple[int, bool], tier: int = 0) -> OutputLimits:
    """Returns the limits after answers of (length, is complete)."""
    limits = OutputLimits(TIERS)
    for length, is_complete in answers:
        limits.note(tier, length, is_complete=is_complete)
    return limits


def test_the_limit_is_a_factor_times_the_p90_of_the_tier() -> None:
    lengths = [(1 + index % 100, True) for index in range(400)]
    assert limits_after(*lengths).of(0) == math.ceil(2.5 * 91)
    assert limits_after(*lengths).of(1) == math.inf, "of another tier nothing is known"
    assert limits_after(*lengths, tier=1).snapshot() == (math.inf, math.inf), "it has no setting"


def test_a_few_runaways_do_not_raise_it() -> None:
    """With one answer in twenty of them, also if they are all cut off at the limit itself."""
    lengths = [(250, False) if index % 20 == 7 else (100, True) for index in range(512)]
    assert limits_after(*lengths).of(0) == 250


@pytest.mark.parametrize(
    "answers",
    [
        [(10, True)] * 63,
        [(8, False)] * 460 + [(10, True)] * 52,  # nearly all are only known to be longer than 8
        [(10, True), (1000, False)] * 256,  # half of them: what is the P90 then?
    ],
)
def test_there_is_none_while_too_little_is_known(answers: list[tuple[int, bool]]) -> None:
    assert limits_after(*answers).of(0) == math.inf


def test_it_forgets_old_answers() -> None:
    assert limits_after(*[(1000, True)] * 512, *[(10, True)] * 512).of(0) == 25
