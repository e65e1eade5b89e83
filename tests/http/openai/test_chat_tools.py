"""Tools and reasoning over /v1/chat/completions, with a scripted model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from moe_serve.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}"
    "{{ c.function.name }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% if effort is defined %}effort={{ effort }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>' if enable_thinking else '' }}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def served(start_served_once: Any) -> Any:
    return start_served_once(TEMPLATE)


def ask(served: Any, answer: str, **fields: Any) -> Any:
    client, engine = served
    engine.script = lambda request: answer
    response = client.post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()["choices"][0]
    events = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    return [event["choices"][0] for event in events if event["choices"]]


def prompt_of(served: Any) -> str:
    engine = served[1]
    text: str = engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids)
    return text


def test_a_call_in_a_whole_answer(served: Any) -> None:
    choice = ask(served, f"Let me see.\n{CALL}", tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert ask(served, CALL, tools=[TOOL])["message"]["content"] is None


def test_a_call_in_a_stream(served: Any) -> None:
    choices = ask(served, CALL * 2, tools=[TOOL], stream=True)
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [d["index"] for d in deltas if "id" in d] == [0, 1]
    for index in (0, 1):
        own = [delta["function"] for delta in deltas if delta["index"] == index]
        assert own[0]["name"] == "get_weather"
        assert all("name" not in later for later in own[1:])
        assert "".join(part["arguments"] for part in own) == '{"city": "Oslo"}'
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert not any(choice["delta"].get("content") for choice in choices)


def test_without_tools_or_with_none_a_call_is_text(served: Any) -> None:
    for fields in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = ask(served, CALL, **fields)
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        assert "get_weather" not in prompt_of(served)


def test_a_cut_call_ends_with_length(served: Any) -> None:
    choice = ask(served, CALL, tools=[TOOL], max_tokens=60)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"ci')


def test_messages_that_were_looked_through_are_counted(start_served: Any) -> None:
    """Each choice with tools counts once, whole or streamed, whatever it holds."""
    served = start_served(TEMPLATE)

    def counts() -> dict[str, float]:
        found = {}
        for line in served[0].get("/metrics").text.splitlines():
            if line.startswith("moe_serve:tool_call_parser_invocations_total{"):
                labels, value = line.rsplit(" ", 1)
                assert 'parser="hermes"' in labels
                found[labels.split('outcome="')[1].split('"')[0]] = float(value)
        return found

    assert counts() == {"calls": 0, "none": 0, "malformed": 0}
    ask(served, CALL)
    ask(served, CALL, tools=[TOOL], tool_choice="none")
    assert counts() == {"calls": 0, "none": 0, "malformed": 0}
    ask(served, CALL * 2, tools=[TOOL], n=2)
    ask(served, CALL, tools=[TOOL], stream=True)
    assert counts() == {"calls": 3, "none": 0, "malformed": 0}
    ask(served, "Hello.", tools=[TOOL], stream=True)
    ask(served, "<tool_call>\nnot JSON</tool_call>", tools=[TOOL])
    ask(served, f"<tool_call>nothing{CALL}", tools=[TOOL], stream=True)
    ask(served, CALL, tools=[TOOL], max_tokens=20)  # before its name was there
    assert counts() == {"calls": 3, "none": 1, "malformed": 3}


def test_only_one_call_where_calls_are_not_parallel(served: Any) -> None:
    choice = ask(served, CALL * 3, tools=[TOOL], parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


def test_tools_and_earlier_calls_reach_the_template(served: Any) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    broken = [{"id": "2", "function": {"name": "g", "arguments": '{"a'}}]
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "why"},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "assistant", "tool_calls": broken},
    ]
    ask(served, "", messages=messages, tools=[TOOL])
    assert prompt_of(served) == (
        '<user>hi<assistant><think>why</think><tool_call>{"a": 1}f<tool>42'
        f'<assistant><tool_call>"{{\\"a"g[{json.dumps(TOOL)}]<assistant>'
    )


def test_templates_that_join_text_get_arguments_as_text(start_served: Any) -> None:
    """DeepSeek's templates join arguments to a string, which an object cannot be."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<tool_call>' + c.function.arguments }}{% endfor %}{% endfor %}{{ tools }}"
    )
    served = start_served(template)
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"a":1}'}}]
    ask(served, "", messages=[*ASK, {"role": "assistant", "content": "x", "tool_calls": calls}])
    assert prompt_of(served).startswith('hix<tool_call>{"a":1}')


@pytest.mark.parametrize(
    ("template", "config", "reason"),
    [
        ("{{ messages }} {{ tools }}", {}, "server.tool_parser"),
        (TEMPLATE, {"tool_parser": "none"}, "server.tool_parser"),
        ("{{ messages }}", {"tool_parser": "hermes"}, "does not support tools"),
    ],
)
def test_a_model_that_cannot_call_refuses_tools(
    start_served: Any, template: str, config: dict[str, Any], reason: str
) -> None:
    client, _ = start_served(template, **config)
    response = client.post("/v1/chat/completions", json={"messages": ASK, "tools": [TOOL]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "tools_not_supported")
    assert reason in error["message"]
    fields = {"messages": ASK, "tools": [TOOL], "tool_choice": "none"}
    assert client.post("/v1/chat/completions", json=fields).status_code == 200


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL] * 2}, "tools"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "g")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("none", "f")}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_tools(served: Any, fields: dict[str, Any], param: str) -> None:
    response = served[0].post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert "should" not in error["message"] and "{{" not in error["message"]


def test_tools_have_limits(served: Any) -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": deep}
    for parameters, reason in ((deep, "deeper than 32"), ({"a": "x" * 300_000}, "limit is 262144")):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        response = served[0].post("/v1/chat/completions", json={"messages": ASK, "tools": [tool]})
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]


