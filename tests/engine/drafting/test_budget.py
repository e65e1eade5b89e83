"""The number of drafted tokens follows from their cost and their acceptance rate."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.engine.drafting.acceptance import Acceptance
from moe_serve.engine.drafting.allowance import DraftingAllowance
from moe_serve.engine.drafting.budget import choose_lengths, with_certain
from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.drafting.patience import Patience
from moe_serve.engine.drafting.step_times import StepTimes

falling = st.lists(st.floats(0.01, 0.99), max_size=4).map(lambda s: sorted(s, reverse=True))


@given(
    st.lists(falling, min_size=1, max_size=3),
    st.lists(st.floats(0.0, 1.0), min_size=16, max_size=16),
)
def test_no_other_choice_makes_the_requests_much_faster(
    drafts: list[list[float]], increments: list[float]
) -> None:
    times = [1.0, *(1.0 + total for total in itertools.accumulate(increments))]
    rows = len(drafts)
    chosen = choose_lengths(dict(enumerate(drafts)), rows, 16, lambda n: times[n - rows])

    def rate(lengths: tuple[int, ...]) -> float:
        """Returns the geometric mean of the requests' tokens per second."""
        tokens = [1.0 + sum(d[:n]) for d, n in zip(drafts, lengths, strict=True)]
        return float(math.prod(tokens) ** (1 / rows) / times[sum(lengths)])

    ours = rate(tuple(chosen.get(key, 0) for key in range(rows)))
    best = max(rate(each) for each in itertools.product(*(range(len(d) + 1) for d in drafts)))
    if chosen:
        assert ours == pytest.approx(best)
    else:
        assert best <= 1.0301, "a gain below 3% is not worth the time of drafting"


def test_a_dear_first_row_does_not_hide_a_gain() -> None:
    survivals = {0: [0.98**i for i in range(1, 17)]}
    lengths = choose_lengths(survivals, 1, 16, lambda n: 1.0 if n == 1 else 2.2 + 0.05 * n)
    assert lengths == {0: 16}
    assert choose_lengths({0: [0.5]}, 1, 16, lambda n: float(n)) == {}
    assert choose_lengths(survivals, 1, 3, lambda n: 1.0) == {0: 3}


def test_one_request_may_not_slow_many_others_for_its_own_speed() -> None:
    certain = [0.99**i for i in range(1, 17)]
    assert choose_lengths({0: certain}, 16, 16, lambda n: 0.2 + 0.05 * n) == {}
    assert choose_lengths({0: certain}, 1, 16, lambda n: 0.2 + 0.05 * n) == {0: 16}
    everyone = choose_lengths(dict.fromkeys(range(16), certain), 16, 256, lambda n: 0.5 + 0.03 * n)
    assert len(everyone) == 16 and min(everyone.values()) >= 12


def test_tokens_that_are_certain_wait_only_where_the_step_becomes_slow() -> None:
    certain = dict.fromkeys(range(16), 6)
    fitting = with_certain({0: 2}, certain, 16, 200, lambda n: 0.7 + 0.3 * n**0.75)
    assert fitting[0] == 6 and 16 + sum(fitting.values()) < 60, "the step takes at most twice"
    assert with_certain({}, {0: 6}, 16, 4, lambda n: 1.0) == {0: 4}, "no more than fits"
    assert with_certain({}, {0: 6}, 1, 16, lambda n: float(n) ** 1.1) == {}, (
        "tokens per second fall"
    )
    assert with_certain({0: 6}, {0: 6}, 1, 16, lambda n: float(n) ** 1.1) == {0: 6}


def test_drafts_of_equal_probability_share_what_fits() -> None:
    survivals = {key: [0.9, 0.8] for key in range(3)}
    lengths = choose_lengths(survivals, 3, 4, lambda n: 1.0)
    assert sum(lengths.values()) == 4 and lengths.keys() == {0, 1, 2}


