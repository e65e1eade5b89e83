"""Reasoning before an answer with a grammar: the allowed texts and the parsed result."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import moe_serve
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.compiler import compile_constraint
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary, vocabulary_of
from moe_serve.text.assistant import harmony_format
from moe_serve.text.assistant.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    GrammarScope,
    ParserPlan,
    ReasoningFormat,
)
from moe_serve.text.assistant.outbox import AssistantDelta, joined
from moe_serve.text.tokenizer import Tokenizer

FILE = str(Path(moe_serve.__file__).parent / "demo_model" / "tokenizer.json")
MARKERS = ("<think>", "</think>", "[THINK]", "[/THINK]", *harmony_format.MARKERS)
EOS_ID = 2
ANSWER, JSON, ALL = GrammarScope.ANSWER, GrammarScope.JSON, GrammarScope.ALL
THINK, QWEN, R1 = ReasoningFormat(), REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]
MAGISTRAL, CHANNELS = REASONING_FORMATS["mistral"], REASONING_FORMATS["gpt-oss"]
OFF = ReasoningFormat(is_off=True)
OPENED, UNOPENED, CLOSED = "<a><think>\n", "<a>", "<a><think>\n\n</think>\n\n"


class Words:
    """A model's tokenizer; its markers are special tokens or plain text."""

    def __init__(self, *special: str) -> None:
        backend = tokenizers.Tokenizer.from_file(FILE)
        backend.add_special_tokens(list(special))
        self.tokenizer = Tokenizer(backend, eos_token_ids=[EOS_ID])
        size = self.tokenizer.vocab_size
        self.vocabulary: Vocabulary = vocabulary_of(self.tokenizer, size, frozenset({EOS_ID}))
        self.special_ids = {m: i for m, i in self.tokenizer.special_ids.items() if m in special}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module", params=["text", "special"])
def words(request: pytest.FixtureRequest) -> Words:
    return Words(*(MARKERS if request.param == "special" else ()))


def plan(
    reasoning: ReasoningFormat | None, prompt: str = UNOPENED, scope: GrammarScope | None = ANSWER
) -> ParserPlan:
    return ParserPlan(tool_format=None, reasoning_format=reasoning, prompt=prompt, scope=scope)


def accepts(words: Words, constraint: Constraint, ids: list[int]) -> bool:
    """Returns True if these tokens are a whole answer."""
    matcher = compile_constraint(constraint, words.vocabulary)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(of: ParserPlan, text: str, cuts: list[int]) -> AssistantDelta:
    parser, found, ends = of.make(), AssistantDelta(), [0, *cuts, len(text)]
    for start, end in zip(ends, ends[1:], strict=False):
        found = joined(found, parser.push(text[start:end]))
    return joined(found, parser.finish())


TEXT_UP_TO_THE_END = 'thought[suffix="</think>"]: /(?s:.*)/\n'


@pytest.mark.parametrize(
    ("of", "lead"),
    [
        (plan(THINK, OPENED), "start: reason @answer\nreason: thought\n" + TEXT_UP_TO_THE_END),
        (
            plan(THINK, OPENED, JSON),
            'start: reason @answer\nreason: thought "\\n"{0,2}\n' + TEXT_UP_TO_THE_END,
        ),
        (
            plan(THINK),
            'start: reason @answer\nreason: ("\\n"{0,2} "<think>" thought)?\n' + TEXT_UP_TO_THE_END,
        ),
        (plan(R1), "start: reason @answer\nreason: thought\n" + TEXT_UP_TO_THE_END),
        (plan(OFF, OPENED), "start: reason @answer\nreason: thought\n" + TEXT_UP_TO_THE_END),
        (plan(THINK, OPENED, ALL), ""),
        (plan(THINK, OPENED, None), ""),
        (plan(None, OPENED), ""),
        (
            plan(CHANNELS),
            'start: analysis? "<|channel|>" "final" "<|message|>" @answer\n'
            'analysis: "<|channel|>" "analysis" "<|message|>" thought "<|start|>" "assistant"\n'
            'thought[suffix="<|end|>"]: /(?s:.*)/\n',
        ),
        (
            plan(ReasoningFormat(is_harmony=True, is_off=True)),
            'start: "<|channel|>" "final" "<|message|>" @answer\n',
        ),
    ],
)
def test_what_comes_first(of: ParserPlan, lead: str) -> None:
    assert of.answer_lead({}) == lead


def test_special_tokens_are_named_and_not_spelt() -> None:
    lead = plan(MAGISTRAL, "[THINK]").answer_lead({"[THINK]": 7, "[/THINK]": 8})
    assert lead == (
        "start: reason @answer\nreason: <[7]>? thought\nthought: THOUGHT_TEXT <[8]>\n"
        "THOUGHT_TEXT: /(?s:.*)/ & ~/(?s:.*\\[\\/THINK\\].*)/\n"
    )


def test_the_harmony_parser_knows_no_other_reasoning() -> None:
    of = ParserPlan(
        tool_format=TOOL_FORMATS["openai"], reasoning_format=THINK, tools={}, scope=ANSWER
    )
    assert of.answer_lead({}) == ""