def test_a_forced_call_has_a_grammar(served: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        ask(served, CALL, tools=[TOOL], tool_choice=choice)
        constraint = served[1].submitted[-1].rules.constraint
        assert constraint.kind == "lark"
        assert "get_weather" in constraint.source
    ask(served, CALL, tools=[TOOL], tool_choice="auto")
    assert served[1].submitted[-1].rules.constraint is None


def test_reasoning_has_both_names(served: Any) -> None:
    choice = ask(served, "<think>\nHm.\n</think>\n\nYes.")
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
    }
    chunks = ask(served, "<think>Hm.</think>Yes.", stream=True)
    for name, text in (("reasoning", "Hm."), ("reasoning_content", "Hm."), ("content", "Yes.")):
        assert "".join(chunk["delta"].get(name) or "" for chunk in chunks) == text


def test_reasoning_can_be_hidden_or_left_in(served: Any) -> None:
    text = "<think>Hm.</think>Yes."
    hidden = ask(served, text, include_reasoning=False)["message"]
    assert "reasoning" not in hidden
    assert hidden["content"] == "Yes."
    assert ask(served, text, separate_reasoning=False)["message"]["content"] == text


def test_a_prompt_that_opens_the_reasoning(served: Any) -> None:
    options = {"enable_thinking": True}
    message = ask(served, "Hm.</think>Yes.", chat_template_kwargs=options)["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    message = ask(served, "Hm.</think>Yes.", chat_template_kwargs=options, reasoning_effort="none")
    assert message["message"]["reasoning"] == "Hm.", "what the request says itself wins"
    assert "reasoning" not in ask(served, "Yes.", reasoning_effort="none")["message"]


THINK: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("answer", "fields", "expected"),
    [
        ("Hm.</think>\n\n{}", JSON, ("Hm.", "{}")),
        ("Hm.</think>\n a", {"regex": "\n a"}, ("Hm.", "\n a")),
        ("{}", JSON, ("{}", "")),  # not closed
        # a grammar may say itself where the reasoning ends
        ("Hm.</think>Yes.", {"regex": ".*</think>Yes\\."}, ("Hm.", "Yes.")),
    ],
)
def test_what_is_reasoning_under_a_grammar(
    served: Any, is_streamed: bool, answer: str, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    found = ask(served, answer, stream=is_streamed, **fields, **THINK)
    parts = [choice["delta"] for choice in found] if is_streamed else [found["message"]]
    read = ["".join(part.get(name) or "" for part in parts) for name in ("reasoning", "content")]
    assert tuple(read) == expected


def lead_of(served: Any, **fields: Any) -> str:
    ask(served, "{}", **fields)
    lead: str = served[1].submitted[-1].rules.constraint.lead
    return lead


def test_when_reasoning_comes_before_a_grammar(served: Any) -> None:
    assert "reason: thought\n" in lead_of(served, regex="a", **THINK), "it must"
    for fields in (JSON, {"tools": [TOOL], "tool_choice": "required"}):
        assert 'reason: ("\\n"{0,2} "<think>" thought "\\n"{0,2})?' in lead_of(served, **fields)
        assert lead_of(served, reasoning_effort="none", **fields) == ""
        assert lead_of(served, separate_reasoning=False, **fields) == ""
    assert lead_of(served, regex="</think>a", **THINK) == ""
    assert lead_of(served, guided_json={"description": "</think>"}, **THINK) != ""
    begun = {"role": "assistant", "content": "It is"}
    assert lead_of(served, messages=[*ASK, begun], continue_final_message=True, **JSON) == ""
    begun["content"] = "<think>It is"
    assert lead_of(served, messages=[*ASK, begun], continue_final_message=True, **JSON) != ""


def test_a_grammar_from_the_first_token_on(start_served: Any) -> None:
    served = start_served(TEMPLATE, grammar_in_reasoning=True)
    message = ask(served, "{}", **JSON, **THINK)["message"]
    assert message["content"] == "{}" and "reasoning" not in message
    assert lead_of(served, **JSON, **THINK) == ""
    assert lead_of(served, tools=[TOOL], tool_choice="required") != "", "calls are as ever"


def test_what_the_template_does_not_heed_is_named(served: Any) -> None:
    fields = {"chat_template_kwargs": {"effort": "x", "foo": 1}, "reasoning_effort": "low"}
    response = served[0].post("/v1/chat/completions", json={"messages": ASK, **fields})
    ignored = response.headers["x-ignored-parameters"]
    assert ignored == "chat_template_kwargs.foo, reasoning_effort"
    assert prompt_of(served).endswith("effort=x<assistant>")


def test_markers_that_are_special_tokens_reach_the_parser(
    start_served: Any, tokenizer: Tokenizer
) -> None:
    """Special tokens are left out of the text, except those that the parser needs."""
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens(["<|channel|>", "<|message|>", "<|start|>", "<|x|>", "<|return|>"])
    special = Tokenizer(backend, eos_token_ids=tokenizer.eos_token_ids)
    served = start_served(TEMPLATE + "{# <|channel|><|message|> #}", special)
    answer = "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Y<|x|>es"
    message = ask(served, answer)["message"]
    assert (message["reasoning"], message["content"]) == ("Hm", "Yes")
    message = ask(served, answer.replace("Y<|x|>es", "{}"), **JSON)["message"]
    assert (message["reasoning"], message["content"]) == ("Hm", "{}")
    ids = special.special_ids
    assert f'start: analysis? <[{ids["<|channel|>"]}]> "final"' in lead_of(served, **JSON)
    call = (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Oslo"}'
    )
    choice = ask(served, call, tools=[TOOL])
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert choice["finish_reason"] == "tool_calls"
