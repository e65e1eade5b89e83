"""The tokens that a thinking budget forces, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.engine.request.thought_counter import ThoughtCounter
from moe_serve.errors import InvalidRequestError

PROMPT = [7, 8, 1, 2, 3]  # its markers do not count
OPEN, CLOSE, BLANK = 1, 2, 9


def markers(**fields: Any) -> ThinkingMarkers:
    plain = {"end": (CLOSE,), "closings": ((CLOSE,),), "openings": ((OPEN,),), "blanks": (BLANK,)}
    return ThinkingMarkers(**{**plain, **fields})


OPENED = markers(is_open=True)
LONG = markers(end=(7, 8, 9), closings=((7, 8, 9), (7, 6)), is_open=True, openings=((5, 5),))
# As harmony has it: 20 analysis 21 ... 22 | 23 24 20 final 21
CHANNELS = ThinkingMarkers(
    end=(22, 23, 24, 20, 31, 21),
    closings=((22,), (23,)),
    openings=((20, 30, 21),),
    can_reopen=True,
)


def forced(of: ThinkingMarkers, budget: int, answer: list[int]) -> list[int | None]:
    """Returns the forced token after each beginning of the answer, counted token by token and at
    once."""
    counter, found = ThoughtCounter(of, budget, len(PROMPT)), []
    for count in range(len(answer) + 1):
        tokens = PROMPT + answer[:count]
        counter.read(tokens)
        at_once = ThoughtCounter(of, budget, len(PROMPT))
        at_once.read(tokens)
        assert (at_once.forced, at_once.barred) == (counter.forced, counter.barred)
        found.append(counter.forced)
    return found


N = None


@pytest.mark.parametrize(
    ("of", "budget", "answer", "expected"),
    [
        (OPENED, 2, [4, 4, CLOSE, 4, 4], [N, N, CLOSE, N, N, N]),
        (OPENED, 0, [CLOSE, 4], [CLOSE, N, N]),
        (OPENED, 3, [4, CLOSE, OPEN, 4, 4, 4], [N] * 7),
        (markers(), 1, [OPEN, 4, CLOSE, 4], [N, N, CLOSE, N, N]),
        (markers(), 0, [BLANK, BLANK, OPEN, CLOSE], [N, N, N, CLOSE, N]),
        (markers(), 0, [4, OPEN, 4, 4], [N] * 5),
        (markers(openings=((4, 5), (4, 6))), 0, [4, 6, CLOSE], [N, N, CLOSE, N]),
        (markers(openings=((4, 5),)), 0, [4, 6, 4, 5], [N] * 5),
        (LONG, 2, [4, 4, 7, 8, 9, 4], [N, N, 7, 8, 9, N, N]),
        (LONG, 0, [7, 8, 9], [7, 8, 9, N]),
        (LONG, 2, [4, 7, 8, 9, 4], [N, N, 8, 9, N, N]),
        (LONG, 4, [7, 8, 9, 4, 4], [N] * 6),
        (LONG, 4, [4, 7, 6, 4, 4], [N] * 6),
        (CHANNELS, 2, [20, 30, 21, 4, 4, 22, 23, 24, 20, 31, 21, 4],
         [N, N, N, N, N, 22, 23, 24, 20, 31, 21, N, N]),
        (CHANNELS, 2, [20, 30, 21, 4, 22, 23, 24, 20, 30, 21, 4, 22],
         [N, N, N, N, N, N, N, N, N, N, N, 22, 23]),
        (CHANNELS, 0, [20, 31, 21, 4], [N] * 5),
    ],
)  # fmt: skip
def test_forced(
    of: ThinkingMarkers, budget: int, answer: list[int], expected: list[int | None]
) -> None:
    assert forced(of, budget, answer) == expected


def test_a_token_that_was_forced_in_vain_is_asked_for_again() -> None:
    """A grammar may require the bytes of a character to be complete first."""
    assert forced(LONG, 1, [4, 4, 7, 4, 7, 8]) == [N, 7, 7, 8, 7, 8, 9]
    answer = [20, 30, 21, 22, 23, 4, 4]
    assert forced(CHANNELS, 0, answer) == [N, N, N, 22, 23, 24, N, N]


def test_channels_are_not_opened_again_when_it_is_spent() -> None:
    of = ThinkingMarkers(
        end=(22, 23, 24), closings=((22,),), openings=((20, 30, 21),), can_reopen=True
    )
    counter, found = ThoughtCounter(of, 1, 0), []
    answer = [20, 30, 21, 4, 22, 23, 24, 20, 31, 21, 4]
    for count in range(1, len(answer) + 1):
        counter.read(answer[:count])
        found.append(counter.barred)
    assert found == [N] * 7 + [30, N, N, N]


def test_what_contradicts_the_end_is_refused() -> None:
    limited = {"thinking_token_budget": 3, "thinking_markers": LONG}
    with pytest.raises(InvalidRequestError, match=r"allowed_token_ids lacks \[8, 9\]"):
        SamplingParams(**limited, allowed_token_ids=(7, 4))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"bad_words bans \[8, 9\]"):
        SamplingParams(**limited, bad_word_ids=((8, 9),))  # type: ignore[arg-type]
    SamplingParams(**limited, bad_word_ids=((4, 7),), allowed_token_ids=(7, 8, 9))  # type: ignore[arg-type]
    SamplingParams(thinking_token_budget=-1, thinking_markers=LONG, allowed_token_ids=(4,))
    for wrong in (-2, 1.5, True):
        with pytest.raises(InvalidRequestError, match="thinking_token_budget must be"):
            SamplingParams(thinking_token_budget=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must begin with one of its closings"):
        ThinkingMarkers(end=(1, 2), closings=((2,),))
    with pytest.raises(InvalidRequestError, match="token id of the end of reasoning"):
        SamplingParams(**limited).check_vocabulary(9)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    of=st.sampled_from([OPENED, LONG, CHANNELS, markers(), markers(openings=((4, 5), (4, 6)))]),
    budget=st.integers(0, 5),
    answer=st.lists(st.sampled_from([1, 2, 4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 30, 31])),
    stops=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=20),
)
def test_it_can_be_asked_at_any_position(
    of: ThinkingMarkers, budget: int, answer: list[int], stops: list[tuple[int, bool]]
) -> None:
    """The count is right even if the answer changes after a position it went back to."""
    counter, tokens = ThoughtCounter(of, budget, len(PROMPT)), PROMPT + answer
    for stop, is_other in stops:
        position = len(PROMPT) + min(stop, len(answer))
        if is_other:
            counter.go_back(position)
            tokens = tokens[:position] + tokens[:position:-1]
            position = len(tokens)
        counter.read(tokens, position)
        fresh = ThoughtCounter(of, budget, len(PROMPT))
        fresh.read(tokens[:position])
        assert (counter.forced, counter.barred) == (fresh.forced, fresh.barred)
        assert (counter.num_spent, counter.is_over) == (fresh.num_spent, fresh.is_over)
        answer = tokens[len(PROMPT) :]


def test_it_goes_back_further_than_it_remembers() -> None:
    counter, tokens = ThoughtCounter(OPENED, 150, len(PROMPT)), PROMPT + [4] * 200
    for stop in range(len(PROMPT), len(tokens) + 1):
        counter.read(tokens, stop)
    assert not counter.is_free
    counter.read(tokens, len(PROMPT) + 149)
    assert (counter.num_spent, counter.is_free) == (149, True)
    counter.read(tokens, len(PROMPT) + 150)
    assert (counter.num_spent, counter.forced) == (150, CLOSE)
