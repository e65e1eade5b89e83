"""The fitted time of steps, and the prompt tokens that fit into the slack of those that decode."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.engine.service.step_budget import StepBudget, shared_out
from moe_serve.engine.service.step_model import FittedSteps, StepWork, prompt_token_s


def true_s(rows: StepWork) -> float:
    return 0.006 + 4e-5 * rows.num_decoding + 2e-5 * rows.num_prompt + 1e-8 * rows.num_context


def fitted(num_steps: int, noise: float = 0.0) -> FittedSteps:
    model, rng = FittedSteps(), random.Random(1)
    for _ in range(num_steps):
        decoding = rng.randrange(0, 128)
        rows = StepWork(decoding, rng.choice((0, 0, 100, 900)), decoding * rng.randrange(1, 2000))
        model.observe(rows, true_s(rows) * rng.uniform(1 - noise, 1 + noise))
    return model


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.01), (0.2, 0.08)])
def test_it_finds_the_costs(noise: float, tolerance: float) -> None:
    model = fitted(300, noise)
    for rows in (StepWork(1), StepWork(64, 512, 64_000), StepWork(128, 0, 128_000)):
        assert model.seconds(rows) == pytest.approx(true_s(rows), rel=tolerance)
    assert prompt_token_s(model, 64, 960) == pytest.approx(
        true_s(StepWork(64, 960)) / 960, rel=tolerance
    )


def test_a_pause_of_the_machine_hardly_changes_it() -> None:
    model = fitted(100)
    before = model.seconds(StepWork(64, 512))
    model.observe(StepWork(64, 512), 7.0)
    for _ in range(4):
        model.observe(StepWork(64), true_s(StepWork(64)))
    assert model.seconds(StepWork(64, 512)) < 1.2 * before


def test_steps_of_a_new_kind_are_believed() -> None:
    """Only prompts were read so far, so rows that decode seem to cost nothing. Their steps are far
    slower than predicted, which is no pause of the machine."""
    model, decode = FittedSteps(), StepWork(16, 0, 100_000)
    for _ in range(60):
        model.observe(StepWork(0, 1024), 0.03)
        model.observe(StepWork(0, 512), 0.014)
    assert model.seconds(decode) < 1e-3
    for _ in range(40):
        model.observe(decode, 0.012)
        model.observe(StepWork(0, 1024), 0.03)
    assert model.seconds(decode) == pytest.approx(0.012, rel=0.2)
    assert model.seconds(StepWork(0, 1024)) == pytest.approx(0.03, rel=0.2)


def test_one_measurement_is_better_than_none_and_no_cost_is_negative() -> None:
    model = FittedSteps()
    assert not model.is_measured
    model.observe(StepWork(0, 256), 0.011)
    assert model.is_measured and model.seconds(StepWork(0, 256)) == pytest.approx(0.011, rel=0.05)
    for count, seconds in ((10, 0.02), (20, 0.01), (30, 0.005)):  # more rows took less time
        model.observe(StepWork(count), seconds)
    assert model.seconds(StepWork(30)) >= model.seconds(StepWork(10)) > 0.0


def budget(least: int = 64) -> StepBudget:
    class Exact:
        is_measured = True
        seconds = staticmethod(true_s)

        def observe(self, rows: StepWork, seconds: float) -> None:
            raise AssertionError("a budget measures nothing")

    return StepBudget(Exact(), least, 16)


def test_the_budget_is_the_most_that_fits() -> None:
    """(0.006 + 0.04 ms x 10 + 0.02 ms x c) x 1.15 <= 0.02 -> c <= 549.6, in pages 544."""
    assert budget().prompt_tokens(StepWork(10), 0.02, 1000) == 544
    assert budget().prompt_tokens(StepWork(10), 1.0, 1000) == 1000, "all of it fits"
    assert budget().prompt_tokens(StepWork(10), 0.001, 1000) == 64, "prompts must go on"
    assert budget().prompt_tokens(StepWork(10), -5.0, 1000) == 64
    assert budget().prompt_tokens(StepWork(10), None, 1000) == 1000, "no request has a target"
    assert budget(least=50).prompt_tokens(StepWork(10), 0.001, 1000) == 50
    assert budget().prompt_tokens(StepWork(10), 0.001, 20) == 20


@given(st.integers(0, 128), st.floats(0.0, 0.2), st.integers(1, 4096))
def test_a_chunk_keeps_the_slack_and_is_in_pages(
    num_decoding: int, slack_s: float, most: int
) -> None:
    rows = StepWork(num_decoding)
    count = budget().prompt_tokens(rows, slack_s, most)
    assert min(64, most) <= count <= most
    if count > 64:
        assert true_s(StepWork(num_decoding, count)) * 1.15 <= slack_s
    if 64 < count < most:
        assert count % 16 == 0, "off the kernel's tile a chunk takes longer"
        assert true_s(StepWork(num_decoding, count + 16)) * 1.15 > slack_s


@given(st.integers(0, 2000), st.lists(st.integers(0, 900), min_size=1, max_size=6))
def test_ranks_share_a_budget_evenly(total: int, wanted: list[int]) -> None:
    given_out = shared_out(total, wanted, 16)
    assert sum(given_out) == min(total, sum(wanted))
    assert all(got <= most for got, most in zip(given_out, wanted, strict=True))


def test_a_rank_that_wants_little_leaves_the_rest_to_others() -> None:
    assert shared_out(96, [16, 200, 64], 16) == [16, 48, 32]
