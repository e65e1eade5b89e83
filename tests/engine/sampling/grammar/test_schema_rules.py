"""JSON schemas that the library would break silently or refuse without need."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.compiler import compile_constraint, grammar_of
from moe_serve.engine.sampling.grammar.schema_rules import (
    KNOWN_FORMATS,
    prepared_lark,
    prepared_source,
)
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.errors import InvalidGrammarError

BYTES = Vocabulary(tuple(bytes([i]) for i in range(256)) + (b"<end>",), frozenset({256}), (256,))


def fits(schema: dict[str, Any], text: str) -> bool:
    matcher = compile_constraint(Constraint("json_schema", json.dumps(schema)), BYTES).deep_copy()
    raw = list(text.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and bool(matcher.is_accepting())


def answer(schema: dict[str, Any], seed: int) -> str | None:
    """Draws an answer by the masks; None if the schema is refused or the answer did not end in
    time."""
    try:
        matcher = compile_constraint(Constraint("json_schema", json.dumps(schema)), BYTES)
    except InvalidGrammarError:
        return None
    rng, made = random.Random(seed), bytearray()
    for _ in range(40):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed and not matcher.is_error()
        if 256 in allowed and (len(allowed) == 1 or rng.random() < 0.4):
            return made.decode()
        token = rng.choice([i for i in allowed if i != 256])
        matcher.consume_token(token)
        made.append(token)
    return None


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.05}, "0"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "1"),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, "0"),
        ({"maximum": 0.5, "anyOf": [{"exclusiveMinimum": 0}]}, "0"),
    ],
)
def test_an_excluded_bound_is_excluded(schema: dict[str, Any], text: str) -> None:
    """The library allowed the excluded number itself if the other bound is less than 1 away."""
    numeric = {"type": "number", **schema}
    assert not fits(numeric, text)
    inner = {"-": "-0.25", "1": "1.25", "0": "0.25"}[text[0]] if text != "-1" else "-1.25"
    assert fits(numeric, inner) or "exclusiveMaximum" in schema and fits(numeric, "0.025")
    whole = {"type": "object", "properties": {"a": numeric}, "required": ["a"]}
    assert not fits(whole, f'{{"a":{text}}}')


BOUND = st.one_of(
    st.integers(-20, 20),
    st.sampled_from([-1.5, -0.5, -0.25, -0.05, 0.0, -0.0, 0.05, 0.5, 0.75, 1.25, 2.5, 1e-3, 19.99]),
    st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 10**20, 1e-7]),
)
NUMERIC = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer"])},
    optional={
        "minimum": BOUND,
        "maximum": BOUND,
        "exclusiveMinimum": BOUND,
        "exclusiveMaximum": BOUND,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.25, 0.1, 7]),
    },
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(NUMERIC, st.one_of(st.none(), NUMERIC), st.integers(0, 3))
def test_numbers_that_masks_allow_fit_the_schema(
    first: dict[str, Any], second: dict[str, Any] | None, seed: int
) -> None:
    schema = first if second is None else {**first, "allOf": [second]}
    text = answer(schema, seed)
    if text is not None:
        assert jsonschema_rs.is_valid(schema, json.loads(text)), (schema, text)


@pytest.mark.parametrize("limit", [2**53 + 1, -(2**53) - 1, float("inf"), float("nan")])
def test_a_bound_with_too_many_digits_is_refused(limit: int) -> None:
    with pytest.raises(
        InvalidGrammarError, match="#/minimum has more digits than a 64-bit float can store"
    ):
        fits({"type": "integer", "minimum": limit}, "1")


def test_unknown_formats_are_annotations() -> None:
    assert fits({"type": "string", "format": "color"}, '"red"')
    assert not fits({"type": "string", "format": "date"}, '"red"')
    for name in KNOWN_FORMATS:
        assert prepared_source(json.dumps({"format": name})) == json.dumps({"format": name})
        fits({"type": "string", "format": name}, '"x"')
    named = {"properties": {"format": {"const": "x"}, "x-guidance": {}}, "const": {"format": "y"}}
    assert prepared_source(json.dumps(named)) == json.dumps(named), "names and values are no keys"


def test_one_of_is_followed_as_any_of() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert fits(schema, "1") and fits(schema, "1.5") and not fits(schema, '"1"')
    lark = prepared_lark("start: %json " + json.dumps(schema))
    compile_constraint(Constraint("lark", lark), BYTES)


def test_unique_items_are_refused_by_their_place() -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags}}
    with pytest.raises(InvalidGrammarError, match="uniqueItems at #/properties/tags cannot be"):
        fits(schema, "{}")
    assert fits({**tags, "maxItems": 1}, '["a"]') and fits({**tags, "uniqueItems": False}, "[]")


@pytest.mark.parametrize("options", [{"lenient": True}, {"whitespace_flexible": False}, 3])
def test_options_of_the_library_are_not_for_clients(options: object) -> None:
    """The option `lenient` would ignore what the library cannot enforce."""
    schema = {"type": "object", "x-guidance": options, "properties": {"a": {"not": {}}}}
    for kind, source in (
        ("json_schema", json.dumps(schema)),
        ("lark", "start: %json " + json.dumps(schema)),
    ):
        with pytest.raises(InvalidGrammarError, match="not"):
            compile_constraint(Constraint(kind, source), BYTES)  # type: ignore[arg-type]
    plain = Constraint("json_schema", '{"type": "object"}')
    given_too = Constraint("json_schema", json.dumps({"type": "object", "x-guidance": options}))
    assert grammar_of(given_too, BYTES) == grammar_of(plain, BYTES)


def test_schemas_that_need_no_change_stay_as_they_are() -> None:
    source = '{"type":"number",  "exclusiveMinimum":0,"maximum":5}'
    assert prepared_source(source) == source
    lark = 'start: "%json {" X\nX: %json {"type":"string"}'
    assert prepared_lark(lark) == lark