@pytest.mark.parametrize(
    ("reasoning", "prompt", "is_over"),
    [
        (QWEN, UNOPENED, False),
        (QWEN, OPENED, False),
        (QWEN, CLOSED, True),
        (OFF, UNOPENED, True),
        (OFF, OPENED, False),
        (R1, UNOPENED, False),
        (R1, "<a></think>", True),
        (CHANNELS, "<|start|>assistant", False),
    ],
)
def test_when_the_answer_itself_comes_next(
    reasoning: ReasoningFormat, prompt: str, is_over: bool
) -> None:
    assert reasoning.is_over_after(prompt) is is_over
    if not reasoning.is_harmony:
        of = ParserPlan(
            tool_format=TOOL_FORMATS["hermes"], reasoning_format=reasoning, tools={}, prompt=prompt
        )
        assert (of.call_lead({}) == "") is is_over, "forced calls likewise"


SCHEMA = '{"type":"object","properties":{"a":{"enum":["x",1]}},"required":["a"]}'
CLOSED_SCHEMA = json.dumps({**json.loads(SCHEMA), "additionalProperties": False})
ANSWERS: list[tuple[Any, str, str]] = [
    ("json_schema", CLOSED_SCHEMA, r'\{\s*"a"\s*:\s*("x"|1)\s*\}'),
    ("regex", r"\n{1,3} *[ab]{2}", r"\n{1,3} *[ab]{2}"),
    ("choice", '[" one","two\\n"]', r" one|two\n"),
    ("lark", 'start: "\\n" %json {"enum": [1, 22]} tail\ntail: ">"', r"\n(1|22)>"),
]
THOUGHTS = ("", "Hm", '\n{"a": 1} </thin <|x|> é')
MIDDLES = {
    "think": ("", "</think>"),
    "magistral": ("[THINK]", "[/THINK]"),
    "harmony": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
PLANS = {
    "think": plan(THINK, OPENED),
    "magistral": plan(MAGISTRAL),
    "harmony": plan(CHANNELS),
}


@pytest.mark.parametrize("family", sorted(PLANS))
@pytest.mark.parametrize(("kind", "source", "pattern"), ANSWERS, ids=lambda value: str(value)[:12])
def test_the_content_is_what_the_grammar_allows(
    words: Words, family: str, kind: Any, source: str, pattern: str
) -> None:
    """Any thought is followed by random tokens; every cut of the text is read the same."""
    prompt, reasoning = PLANS[family].prompt, PLANS[family].reasoning_format
    of = plan(reasoning, prompt, JSON if kind == "json_schema" else ANSWER)
    constraint = Constraint(kind, source, of.answer_lead(words.special_ids))
    opening, closing = MIDDLES[family]
    for seed, thought in enumerate(THOUGHTS):
        rng, ids = random.Random(seed), words.ids(opening + thought + closing)
        matcher = compile_constraint(constraint, words.vocabulary)
        assert matcher.try_consume_tokens(ids) == len(ids), (family, thought)
        while not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            (allowed,) = np.nonzero(np.unpackbits(bits, bitorder="little"))
            if EOS_ID in allowed:
                break
            ids.append(int(rng.choice(allowed)))
            assert matcher.consume_token(ids[-1])
        text = words.text(ids)
        whole = read(of, text, [])
        assert re.fullmatch(pattern, whole.content), (text, whole)
        assert whole.reasoning.strip() == thought.strip()
        for _ in range(8):
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
            assert read(of, text, cuts) == whole
        assert read(of, text, list(range(len(text)))) == whole


def test_thinking_cannot_end_the_answer_and_only_its_marker_ends_it(words: Words) -> None:
    constraint = Constraint("regex", "[ab]+", plan(THINK, OPENED).answer_lead(words.special_ids))
    assert accepts(words, constraint, words.ids("x") + words.ids("</think>") + words.ids("ab"))
    assert not accepts(words, constraint, words.ids("ab"))
    assert not accepts(words, constraint, [*words.ids("x"), EOS_ID])
    assert not accepts(words, constraint, words.ids("x") + words.ids("</think>") + words.ids("\na"))
    spelt = [i for char in "</think>" for i in words.ids(char)]
    is_text = not words.special_ids
    assert accepts(words, constraint, words.ids("x") + spelt + words.ids("ab")) is is_text


def test_an_answer_may_do_without_reasoning_that_nobody_opened(words: Words) -> None:
    lead = plan(THINK, UNOPENED).answer_lead(words.special_ids)
    constraint = Constraint("choice", '["yes","no"]', lead)
    assert accepts(words, constraint, words.ids("yes"))
    for opening in ("<think>", "\n<think>", "\n\n<think>"):  # GLM writes a line break first
        assert accepts(words, constraint, words.ids(opening) + words.ids("hm</think>no"))
    assert not accepts(words, constraint, words.ids("hm"))
    r1 = plan(R1, UNOPENED).answer_lead(words.special_ids)
    begun = Constraint("choice", '["yes","no"]', r1)
    assert not accepts(words, begun, words.ids("yes"))
    assert accepts(words, begun, words.ids("<think>hm</think>no"))


def test_line_breaks_before_json_are_layout(words: Words) -> None:
    of = plan(THINK, OPENED, JSON)
    constraint = Constraint("json_object", "", of.answer_lead(words.special_ids))
    for between in ("", "\n", "\n\n"):
        ids = words.ids("hm") + words.ids("</think>") + words.ids(between) + words.ids("{}")
        assert accepts(words, constraint, ids)
        assert read(of, words.text(ids), []) == AssistantDelta(reasoning="hm", content="{}")
    assert not accepts(words, constraint, words.ids("hm</think>\n\n\n{}"))


def test_a_cut_thought_is_reasoning_alone() -> None:
    found = read(plan(THINK, OPENED), "I am not", [3])
    assert found == AssistantDelta(reasoning="I am not")
