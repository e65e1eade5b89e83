"""The rules of a sequence: those that a front end resolved, else those of its parameters."""

from __future__ import annotations

from moe_serve.cluster.ranks.mirror import pack_params, unpack_params
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import DecodingRules, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence, StopRule
from moe_serve.engine.request.thinking_markers import ThinkingMarkers

MARKERS = ThinkingMarkers(end=(7, 8), closings=((7, 8),))


def test_parameters_that_need_no_model_are_the_rules() -> None:
    params = SamplingParams(
        max_tokens=3,
        prompt_logprobs=1,
        constraint=Constraint("regex", "a+"),
        bad_word_ids=((1, 2),),
        thinking_token_budget=4,
        thinking_markers=MARKERS,
    )
    rules = GenerationRequest(request_id="r", prompt_token_ids=(1,), params=params).rules
    assert (rules.max_tokens, rules.prompt_logprobs, rules.bad_word_ids) == (3, 1, ((1, 2),))
    assert rules.constraint == params.constraint and rules.thinking_markers == MARKERS


def test_markers_without_a_budget_limit_nothing() -> None:
    assert DecodingRules.of(SamplingParams(thinking_markers=MARKERS)).thinking_markers is None


def test_resolved_rules_count_and_parameters_do_not() -> None:
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(1,),
        params=SamplingParams(max_tokens=None, constraint=Constraint("regex", "a+")),
        resolved=DecodingRules(max_tokens=2),
    )
    sequence, stop = Sequence(0, request), StopRule(frozenset(), 100)
    assert sequence.rules.constraint is None
    assert [stop.is_last(sequence, count) for count in (1, 2)] == [False, True]


def test_a_rank_gets_both() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, bad_words=("a",), thinking_token_budget=4)
    rules = DecodingRules(
        max_tokens=5,
        constraint=Constraint("lark", "start: /a/", "@answer"),
        bad_word_ids=((1,), (2, 3)),
        thinking_markers=MARKERS,
    )
    assert unpack_params(pack_params(params, rules)) == (params, rules)
