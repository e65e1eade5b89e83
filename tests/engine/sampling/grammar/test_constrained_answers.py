"""Constraints on the demonstration model: every answer follows its constraint, in every batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve import LLM, CompletionOutput, Constraint, SamplingParams
from moe_serve.errors import GenerationError, InvalidRequestError
from tests.support.sampled_cases import EVERY_CASE

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as opened:
        yield opened


def answers(llm: LLM, params: Sequence[SamplingParams]) -> list[CompletionOutput]:
    results = llm.generate([PROMPT] * len(params), params, use_progress_bar=False)
    return [output for result in results for output in result.outputs]


def bound(kind: Any, source: str = "", **params: Any) -> SamplingParams:
    fields = {"max_tokens": 120, "seed": 5, "temperature": 0} | params
    return SamplingParams(constraint=Constraint(kind, source), **fields)


ARITHMETIC = 'root ::= term (("+" | "*") term){1,3}\nterm ::= [0-9]{1,3} | "(" root ")"\n'
KINDS: dict[Any, tuple[str, str]] = {
    "regex": ("[a-c]{3}-[0-9]{1,2}", r"[a-c]{3}-[0-9]{1,2}"),
    "choice": ('["north","south pole","ö\\n\\"x\\""]', r'north|south pole|ö\n"x"'),
    "lark": ('start: "<" %json {"enum": [1, 22]} ">"', r"<(1|22)>"),
    "gbnf": ('root ::= "a" ("b" | "cc"){1,3} "."', r"a(b|cc){1,3}\."),
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_kind(llm: LLM, temperature: int) -> None:
    wanted = [bound(kind, source, temperature=temperature) for kind, (source, _) in KINDS.items()]
    for answer, (_, pattern) in zip(answers(llm, wanted), KINDS.values(), strict=True):
        assert re.fullmatch(pattern, answer.text), (pattern, answer.text)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


LEAD = 'start: thought @answer\nthought[suffix="e"]: /(?s:.*)/\n'  # any text up to an e


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_kind_behind_a_lead(llm: LLM, temperature: int) -> None:
    wanted = [
        SamplingParams(
            constraint=Constraint(kind, source, LEAD),
            temperature=temperature,
            seed=5,
            max_tokens=120,
            min_tokens=2,
        )
        for kind, (source, _) in KINDS.items()
    ]
    together = answers(llm, wanted)
    for answer, (_, pattern) in zip(together, KINDS.values(), strict=True):
        assert re.fullmatch(f"[^e]*e({pattern})", answer.text), (pattern, answer.text)
        assert answer.finish_reason == "stop"
    assert [answer.text for answer in together] == [answers(llm, [p])[0].text for p in wanted]


TAGS = {
    "structures": [{"begin": "e<", "schema": {"enum": [1, 22]}, "end": ">"}],
    "triggers": ["e"],
}


def test_tags_are_the_same_in_every_batch(llm: LLM) -> None:
    """Tags run beside other constraints and free rows; the model soon writes an e."""
    tagged = [
        bound("structural_tag", json.dumps(TAGS), temperature=t, seed=seed, max_tokens=60)
        for t, seed in ((0, 1), (1, 2), (1, 3))
    ]
    others = [bound(kind, source, temperature=1) for kind, (source, _) in KINDS.items()]
    free = SamplingParams(temperature=1, seed=4, max_tokens=60)
    together = answers(llm, [tagged[0], free, *others, *tagged[1:]])
    found = [together[0], *together[-2:]]
    for answer, params in zip(found, tagged, strict=True):
        assert re.fullmatch(r"[^e]*(e<(1|22)>[^e]*)*(e(<(1|22?)?)?)?", answer.text), answer.text
        assert answer.token_ids == answers(llm, [params])[0].token_ids
    assert sum(len(re.findall("e<(1|22)>", answer.text)) for answer in found) > 2


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"enum": ["x", 1, None, [2]]},
        {"const": "a b"},
        {"type": "string", "pattern": "^[a-z]{1,4}$"},
        {"type": "string", "maxLength": 5},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(
            lambda fields, num: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:num],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b b", "ü"]), inner, min_size=1, max_size=2),
            st.integers(0, 2),
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=12 if EVERY_CASE else 7, deadline=None, derandomize=True)
@given(schemas=st.lists(SCHEMAS, min_size=4, max_size=4))
def test_schemas_hold(llm: LLM, schemas: list[dict[str, Any]]) -> None:
    """A batch of four, each at temperature 0 and 1. A cut answer is the beginning of a valid
    one."""
    wanted = [
        bound("json_schema", json.dumps(schema), temperature=temperature, max_tokens=300)
        for schema in schemas
        for temperature in (0, 1)
    ]
    found = answers(llm, wanted)
    for schema, answer in zip([s for s in schemas for _ in (0, 1)], found, strict=True):
        assert answer.finish_reason == "stop", f"{schema} has no end: {answer.text!r}"
        jsonschema_rs.validate(schema, json.loads(answer.text))


def test_neighbours_change_nothing(llm: LLM) -> None:
    """Free requests are bit-equal beside constrained ones, and constrained ones have the same
    answer everywhere."""
    free = [
        SamplingParams(temperature=t, seed=t, max_tokens=20, logprobs=2, ignore_eos=True)
        for t in (0, 1)
    ]
    tied = [bound(kind, source, temperature=1) for kind, (source, _) in KINDS.items()]
    together = answers(llm, [free[0], *tied[:2], free[1], *tied[2:]])
    alone = [answers(llm, [params])[0] for params in (*free, *tied)]
    assert [together[0], together[3]] == alone[:2]
    text = [together[i].text for i in (1, 2, 4, 5)]
    assert text == [answer.text for answer in alone[2:]]


def test_choices_are_drawn_apart(llm: LLM) -> None:
    found = answers(llm, [bound("regex", "[0-9]{12}", temperature=1.5, n=4)])
    assert len({answer.text for answer in found}) == 4
    assert all(re.fullmatch("[0-9]{12}", answer.text) for answer in found)


def test_ends(llm: LLM) -> None:
    """A complete answer ends, whatever else was asked for; otherwise min_tokens and stops count."""
    wanted = [
        bound("choice", '["yes"]', ignore_eos=True, min_tokens=50),
        bound("regex", "[0-9]{1,40}", min_tokens=30),
        bound("regex", "abcd[0-9]{20}", stop=("cd",)),
        bound("json_object", max_tokens=1),
    ]
    complete, long, stopped, cut = answers(llm, wanted)
    assert (complete.text, complete.finish_reason) == ("yes", "stop")
    assert len(long.token_ids) >= 30 and long.finish_reason == "stop"
    assert (stopped.text, stopped.stop_reason) == ("ab", "cd")
    assert (cut.text, cut.finish_reason) == ("{", "length")


def test_allowed_and_bad_words(llm: LLM) -> None:
    ids = tuple(llm.tokenizer.encode(" the king", add_special_tokens=False))
    greedy = {"temperature": 0.0, "max_tokens": 24}
    plain, few, clean = answers(
        llm,
        [
            SamplingParams(**greedy),  # type: ignore[arg-type]
            SamplingParams(**greedy, allowed_token_ids=ids),  # type: ignore[arg-type]
            SamplingParams(**greedy, bad_words=("bell",)),  # type: ignore[arg-type]
        ],
    )
    assert "bell" in plain.text and " bell" not in clean.text
    assert set(few.token_ids) <= set(ids)


def test_a_request_that_contradicts_itself_fails_alone(llm: LLM) -> None:
    wrong = bound("regex", "[0-9]+", allowed_token_ids=(500,))
    with pytest.raises(GenerationError, match="its parameters together allow no token here"):
        answers(llm, [wrong])
    with pytest.raises(InvalidRequestError, match="regular expression cannot be used"):
        answers(llm, [bound("regex", "(")])
    assert answers(llm, [bound("regex", "ok")])[0].text == "ok"


def test_a_preemption_keeps_the_place_in_the_grammar() -> None:
    """Six answers of 40 tokens share pages for four of them."""
    wanted = [bound("regex", "([a-z]{3}[0-9]){60}", temperature=1, max_tokens=40)] * 6
    with LLM(num_pages=12, max_model_len=192, prefix_cache=False) as small:
        found = [answer.text for answer in answers(small, wanted)]
        assert small.stats().counts.num_preemptions > 0
    with LLM(max_model_len=192) as large:
        assert found == [answer.text for answer in answers(large, wanted)]
    assert all(re.match("([a-z]{3}[0-9])+", text) for text in found)
