"""A grammar whose cost grows with the answer ends at a limit on work, and its neighbours get the
same tokens."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.matcher import SequenceMatcher
from moe_serve.engine.request.request import FinishReason
from moe_serve.engine.sampling.grammar.compiler import compile_constraint
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary, vocabulary_of
from moe_serve.errors import InvalidGrammarError
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer
from tests.support.cluster.layouts import colocated, config, on_ranks, requests

VOCAB_SIZE = 4096  # of the demonstration model


def chain(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "string", "minLength": 3}]}
    return schema


AMBIGUOUS = [
    Constraint("lark", "start: a\na: a a | /[a-z ]/"),
    Constraint("lark", 'start: s\ns: s s s | s s | /[a-z]/ | " "'),
    Constraint("lark", 'start: a\na: a a a | b | ""\nb: a b | /[a-z ]/ | ""'),
    Constraint("lark", "start: a\na: b a | b\nb: /[a-z ]/ | /[a-z ]/ b"),
    Constraint("regex", "([a-z ]{1,500}){1,500}"),
    Constraint("regex", "((a|b| |[c-z]){1,60}){1,60}"),
]
BOUNDED = [  # large, and no trouble
    Constraint("regex", "(" + "|".join(f".*{c}.{{{i}}}" for i, c in enumerate("abcdef", 5)) + ")"),
    Constraint("json_schema", json.dumps(chain(12))),
    Constraint("json_schema", '{"type":"string","minLength":2000}'),
    Constraint(
        "json_schema", json.dumps({"enum": [f"{'word ' * (i % 5)}{i}" for i in range(900)]})
    ),
    Constraint(
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcd"]}),
    ),
    Constraint(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "patternProperties": {
                    f"^[a-z]{{1,{i + 1}}}x{i}$": {"type": "string"} for i in range(20)
                },
            }
        ),
    ),
    Constraint(
        "json_schema",
        json.dumps(
            {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(400)}}
        ),
    ),
    Constraint(
        "structural_tag",
        json.dumps(
            {
                "triggers": ["<"],
                "structures": [
                    {"begin": f"<a{i}>", "schema": chain(3), "end": f"</a{i}>"} for i in range(50)
                ],
            }
        ),
    ),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.load(demo_model_folder())
    return vocabulary_of(tokenizer, VOCAB_SIZE, frozenset(tokenizer.eos_token_ids))


@cache
def letters_of(words: Vocabulary) -> frozenset[int]:
    return frozenset(i for i, token in enumerate(words.tokens) if re.fullmatch(rb"[a-z ]+", token))


def walk(constraint: Constraint, words: Vocabulary, num_tokens: int) -> tuple[int, str, float]:
    """Draws an answer of the allowed letters and returns its length, why it ended, and the CPU
    seconds."""
    try:
        matcher = SequenceMatcher(compile_constraint(constraint, words).deep_copy())
    except InvalidGrammarError as error:
        return 0, str(error), 0.0
    rng, answer, letters_of_words = random.Random(3), list[int](), letters_of(words)
    while len(answer) < num_tokens:
        bits_W = np.zeros(VOCAB_SIZE // 32, np.uint32)
        if (why := matcher.fill(answer, bits_W)) is not None:
            return len(answer), why, matcher.cpu_s
        allowed = np.flatnonzero(np.unpackbits(bits_W.view(np.uint8), bitorder="little"))
        ids = [i for i in allowed.tolist() if i not in words.eos_ids]
        letters = [i for i in ids if i in letters_of_words]
        if not ids:
            return len(answer), "complete", matcher.cpu_s
        answer.append(rng.choice(letters or ids))
    return len(answer), "", matcher.cpu_s


@pytest.mark.parametrize("constraint", AMBIGUOUS, ids=lambda c: c.source[:20])
def test_an_ambiguous_grammar_ends_at_a_limit_of_work(
    vocabulary: Vocabulary, constraint: Constraint
) -> None:
    """The answer ends at the same token each time, because the limit does not depend on a clock."""
    length, why, cpu_s = walk(constraint, vocabulary, 200)
    assert length < 200 and re.search("[Tt]oo many", why) and "\n" not in why, (length, why)
    assert cpu_s < 20, "tenths of a second on a quiet machine; it had no end before"
    assert walk(constraint, vocabulary, 200)[:2] == (length, why)


@pytest.mark.parametrize("constraint", BOUNDED, ids=lambda c: c.source[:20])
def test_large_grammars_are_followed_as_ever(
    vocabulary: Vocabulary, constraint: Constraint
) -> None:
    length, why, _ = walk(constraint, vocabulary, 40)
    assert length == 40 or why == "complete", (length, why)


def test_a_sequence_may_spend_so_much_of_the_processor(vocabulary: Vocabulary) -> None:
    matcher = SequenceMatcher(Grammars(lambda: vocabulary).matcher(Constraint("regex", "a+")))
    bits_W = np.zeros(VOCAB_SIZE // 32, np.uint32)
    assert matcher.fill([], bits_W) is None
    matcher.cpu_s = 3600.0
    why = matcher.fill([], bits_W)
    assert why is not None and "3600.0 s of processor time, and 2.0 s are allowed" in why


def test_offenders_end_alone_on_ranks_too() -> None:
    """Their neighbours have the same tokens as without them."""
    of, free = config(1, 1, 2), requests(8, VOCAB_SIZE, 16)
    tokenizer = Tokenizer.load(demo_model_folder())
    letters = tuple(
        i for i in range(VOCAB_SIZE) if re.fullmatch(rb"[a-z ]{2,}", tokenizer.token_bytes(i))
    )
    hostile = {1: AMBIGUOUS[1], 5: AMBIGUOUS[3]}
    mixed = [
        replace(
            request,
            params=replace(
                request.params, constraint=hostile[i], allowed_token_ids=letters, max_tokens=200
            ),
        )
        if i in hostile
        else request
        for i, request in enumerate(free)
    ]
    alone = colocated(of, [r for i, r in enumerate(free) if i not in hostile])
    for found in (colocated(of, mixed), on_ranks(of, mixed)):
        ended = {key: answer for key, answer in found.items() if key in {"r1", "r5"}}
        assert {a.end for a in ended.values()} == {FinishReason.ERROR}, ended
        assert {key: a for key, a in found.items() if key not in ended} == alone