def test_a_request_without_luck_expects_less_than_others() -> None:
    acceptance = Acceptance()
    draft = Draft((1, 2, 3, 4), DraftSource.NGRAM, 4)
    for _ in range(50):
        acceptance.note(1, draft, 4)
    assert acceptance.survivals(1, draft)[-1] > 0.7
    assert acceptance.expected(1, draft) == pytest.approx(sum(acceptance.survivals(1, draft)), 0.2)
    for _ in range(6):
        acceptance.note(2, draft, 0)
    assert acceptance.survivals(2, draft)[0] < 0.2 < acceptance.survivals(1, draft)[0]
    other = Draft((1, 2), DraftSource.SUFFIX, 4)
    assert acceptance.survivals(2, other)[0] > 0.6, "the luck of another source"
    acceptance.forget([2])
    assert acceptance.survivals(2, draft) == acceptance.survivals(3, draft)


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16)), max_size=80), st.integers(0, 40))
def test_survivals_fall_and_sum_to_what_is_expected(
    seen: list[tuple[int, int]], evidence: int
) -> None:
    acceptance = Acceptance()
    for length, accepted in seen:
        draft = Draft((7,) * length, DraftSource.SUFFIX, evidence)
        acceptance.note(5, draft, min(length, accepted))
    draft = Draft((7,) * 16, DraftSource.SUFFIX, evidence)
    survivals = acceptance.survivals(6, draft)
    assert survivals == sorted(survivals, reverse=True)
    assert all(0.0 < each < 1.0 for each in survivals)
    assert acceptance.expected(6, draft) - sum(survivals) <= 16 * 0.03


def test_a_sequence_in_vain_pauses_ever_longer() -> None:
    patience, tried = Patience(), list[int]()
    for step in range(2000):
        if patience.awake([2]):
            tried.append(step)
            patience.in_vain(2, 0.01)
    assert len(tried) < 2000 / 25, "hopeless drafts are made in one of 32 steps"
    patience.gains([2])
    asked = [bool(patience.awake([2])) for _ in range(10)]
    assert all(asked[1:]), "a gain was expected, so it is asked in each step again"


def test_a_sequence_without_drafts_pauses_briefly() -> None:
    patience, rests = Patience(), 0
    for _ in range(100):
        if not patience.awake([1]):
            rests += 1
        else:
            patience.in_vain(1, None)
    assert 50 < rests <= 75
    patience.accepted(1)
    assert patience.awake([1])


def test_one_slow_step_does_not_end_long_drafts() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe(1, 1.0)
    estimate = times.seconds(1)(17)
    times.observe(17, 100.0, num_drafted=16)  # the machine had paused
    assert times.seconds(1)(17) <= 2.0 * estimate
    for _ in range(20):
        times.observe(17, 3.0, num_drafted=16)
    assert times.seconds(1)(17) == pytest.approx(3.0, rel=0.1)
    assert times.seconds(1)(1) == pytest.approx(1.0)


def test_certain_drafts_become_long_before_long_ones_were_tried() -> None:
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.note(1, Draft((1,), DraftSource.PREDICTION, 20), 1)
    assert acceptance.expected(2, Draft((1,) * 16, DraftSource.PREDICTION, 20)) > 12


def test_drafts_that_are_never_right_cost_a_small_share_of_the_time() -> None:
    """Each draft makes its step twice as long, and is verified whenever the account allows it."""
    allowance, num_drafts, num_steps = DraftingAllowance(), 0, 20_000
    for _ in range(num_steps):
        has_draft = allowance.may_draft
        num_drafts += has_draft
        allowance.settle(1, 0.001, -0.001 if has_draft else 0.0)
    assert 0 < num_drafts / num_steps < 0.011


def test_drafts_that_won_for_long_may_not_lose_for_long() -> None:
    allowance, num_drafts = DraftingAllowance(), 0
    for _ in range(1000):
        allowance.settle(1, 0.001, 0.002)
    for _ in range(200):
        has_draft = allowance.may_draft
        num_drafts += has_draft
        allowance.settle(1, 0.001, -0.0002 if has_draft else 0.0)
    assert 0.0002 * num_drafts < 0.0065 + 0.01 * 0.2


def test_drafts_that_gain_are_never_limited() -> None:
    allowance = DraftingAllowance()
    assert not allowance.may_draft, "there is no plain step to compare drafts with"
    allowance.settle(1, 0.001, 0.0)
    for _ in range(1000):
        assert allowance.may_draft
        allowance.settle(1, 0.001, 0.0035)
    assert allowance.may_look
    allowance.pay_lookups(64, 64 * 30e-6)
    assert allowance.may_look, "the saved time pays for looking"


def test_lookups_in_vain_take_a_small_share_of_the_time() -> None:
    allowance, num_looked, num_steps = DraftingAllowance(), 0, 20_000
    allowance.settle(1, 0.001, 0.0)
    for _ in range(num_steps):
        if allowance.may_look:  # eight sequences ask together
            num_looked += 1
            allowance.pay_lookups(8, 8 * 30e-6)
        allowance.settle(1, 0.001, 0.0)
    share = num_looked * (8 + 2) * 30e-6 / (num_steps * 0.001)  # the step is longer by two more
    assert 0.009 < share < 0.011
    allowance.pay_lookups(64, 64 * 30e-6)
    assert not allowance.may_look and allowance.pause
    allowance.earn(1.0)  # a long prompt was read: its own text may be entered
    assert allowance.may_look


