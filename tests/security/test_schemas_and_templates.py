"""Schemas and templates of requests are refused or stay within limits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from moe_serve.errors import InvalidRequestError
from moe_serve.text.chat_template import ChatTemplate
from tests.support.security.real_server import BOTH, CHAT, RealServer, refused

DEEP: dict[str, Any] = {"type": "object"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
BAD_SCHEMAS: dict[str, Any] = {
    "no schema": "x",
    "number": 7,
    "unknown type": {"type": "nothing"},
    "loop": {"$ref": "#"},
    "loop of two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                    "$ref": "#/$defs/a"},
    "reference to nowhere": {"$ref": "#/$defs/nowhere"},
    "reference to the net": {"$ref": "http://127.0.0.1:1/schema.json"},
    "reference to a file": {"$ref": "file:///etc/passwd"},
    "bad pattern": {"type": "string", "pattern": "("},
    "negative length": {"type": "string", "minLength": -1},
    "never": {"type": "integer", "minimum": 5, "maximum": 1},
    "false": {"not": {}},
    "bad properties": {"type": "object", "properties": []},
}  # fmt: skip
TEMPLATES = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ tokenize('x') }}",
)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_schemas_that_nobody_can_follow(server: RealServer, name: str) -> None:
    """CVE-2025-48942, PYSEC-2025-54, GHSA-vrq3-r879-7m65, CVE-2026-105757: a bad schema fails its
    own request, in `response_format` and in a tool."""
    schema = BAD_SCHEMAS[name]
    refused(server.post(CHAT, response_format=schema_format(schema)), 400)
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    refused(server.post(CHAT, tools=[tool], tool_choice="required"), 400)


def test_a_deep_schema(server: RealServer) -> None:
    """CVE-2025-48943, CVE-2026-105757: 300 levels, and a body of 100 000 brackets."""
    refused(server.post(CHAT, response_format=schema_format(DEEP)), 400)
    for route in BOTH:
        raw = b'{"messages": [], "prompt": "", "response_format": %s}'
        refused(server.post_raw(route, raw % (b'{"a":' * 100_000 + b"1" + b"}" * 100_000)), 400)


def test_a_response_format_that_is_none(server: RealServer) -> None:
    """CVE-2025-48942: every partial or wrong shape of the field itself."""
    shapes: list[Any] = [
        {}, [], "json", 1, True, {"type": None}, {"type": "json_schema"}, {"type": "nonsense"},
        {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": None},
        {"json_schema": {"name": "x", "schema": {}}},
    ]  # fmt: skip
    for shape in shapes:
        refused(server.post(CHAT, response_format=shape), 400)


@pytest.mark.parametrize("route", BOTH)
def test_templates_of_a_request_are_not_rendered(server: RealServer, route: str) -> None:
    """CVE-2025-62426, PYSEC-2026-2013, CVE-2026-115918: endless loops, huge strings and attributes
    in a request's own template, or by its arguments."""
    for template in TEMPLATES:
        refused(server.post(route, chat_template=template), 400)
    override = {"messages": [], "tokenize": True, "chat_template": "x", "add_generation_prompt": 1}
    for name, value in override.items():
        refused(server.post(route, chat_template_kwargs={name: value}), 400)


@pytest.mark.parametrize(
    "expression",
    [
        "'x' * 10**10",
        "10**10 * 'x'",
        "[0] * 10**10",
        "10 ** (10 ** 10)",
        "'%10000000000d' % 1",
        "'x' | center(10**10)",
        "'x' | indent(10**10)",
        "'{:10000000000}'.format(1)",
        "'x'.ljust(10**10)",
        "('x' * 8000000) ~ ('x' * 8000000) ~ ('x' * 8000000)",
    ],
)
def test_a_single_expression_makes_no_giant(expression: str) -> None:
    """CVE-2026-115911, CVE-2025-62426: the output's limit is checked between pieces, so one
    expression that makes ten gigabytes, or a number without end, must be refused by itself."""
    template = ChatTemplate("{{ " + expression + " }}")
    clock = time.process_time()
    with pytest.raises(InvalidRequestError):
        template.render([{"role": "user", "content": "hi"}])
    assert time.process_time() - clock < 2, "it was computed, and refused afterwards"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__.os.popen('x') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% import 'os' as os %}{{ os }}",
        "{% include '/etc/passwd' %}",
        "{% set x = lipsum.__globals__ %}{{ x }}",
    ],
)
def test_a_models_own_template_is_in_a_sandbox(source: str) -> None:
    """CVE-2026-5760 (unsandboxed Jinja of a checkpoint): no attribute, module or file. A name that
    is not refused is undefined and prints nothing."""
    try:
        assert ChatTemplate(source).render([{"role": "user", "content": "hi"}]).strip() == ""
    except InvalidRequestError as error:
        assert "root:" not in str(error)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% set x = j %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(99) }}",
        "{% macro f() %}{% for i in range(9999) %}{% for j in range(9999) %}{% set x = j %}"
        "{% endfor %}{% endfor %}{% endmacro %}{{ f() }}",
    ],
)
def test_a_loop_that_prints_nothing_ends_too(source: str) -> None:
    """CVE-2026-115911, CVE-2025-62426: the time is checked in every turn, not only at output."""
    clock = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"took longer than 0\.1 s"):
        ChatTemplate(source, max_seconds=0.1).render([{"role": "user", "content": "hi"}])
    assert time.process_time() - clock < 2


def test_text_that_doubles() -> None:
    """CVE-2026-115911: string multiplication without `*`."""
    for operator in ("~", "+"):
        source = (
            "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}"
            "{% set ns.x = ns.x OPERATOR ns.x %}{% endfor %}"
        )
        with pytest.raises(InvalidRequestError, match="over the template's limit"):
            ChatTemplate(source.replace("OPERATOR", operator)).render([])
    assert ChatTemplate("{{ 'a' ~ 1 ~ none ~ [2] }}").render([]) == "a1None[2]"
