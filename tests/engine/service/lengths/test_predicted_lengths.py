"""The scheduler's estimates from a predictor, which learns from sequences, and
`length_prediction`."""

from __future__ import annotations

import importlib.util

import pytest

from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_terms import Service
from moe_serve.engine.service.lengths.answer_lengths import AnswerLengths, TierLengths
from moe_serve.engine.service.lengths.length_fit import HereFitter, MakeRows
from moe_serve.engine.service.lengths.length_predictor import LengthPredictor
from moe_serve.engine.service.lengths.predicted_lengths import PredictedLengths, facts_of
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.errors import ConfigError


class NoFitter(HereFitter):
    def start(self, make_rows: MakeRows) -> None:
        """Does nothing."""


def sequence(number: int, max_tokens: int | None = None, tenant: str = "a") -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.3, stop=("x",))
    request = GenerationRequest(
        request_id=str(number),
        prompt_token_ids=(5, 6, 7),
        params=params,
        service=Service(tenant=tenant),
    )
    return Sequence(number, request)


def lengths() -> PredictedLengths:
    return PredictedLengths(LengthPredictor(2048, NoFitter()))


def answer(found: AnswerLengths, number: int, length: int, *, is_complete: bool = True) -> None:
    each = sequence(number)
    found.p90(each, 0)
    for _ in range(length):
        each.append(1)
    found.note(each, 0, is_complete=is_complete)


def test_it_learns_the_answers_of_a_tenant() -> None:
    found = lengths()
    before = found.p90(sequence(1000), 0)
    for number in range(100):
        answer(found, number, 12)
    assert before > 200 and found.p90(sequence(1001), 0) < 40
    assert found.p90(sequence(1002, max_tokens=5), 0) == 5.0, "never more than it may have"


def test_a_longer_answer_than_predicted_is_predicted_anew() -> None:
    found = lengths()
    for number in range(100):
        answer(found, number, 12)
    each = sequence(200)
    early = found.p90(each, 0)
    for _ in range(100):
        each.append(1)
    assert early < 100 < found.p90(each, 0)


def test_answers_that_were_cut_off_are_lower_bounds() -> None:
    found = lengths()
    for number in range(100):
        answer(found, number, 8, is_complete=False)
    assert found.p90(sequence(300), 0) > 8


def test_facts_of_a_sequence() -> None:
    facts = facts_of(sequence(1, max_tokens=9, tenant="b"))
    assert (facts.max_tokens, facts.temperature, facts.tenant) == (9, 0.3, "b")
    assert facts.has_stop and not facts.has_grammar and not facts.has_thinking


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SchedulerConfig(tiers=(TierConfig(name="t", e2e_s=5.0),))
    state = ServiceState.of(config, lambda: 0.0)
    assert state is not None and isinstance(state.lengths, TierLengths)
    on = SchedulerConfig(tiers=config.tiers, length_prediction="on")
    state = ServiceState.of(on, lambda: 0.0)
    assert state is not None and isinstance(state.lengths, PredictedLengths)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs scikit-learn: install moe-serve"):
        ServiceState.of(on, lambda: 0.0)
