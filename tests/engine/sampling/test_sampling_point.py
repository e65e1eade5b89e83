"""A token depends only on the tokens before its position, not on later tokens of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_kernels.interface.token_sampler import SamplingStep
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.engine.sampling.answer_masks import AnswerMasks
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.engine.sampling.sampler import Sampled, Sampler
from moe_serve.engine.sampling.sampling_point import SamplingPoint
from moe_serve.engine.sampling.sampling_step import make_sampling_step

EOS, OPEN, CLOSE = 10, 8, 9
SPELT = (b"a", b"b", b"c", b"d", b"e", b"ab", b"cd", b"?", b"<t>", b"</t>", b"<|end|>")
VOCABULARY = Vocabulary(SPELT, frozenset({EOS}), (EOS,))
MASKS = AnswerMasks(len(SPELT), frozenset({EOS}), Grammars(lambda: VOCABULARY))
THINKING = ThinkingMarkers(
    end=(CLOSE,), closings=((CLOSE,),), openings=((OPEN,),), blanks=(), is_open=True
)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "logprobs": 3},
    "filtered": {"temperature": 1.3, "top_p": 0.8, "top_k": 7, "min_p": 0.05},
    "counted": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "repeated": {"temperature": 1.0, "repetition_penalty": 1.6, "logit_bias": {2: 1.5}},
    "short": {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": (3,)},
    "bad words": {"temperature": 1.0, "bad_word_ids": ((0, 1), (4,), (2, 2, 3))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (0, 1, 2, EOS), "repetition_penalty": 0.7},
    "thinking": {
        "temperature": 1.0,
        "thinking_token_budget": 3,
        "thinking_markers": THINKING,
        "presence_penalty": 1.0,
    },
    "grammar": {
        "temperature": 1.0,
        "constraint": Constraint("regex", "(ab|cd|e)*"),
        "min_tokens": 2,
    },
}


def sequence(answer: list[int], params: dict[str, Any]) -> Sequence:
    wishes = SamplingParams(**({"max_tokens": None, "seed": 3} | params))
    asked = GenerationRequest(request_id="r", prompt_token_ids=(5, 0, 2), params=wishes, choice=1)
    made = Sequence(0, asked)
    for token in answer:
        made.append(token)
    return made


def logits_at(position: int) -> torch.Tensor:
    return torch.randn(1, len(SPELT), generator=torch.Generator().manual_seed(position)) * 2


@dataclass(frozen=True)
class Made:
    """Everything that samplers and masks compute at a point."""

    failures: dict[int, str]
    bits: list[list[int]]
    token: Sampled
    arrays: list[object]  # for the kernels' sampler


def arrays(step: SamplingStep) -> list[object]:
    found: list[object] = [
        step.positions_S.tolist(),
        step.seeds_S.tolist(),
        step.choices_S.tolist(),
    ]
    if (entries := step.entries) is not None:
        order = np.argsort(entries.tokens_M)
        columns: tuple[NDArray[Any], ...] = (
            entries.tokens_M,
            entries.biases_M,
            entries.counts_M,
            entries.is_seen_M,
        )
        found += [column[order].tolist() for column in columns]
    return found


def sampled(of: Sequence, position: int) -> Made:
    points = [SamplingPoint(of, position)]
    masked = MASKS.of(points)
    bits = [] if masked.masks is None else masked.masks.bits_CW.tolist()
    (token,) = Sampler(frozenset({EOS})).sample(logits_at(position), points, masked.masks)
    step = make_sampling_step(points, [EOS], masked.masks)
    return Made(masked.failures, bits, token, arrays(step))


def answer_of(params: dict[str, Any], count: int) -> list[int]:
    """Samples tokens one after the other and returns them."""
    grown: list[int] = []
    one = sequence([], params)
    while len(grown) < count and EOS not in grown:
        token_id = sampled(one, one.num_tokens).token.token_id
        grown.append(token_id)
        one.append(token_id)
    return grown


@pytest.mark.parametrize("kind", PARAMS)
@settings(max_examples=12, deadline=None)
@given(order=st.lists(st.integers(0, 12), min_size=1, max_size=12), is_new=st.booleans())
def test_any_position_in_any_order(kind: str, order: list[int], is_new: bool) -> None:
    params = PARAMS[kind]
    answer = answer_of(params, 12)
    whole = sequence(answer, params)
    for count in order:
        count = min(count, len(answer))
        found = sampled(sequence(answer, params) if is_new else whole, 3 + count)
        assert found == sampled(sequence(answer[:count], params), 3 + count), f"{count} of {answer}"


@pytest.mark.parametrize("kind", PARAMS)
def test_several_positions_of_one_sequence_together(kind: str) -> None:
    params = PARAMS[kind]
    answer = answer_of(params, 8)
    whole, num = sequence(answer, params), len(answer)
    points = [SamplingPoint(whole, 3 + count) for count in (*range(num), 1, 0)]
    masked = MASKS.of(points)
    logits = torch.cat([logits_at(point.position) for point in points])
    found = Sampler(frozenset({EOS})).sample(logits, points, masked.masks)
    assert [token.token_id for token in found] == [*answer, answer[1 % num], answer[0]]


@pytest.mark.parametrize("kind", PARAMS)
def test_other_tokens_after_some_were_taken_back(kind: str) -> None:
    """Drafts that were not accepted leave nothing behind in any sampler's state."""
    params = PARAMS[kind]
    answer, drafts = answer_of(params, 10), [0, 1, 2, CLOSE]
    one, grown = sequence([], params), list[int]()
    while len(grown) < len(answer):
        if params.get("constraint") is None:
            for draft in drafts[: 1 + len(grown) % 4]:
                one.append(draft)
                sampled(one, one.num_tokens)
        else:
            for draft in answer[len(grown) : len(grown) + 2]:
                one.append(draft)
                if draft != EOS:
                    sampled(one, one.num_tokens)
        one.truncate(3 + len(grown))
        token_id = sampled(one, one.num_tokens).token.token_id
        grown.append(token_id)
        one.append(token_id)
    assert grown == answer
