"""A sequence whose last tokens were taken back is as if they had never been there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence

TOKENS = st.lists(st.integers(0, 5), max_size=40)


def sequence(prompt: list[int], answer: list[int], **params: Any) -> Sequence:
    wishes = SamplingParams(**({"max_tokens": None, "seed": 1} | params))
    request = GenerationRequest(request_id="r", prompt_token_ids=tuple(prompt), params=wishes)
    made = Sequence(0, request)
    made.page_size = 16  # the scheduler sets it
    made.page_keys.append(b"root")
    for token in answer:
        made.append(token)
    return made


def state(of: Sequence) -> tuple[object, ...]:
    return of.token_ids, of.output_counts, list(of.seen), of.page_keys


@settings(max_examples=60, deadline=None)
@given(prompt=TOKENS.filter(bool), answer=TOKENS, taken=TOKENS, others=TOKENS, data=st.data())
def test_tokens_taken_back_leave_nothing(
    prompt: list[int], answer: list[int], taken: list[int], others: list[int], data: st.DataObject
) -> None:
    params = {"repetition_penalty": data.draw(st.sampled_from([1.0, 1.5]))}
    expected = sequence(prompt, answer + others, **params)
    found = sequence(prompt, answer + taken, **params)
    found.extend_keys(found.num_tokens // 16)
    found.truncate(len(prompt) + len(answer))
    for token in others:
        found.append(token)
    for each in (found, expected):
        each.extend_keys(each.num_tokens // 16)
    assert state(found) == state(expected)


def test_prompts_and_computed_tokens_stay() -> None:
    asked = sequence([1, 2, 3], [4, 5])
    with pytest.raises(AssertionError, match=r"2 not in 3\.\."):
        asked.truncate(2)
    asked.num_computed_tokens = 4
    with pytest.raises(AssertionError, match=r"3 not in 4\.\."):
        asked.truncate(3)
