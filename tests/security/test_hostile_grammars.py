"""Patterns and schemas that are expensive to compile are refused in time and kept in bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_serve.engine.sampling.grammar.limits import MAX_KEPT, MAX_VERDICTS
from tests.support.security.real_server import CHAT, TEXT, RealServer

PATTERNS = (
    r"(a+)+b",
    r"(a|a)*b",
    r"(a{1,1000}){1,1000}",
    r"((a{0,100}){0,100}){0,100}",
    r"(.*a){25}",
    r"(?=a)b",
    r"(a)\1",
    "(" * 5000,
    "a" * 100_000,
    r"[\u0000-\U0010ffff]{100000}",
    "",
)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[:20])
def test_a_pattern_ends_or_is_refused(server: RealServer, pattern: str) -> None:
    """CVE-2026-55574, PYSEC-2026-3933 (the second engine had no limit): on every route."""
    schema = {"type": "string", "pattern": pattern}
    ways: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"structured_outputs": {"regex": pattern}}),
        (CHAT, {"structured_outputs": {"regex": pattern}}),
        (CHAT, {"response_format": {"type": "json_schema",
                                    "json_schema": {"name": "x", "schema": schema}}}),
        (CHAT, {"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": [
            {"begin": "<a>", "schema": schema, "end": "</a>"}]}}),
        (CHAT, {"structured_outputs": {"grammar": f"start: /{pattern}/"}}),
    ]  # fmt: skip
    for route, fields in ways:
        response = server.post(route, **fields)
        assert response.status_code in (200, 400), response.text


def test_schemas_that_are_never_the_same_are_not_all_kept(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2025-29770, GHSA-hf3c-wxg2-49q9: the cache of grammars has a bound."""
    gate: Any = server.app.state.gate
    assert gate.grammars._max_kept == MAX_KEPT
    monkeypatch.setattr(gate.grammars, "_max_kept", 10)  # sooner reached
    for number in range(10 + 15):
        schema = {"type": "object", "properties": {f"f{number}": {"enum": [number]}}}
        response = server.post(
            CHAT,
            max_tokens=1,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            },
        )
        assert response.status_code == 200, response.text
    assert len(gate.grammars) <= 10
    assert len(gate) <= MAX_VERDICTS


@pytest.mark.parametrize(
    "tags",
    [
        {"triggers": ["a" * i for i in range(1, 33)]},
        {"triggers": ["b" * 500 + chr(99 + i) for i in range(20)]},  # none begins a tag
        {"triggers": ["\u0000", "\U0010ffff", '"', "\\", "\n"]},
        {"structures": [{"begin": "a" * i, "schema": {}, "end": ""} for i in range(1, 129)]},
        {"structures": [{"begin": "a", "schema": {}, "end": ""}] * 50_000},
        {
            "structures": [
                {"begin": "a", "schema": '{"items":' * 5000 + "1" + "}" * 5000, "end": ""}
            ]
        },
        {"structures": [{"begin": "a", "schema": {"enum": ["x" * 70_000]}, "end": ""}]},
        {"structures": {"begin": "a"}},
    ],
    ids=lambda tags: str(tags)[:30],
)
def test_tags_end_or_are_refused(server: RealServer, tags: dict[str, Any]) -> None:
    """Tags are many, long or nested; the server goes on."""
    whole = {"triggers": ["a"], "structures": [{"begin": "a(", "schema": {}, "end": ")"}], **tags}
    for route in (TEXT, CHAT):
        for fields in (
            {"response_format": {"type": "structural_tag", **whole}},
            {"structured_outputs": {"structural_tag": json.dumps(whole)}},
        ):
            response = server.post(route, max_tokens=4, **fields)
            assert response.status_code in (200, 400), response.text
