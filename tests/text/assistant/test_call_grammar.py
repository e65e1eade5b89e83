"""Grammars that force a call allow exactly the texts that the format's parser reads."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import moe_serve
from moe_serve.config.sections import ReasoningParserName, ToolParserName
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.compiler import compile_constraint
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary, vocabulary_of
from moe_serve.text.assistant import call_formats, harmony_format
from moe_serve.text.assistant.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ParserPlan,
    ReasoningFormat,
    reasoning_format_of,
    tool_format_of,
)
from moe_serve.text.assistant.tool import Tool
from moe_serve.text.tokenizer import Tokenizer

VOCABULARY = str(Path(moe_serve.__file__).parent / "demo_model" / "tokenizer.json")
EOS_ID = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
TOOLS = {"get_weather": Tool("get_weather", SCHEMA), "now": Tool("now")}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(VOCABULARY), eos_token_ids=[EOS_ID])
    return vocabulary_of(tokenizer, tokenizer.vocab_size, frozenset({EOS_ID}))


def forced(plan: ParserPlan, called: list[Tool], special_ids: dict[str, int]) -> Constraint:
    grammar, lead = plan.forced_grammar(called, special_ids), plan.call_lead(special_ids)
    return Constraint("lark", grammar, lead)


def random_answer(vocabulary: Vocabulary, constraint: Constraint, seed: int) -> str:
    """Returns a random text that the grammar allows, ended as soon as it may end."""
    rng, ids = random.Random(seed), list[int]()
    follower = compile_constraint(constraint, vocabulary)
    while not follower.is_stopped() and len(ids) < 2000:
        bits = np.frombuffer(follower.compute_bitmask(), dtype=np.uint8)
        (allowed,) = np.nonzero(np.unpackbits(bits, bitorder="little"))
        if EOS_ID in allowed:
            break
        ids.append(int(rng.choice(allowed)))
        assert follower.consume_token(ids[-1])
    decoded: str = tokenizers.Tokenizer.from_file(VOCABULARY).decode(ids, skip_special_tokens=False)
    return decoded


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_forced_answer_is_a_call(vocabulary: Vocabulary, name: str) -> None:
    plan = ParserPlan(tool_format=TOOL_FORMATS[name], reasoning_format=None, tools=TOOLS)
    for seed, tool in enumerate(TOOLS.values()):
        constraint = replace(forced(plan, [tool], {}), lead="")  # at random it thinks for ever
        text = random_answer(vocabulary, constraint, seed)
        parser = plan.make()
        deltas = [parser.push(text), parser.finish()]
        calls = [call for delta in deltas for call in delta.calls]
        assert {call.name for call in calls} == {tool.name}
        assert "".join(delta.content for delta in deltas) == ""
        for arguments in (json.loads(call.arguments) for call in calls):
            assert set(arguments) >= tool.required
            assert arguments.get("unit", "C") in ("C", "F")


@pytest.mark.parametrize("value", ["Oslo\n", "Oslo", "\n", "", "a < b\n</param\n"])
def test_a_forced_text_ends_where_its_parser_ends_it(vocabulary: Vocabulary, value: str) -> None:
    """A model may leave out the line break before the marker."""
    text = Tool("f", {"properties": {"a": {"type": "string"}}, "required": ["a"]})
    plan = ParserPlan(
        tool_format=TOOL_FORMATS["qwen3_coder"], reasoning_format=None, tools={"f": text}
    )
    answer = (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{value}</parameter>\n</function>\n</tool_call>"
    )
    follower = compile_constraint(forced(plan, [text], {}), vocabulary)
    ids = tokenizers.Tokenizer.from_file(VOCABULARY).encode(answer, add_special_tokens=False).ids
    assert follower.try_consume_tokens(ids) == len(ids) and follower.is_accepting()
    (call,) = plan.make().push(answer).calls
    assert json.loads(call.arguments) == {"a": value.removesuffix("\n")}


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_reasoning_and_special_tokens_fit_every_format(vocabulary: Vocabulary, name: str) -> None:
    """For markers that are special tokens, the grammar names their ids."""
    form = TOOL_FORMATS[name]
    text = {"type": "object", "properties": {"a": {"type": "string"}}}
    for reasoning in (None, ReasoningFormat(), ReasoningFormat(is_open=True)):
        plan = ParserPlan(tool_format=form, reasoning_format=reasoning, tools=TOOLS)
        special = dict.fromkeys(form.markers, 1) | {"</think>": 0}
        for special_ids in ({}, special):
            constraint = forced(plan, [*TOOLS.values(), Tool("f", text)], special_ids)
            compile_constraint(constraint, vocabulary)
            assert bool(constraint.lead) == (form.is_harmony or reasoning is not None)
            assert ("<[1]>" in constraint.source) == bool(special_ids)


def test_parallel_calls_are_bounded_and_can_be_one() -> None:
    form = TOOL_FORMATS["hermes"]
    many = ParserPlan(tool_format=form, reasoning_format=None, tools=TOOLS)
    one = ParserPlan(tool_format=form, reasoning_format=None, tools=TOOLS, max_calls=1)
    assert "{0,15}" in many.forced_grammar(list(TOOLS.values()), {})
    assert "{0,15}" not in one.forced_grammar(list(TOOLS.values()), {})


def test_the_configuration_names_every_format() -> None:
    assert set(ToolParserName.__args__) == {*TOOL_FORMATS, "auto", "none"}  # type: ignore[attr-defined]
    assert set(ReasoningParserName.__args__) == {  # type: ignore[attr-defined]
        *REASONING_FORMATS,
        "auto",
        "none",
    }


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", None, None),
        (call_formats.OPEN + "</think>", "hermes", "qwen3"),
        (call_formats.OPEN + "<function=", "qwen3_coder", None),
        (call_formats.OPEN + "<arg_key><think></think>", "glm45", "qwen3"),
        ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
        (harmony_format.CHANNEL + harmony_format.MESSAGE, "openai", "openai_gptoss"),
        ("<\uff5ctool\u2581call\u2581begin\uff5c>```json", "deepseek_v3", None),
        ("<\uff5ctool\u2581call\u2581begin\uff5c></think>", "deepseek_v31", "qwen3"),
    ],
)
def test_formats_are_told_from_the_template(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    assert tool_format_of(template) == tools
    assert reasoning_format_of(template) == reasoning


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<|Assistant|>", True),
        ("deepseek_r1", "<|Assistant|></think>", False),
    ],
)
def test_the_prompt_tells_whether_reasoning_has_begun(
    name: str, prompt: str, is_open: bool
) -> None:
    assert REASONING_FORMATS[name].is_open_after(prompt) is is_open
