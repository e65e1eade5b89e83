"""The next steps of an engine, foreseen one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moe_serve.engine.service.lengths.answer_lengths import AnswerEnds
from moe_serve.engine.service.near_steps import NearSteps, Remaining, Survival

STEPS = NearSteps(step_s=0.01, more_s=0.0001, budget=100.0)  # a full step takes 20 ms
UNKNOWN = Survival(np.zeros(0), np.zeros(0))


def test_a_prompt_is_read_in_whole_steps_after_those_that_go_first() -> None:
    """150 tokens go first: the second step has room for 50 of the 120, the third reads the rest."""
    assert STEPS.first_token_s(150.0, 120.0, 0.0, 0.0, 0.0) == pytest.approx(0.02 + 0.02 + 0.017)
    assert STEPS.first_token_s(0.0, 120.0, 0.0, 0.0, 0.0) == pytest.approx(0.02 + 0.012)
    longer = STEPS.first_token_s(0.0, 120.0, 500.0, 0.0, 0.0)
    assert longer == pytest.approx(0.02 + 0.02), "prompts behind it fill its last step"


def test_steps_go_on_without_a_seat_and_arrivals_go_first() -> None:
    assert STEPS.first_token_s(0.0, 50.0, 0.0, 3.0, 0.0) == pytest.approx(3 * 0.01 + 0.015)
    alone = STEPS.first_token_s(300.0, 50.0, 0.0, 0.0, 0.0)
    passed = STEPS.first_token_s(300.0, 50.0, 0.0, 0.0, 2000.0)
    assert alone is not None and passed is not None and passed > alone
    assert STEPS.first_token_s(101.0, 1.0, 0.0, 0.0, 1e9) is None, "it never has its turn"


def test_a_seat_is_free_when_an_answer_reaches_its_limit() -> None:
    """Answers have 0, 3 and 7 tokens left after the step under way."""
    running = Remaining(np.array([5.0, 2.0, 1.0]), np.array([5.0, 5.0, 8.0]), UNKNOWN)
    assert running.steps_until(0.9, 0.0) == 0.0
    assert 2.0 < running.steps_until(1.9, 0.0) <= 3.0
    assert 6.0 < running.steps_until(2.9, 0.0) <= 7.0
    assert math.isinf(running.steps_until(4.0, 0.0)), "three have seats"
    assert math.isinf(running.steps_until(1.9, 2.0)), "two more come in every step"


def test_answers_that_were_cut_off_do_not_count_as_ended() -> None:
    """Half of all answers end at 10 tokens, the others are cut off at 20."""
    ends = AnswerEnds()
    for number in range(64):
        ends.note(20 if number % 2 else 10, is_complete=not number % 2)
    assert ends.survival.at(np.array([9.0, 10.0, 20.0, 500.0])) == pytest.approx([1, 0.5, 0.5, 0.5])
