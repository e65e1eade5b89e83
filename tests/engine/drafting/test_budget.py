"""What is drafted follows from what it costs and how often it is accepted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.engine.drafting.acceptance import Acceptance
from moe_serve.engine.drafting.budget import choose_lengths
from moe_serve.engine.drafting.draft import Draft, DraftSource

falling = st.lists(st.floats(0.01, 0.99), max_size=4).map(lambda s: sorted(s, reverse=True))


@given(
    st.lists(falling, min_size=1, max_size=3),
    st.lists(st.floats(0.0, 1.0), min_size=16, max_size=16),
)
def test_no_other_choice_makes_more_tokens_a_second(
    drafts: list[list[float]], increments: list[float]
) -> None:
    times = [1.0, *(1.0 + total for total in itertools.accumulate(increments))]
    rows = len(drafts)
    chosen = choose_lengths(dict(enumerate(drafts)), rows, 16, lambda n: times[n - rows])

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = rows + sum(sum(d[:n]) for d, n in zip(drafts, lengths, strict=True))
        return tokens / times[sum(lengths)]

    ours = rate(tuple(chosen.get(key, 0) for key in range(rows)))
    best = max(rate(each) for each in itertools.product(*(range(len(d) + 1) for d in drafts)))
    assert ours == pytest.approx(best)


def test_a_dear_first_row_does_not_hide_a_gain() -> None:
    survivals = {0: [0.98**i for i in range(1, 17)]}
    lengths = choose_lengths(survivals, 1, 16, lambda n: 1.0 if n == 1 else 2.2 + 0.05 * n)
    assert lengths == {0: 16}
    assert choose_lengths({0: [0.5]}, 1, 16, lambda n: float(n)) == {}
    assert choose_lengths(survivals, 1, 3, lambda n: 1.0) == {0: 3}


def test_a_request_without_luck_stops_and_tries_again_ever_later() -> None:
    acceptance = Acceptance()
    draft = Draft((1, 2, 3, 4), DraftSource.NGRAM, 4)
    for _ in range(50):
        acceptance.note(1, draft, 4)
    assert acceptance.survivals(1, draft)[-1] > 0.7
    for _ in range(6):
        acceptance.note(2, draft, 0)
    assert acceptance.survivals(2, draft)[0] < 0.4 < acceptance.survivals(1, draft)[0]
    assert acceptance.survivals(2, draft)[0] < 0.2

    def next_steps(count: int) -> list[int]:
        """Return the steps in which the silent request retries; it fails each time."""
        steps = []
        for step in range(count):
            if not acceptance.is_silent(2) and acceptance.retries([2], 1):
                acceptance.note(2, draft.cut(2), 0)
                steps.append(step)
        return steps

    steps = next_steps(2000)
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert gaps == sorted(gaps) and gaps[-1] == 256, gaps
    acceptance.chosen([2])
    assert next_steps(20)[0] == 15, "a gain was expected, so the waiting starts anew"