def test_more_rows_cost_more_although_they_share_an_average() -> None:
    times = StepTimes()
    for _ in range(40):
        times.observe(64, 0.016)
        times.observe(66, 0.016, num_drafted=2)
    seconds = times.seconds(64)
    assert seconds(64) < seconds(65) < seconds(66) < seconds(128)


def test_a_slow_first_step_of_a_kind_does_not_stay() -> None:
    times = StepTimes()
    for _ in range(40):
        times.observe(1, 0.001)
    times.observe(6, 0.1, num_drafted=5)
    for _ in range(10):
        times.observe(6, 0.0025, num_drafted=5)
    assert times.seconds(1)(6) == pytest.approx(0.0025, rel=0.1)


def test_a_machine_that_becomes_slower_changes_no_choice() -> None:
    """Drafts are compared with plain steps near in time, so their relative cost stays."""
    times = StepTimes()
    for slower in (1.0, 1.5, 1.0):
        for _ in range(40):
            times.observe(4, 0.001 * slower)
        for _ in range(40):
            times.observe(12, 0.003 * slower, num_drafted=8)
        assert times.seconds(4)(12) / times.seconds(4)(4) == pytest.approx(3.0, rel=0.1)


def test_plain_steps_and_steps_with_drafts_of_as_many_rows_are_told_apart() -> None:
    times = StepTimes()
    for _ in range(40):
        times.observe(4, 0.001)
        times.observe(16, 0.002)
        times.observe(16, 0.003, num_drafted=12)
    assert times.seconds(16)(16) == pytest.approx(0.002, rel=0.01)
    assert times.seconds(4)(16) == pytest.approx(0.003, rel=0.1)


def test_new_and_gaining_sequences_always_ask_and_others_together() -> None:
    patience = Patience()
    for key in range(6):
        for _ in range(5):
            assert patience.awake([key], has_time=False), "its first draft is not judged yet"
            patience.in_vain(key, None)
    patience.gains([3])
    assert patience.awake(range(7), has_time=False) == [3, 6], "one that gains and a new one"
    assert patience.awake(range(6)) == [0, 1, 2, 3, 4, 5]


def test_a_slow_first_row_does_not_make_further_rows_dear() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(16, 1.0)
    expected = times.seconds(16)(80)
    for seconds in (1.5, 1.5, 1.1):
        times.observe(17, seconds, num_drafted=1)
        assert expected < times.seconds(16)(80) < expected + 0.5, "the row's time is added once"
    mean = (1.04 + 1.5 + 1.5 + 1.1) / 4
    assert times.seconds(16)(17) == pytest.approx(mean, rel=0.05), "the estimate counts like one"


def alternating(times: StepTimes, num: int, slower: float) -> None:
    """Steps with drafts, and behind each of them one plain step with cold caches."""
    for _ in range(num):
        times.observe(5, 0.003 * slower, num_drafted=4)
        times.observe(1, 0.0015 * slower)


def test_plain_steps_behind_drafts_count_as_if_caches_were_warm() -> None:
    """The machine becomes slower meanwhile. Both are learned, the one from the other."""
    times = StepTimes()
    for before, now in ((1.0, 1.0), (1.0, 1.0), (1.0, 1.3), (1.3, 1.3)):
        for seconds in (0.0012, 0.0011, *[0.001] * 20):
            times.observe(1, seconds * before)
        alternating(times, 20, now)
    assert times.seconds(1)(1) == pytest.approx(0.0013, rel=0.12)  # 0.00195 without it
    times.observe(5, 0.0039, num_drafted=4)
    assert times.cold_s(1) == pytest.approx(0.0005, rel=0.2), "of which 0.1 is doubted"


def test_plain_steps_are_due_until_caches_are_warm_if_the_gain_is_close() -> None:
    times = StepTimes()
    for _ in range(4):
        times.observe(1, 0.001)
    alternating(times, 7, 1.0)
    assert not times.is_plain_due(is_close=True), "14 steps without a warm one are few"
    alternating(times, 1, 1.0)
    num_due = 0
    while times.is_plain_due(is_close=True):
        assert not times.is_plain_due(is_close=False)
        times.observe(1, 0.001)
        num_due += 1
    assert num_due == 3, "two more cold ones, and a warm one"
    alternating(times, 10, 1.0)
    assert not times.is_plain_due(is_close=True), "next time after twice as many"
