"""Constraints in every server's spelling, and the constraint that the engine gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
BY_SCHEMA = Constraint("json_schema", TEXT)
NAMED = {"name": "a", "schema": SCHEMA, "strict": True, "description": "d"}
GBNF, LARK = 'root ::= "a"', 'start: "a"'
TAGS = {
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
TRIGGERED = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "begin": "<f=a>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            }
        ],
    }
}
BY_TAGS = Constraint("structural_tag", json.dumps(TAGS, separators=(",", ":")))
TAG_TEXT = json.dumps({"type": "structural_tag", **TAGS})

SPELLINGS: list[tuple[dict[str, Any], Constraint | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, Constraint("json_object")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, BY_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
    ({"structured_outputs": {"json": TEXT}}, BY_SCHEMA),
    ({"structured_outputs": {"regex": "a|b"}}, Constraint("regex", "a|b")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint("choice", '["a","b"]')),
    ({"structured_outputs": {"grammar": LARK}}, Constraint("lark", LARK)),
    ({"structured_outputs": {"json_object": True}}, Constraint("json_object")),
    ({"guided_json": SCHEMA}, BY_SCHEMA),
    ({"guided_regex": "a|b"}, Constraint("regex", "a|b")),
    ({"guided_choice": ["a", "b"]}, Constraint("choice", '["a","b"]')),
    ({"guided_grammar": LARK}, Constraint("lark", LARK)),
    ({"regex": "a|b"}, Constraint("regex", "a|b")),
    ({"json_schema": SCHEMA}, BY_SCHEMA),
    ({"json_schema": TEXT}, BY_SCHEMA),
    ({"response_format": {"type": "structural_tag", **TAGS}}, BY_TAGS),
    (
        {"response_format": {"type": "structural_tag", **TRIGGERED}},
        Constraint("structural_tag", json.dumps(TRIGGERED, separators=(",", ":"))),
    ),
    (
        {"structured_outputs": {"structural_tag": TAG_TEXT}},
        Constraint("structural_tag", TAG_TEXT),
    ),
    ({"structured_outputs": {"structural_tag": TAGS}}, BY_TAGS),
    ({"structural_tag": TAG_TEXT}, Constraint("structural_tag", TAG_TEXT)),
    ({"structural_tag": ""}, None),
]


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> Iterator[TestClient]:
    app = make_app()
    yield TestClient(app)
    app.state.gate.close()


def send(client: TestClient, route: str = CHAT, **fields: Any) -> Any:
    content = {"messages": [{"role": "user", "content": "x"}]} if route == CHAT else {"prompt": "x"}
    return client.post(route, json={**content, "max_tokens": 9, **fields})


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_every_spelling(client: TestClient, engine: Any, route: str) -> None:
    for fields, expected in SPELLINGS:
        response = send(client, route, **fields)
        assert response.status_code == 200, (fields, response.text)
        assert "x-ignored-parameters" not in response.headers
        assert engine.submitted[-1].rules.constraint == expected, fields


@pytest.mark.parametrize("field", ["ebnf", "grammar", "guided_grammar"])
def test_gbnf_reaches_the_engine_as_lark(client: TestClient, engine: Any, field: str) -> None:
    assert send(client, **{field: GBNF}).status_code == 200
    constraint = engine.submitted[-1].rules.constraint
    assert constraint.kind == "lark" and "start" in constraint.source


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"ebnf": "x" * 70_000}, "ebnf"),
    ],
)
def test_no_grammar_is_a_400(
    client: TestClient, engine: Any, fields: dict[str, Any], param: str
) -> None:
    error = send(client, **fields).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_grammar", param), error
    assert error["message"].startswith(f"{param}: ") and len(error["message"]) < 400
    assert engine.submitted == []
    assert send(client, guided_regex="ok").status_code == 200, "the next is served"


def tagged(**changes: Any) -> dict[str, Any]:
    tag = {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>", **changes}
    first = {"begin": "<f=b>", "schema": {}, "end": ""}
    return {"structures": [first, tag], "triggers": ["<f="]}


@pytest.mark.parametrize(
    ("tags", "place"),
    [
        (tagged(begin="x"), "structures.1.begin"),
        (tagged(schema={"$ref": "#"}), "structures.1.schema"),
        (tagged(other=1), "structures.1.other"),
        (tagged() | {"triggers": []}, "triggers"),
        (tagged() | {"structures": None}, "structures"),
        ({"format": {"type": "sequence", "elements": []}}, "format.type"),
    ],
)
def test_a_wrong_tag_is_named(
    client: TestClient, engine: Any, tags: dict[str, Any], place: str
) -> None:
    for route in (CHAT, COMPLETIONS):
        for field, value in (
            ("response_format", {"type": "structural_tag", **tags}),
            ("structural_tag", json.dumps(tags)),
        ):
            error = send(client, route, **{field: value}).json()["error"]
            assert error["code"] == "invalid_grammar", error
            assert error["message"].startswith(f"{field}: ") and len(error["message"]) < 450
            if tags.get("structures", 1) is not None:  # null is as if it were left out
                assert error["param"] == f"{field}.{place}"
    assert engine.submitted == []


def test_what_is_of_another_type_is_refused(client: TestClient) -> None:
    for fields, name in (
        ({"type": "text", "triggers": ["x"]}, "triggers"),
        ({"type": "json_object", "format": {}}, "format"),
        ({"type": "structural_tag", **TAGS, "schema": SCHEMA}, "schema"),
        ({"type": "structural_tag", **TAGS, "json_schema": NAMED}, "json_schema"),
        ({"type": "structural_tag", **TAGS, "other": 1}, "other"),
    ):
        error = send(client, response_format=fields).json()["error"]
        assert error["param"] == f"response_format.{name}", error
    assert send(client, structural_tag=3).json()["error"]["code"] == "invalid_type"


def test_two_constraints_are_one_too_many(client: TestClient) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
    ):
        error = send(client, **fields).json()["error"]
        assert error["code"] == "invalid_value" and "send only one" in error["message"]


def test_a_schema_deeper_than_the_stack(client: TestClient) -> None:
    for depth in (70, 900, 10_000):
        body = '{"prompt":"x","guided_json":' + '{"items":' * depth + "true" + "}" * depth + "}"
        response = client.post(
            COMPLETIONS, content=body, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 400 and "deep" in response.text


def test_bad_words_and_allowed_tokens(client: TestClient, engine: Any) -> None:
    assert send(client, bad_words=["ab"], allowed_token_ids=[3, 4]).status_code == 200
    request = engine.submitted[-1]
    assert request.params.allowed_token_ids == (3, 4)
    assert tuple(engine.tokenizer.encode("ab")) in request.rules.bad_word_ids


def test_what_the_answer_ran_into_is_told(client: TestClient, engine: Any) -> None:
    """The request is at fault, so the status is not 500; the engine's own message stays in the
    log."""

    def deltas(request: GenerationRequest) -> Iterator[TokenDelta]:
        yield TokenDelta(
            request_id=request.request_id,
            finish_reason=FinishReason.ERROR,
            error="its grammar allows no token here",
            is_of_request=True,
        )

    engine._deltas = deltas
    response = send(client, guided_regex="a")
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "The answer cannot be continued: its grammar allows no token here.",
        "type": "invalid_request_error",
        "param": None,
        "code": "constraint_failed",
    }
