"""Structured output of a model that reasons first: the demonstration model with a template that
opens the reasoning and a token that closes it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig, ServerConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import build_engine
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

CLOSING_ID = 1
SOON = {str(CLOSING_ID): 10}  # it closes within some ten tokens
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}"
)
ASK = [{"role": "user", "content": "Is water wet?"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
PATTERNS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": BY_SCHEMA}, r'\{\s*"answer"\s*:\s*"(yes|no)"\s*,\s*"sure"[^}]*\}'),
    ({"structured_outputs": {"regex": "\n? [ab]{3}"}}, "\n? [ab]{3}"),
    ({"guided_choice": [" north", "south\n"]}, " north|south\n"),
    ({"ebnf": 'root ::= "<" [0-9]{1,3} ">"'}, "<[0-9]{1,3}>"),
    ({"guided_grammar": 'start: "x" %json {"enum": [1, 22]}'}, "x(1|22)"),
]


@pytest.fixture(scope="module", params=["special", "ordinary"])
def served(
    request: pytest.FixtureRequest, serve_live: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Serves a closing marker that is a special token, or a plain one as in Qwen3 and DeepSeek
    R1."""
    folder = tmp_path_factory.mktemp("reasoning") / "demo"
    shutil.copytree(demo_model_folder(), folder, ignore=shutil.ignore_patterns("predictor"))
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for token in content["added_tokens"]:
        if token["id"] == CLOSING_ID:
            token |= {"content": "</think>", "special": request.param == "special"}
    content["model"]["vocab"]["</think>"] = content["model"]["vocab"].pop("<|im_start|>")
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    config = EngineConfig(model=ModelConfig(path=str(folder)), cache=CacheConfig(num_pages=256))
    tokenizer, built = Tokenizer.load(folder), build_engine(config)
    assert tokenizer.encode("</think>") == [CLOSING_ID]
    engine = AsyncEngine(built, config.scheduler)
    model = ServedModel(
        name="demo",
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TEMPLATE),
        created=0,
        max_model_len=engine.max_model_len,
    )
    app = create_app(engine, model, ServerConfig(), grammars=built.grammars)
    with serve_live(app, engine) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        yield client
    app.state.gate.close()
    engine.close()


def post(served: httpx.Client, route: str, **fields: Any) -> Any:
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    response = served.post(route, json={limit: 300, "temperature": 1, **fields})
    assert response.status_code == 200, response.text
    return response


def chat(served: httpx.Client, **fields: Any) -> list[Any]:
    fields = {"messages": ASK, "seed": 1, "logit_bias": SOON, **fields}
    choices: list[Any] = post(served, "/v1/chat/completions", **fields).json()["choices"]
    return choices


@pytest.mark.sampled
@pytest.mark.parametrize(("fields", "pattern"), PATTERNS, ids=lambda value: str(value)[:16])
def test_every_kind_after_the_reasoning(
    served: httpx.Client, fields: dict[str, Any], pattern: str
) -> None:
    choices = chat(served, n=4, **fields)
    for choice in choices:
        assert re.fullmatch(pattern, choice["message"]["content"]), choice
        assert choice["finish_reason"] == "stop"
    thoughts = [choice["message"].get("reasoning", "") for choice in choices]
    assert any(len(thought) > 10 for thought in thoughts)
    assert not any("</think>" in thought for thought in thoughts)


def test_tags_in_the_answer_after_the_reasoning(served: httpx.Client) -> None:
    """A trigger inside the reasoning opens no tag."""
    tags = {
        "structures": [{"begin": "e<ask>", "schema": SCHEMA, "end": "</ask>"}],
        "triggers": ["e"],
    }
    choices = chat(served, n=4, response_format={"type": "structural_tag", **tags}, max_tokens=150)
    schema = PATTERNS[0][1]
    for choice in choices:
        rest = re.sub(f"e<ask>{schema}</ask>", "", choice["message"]["content"])
        _, trigger, cut = rest.partition("e")
        if trigger:  # a tag that is open still
            assert choice["finish_reason"] == "length"
            assert choice["message"]["content"].endswith(trigger + cut)
            assert cut.startswith("<ask>{") or "<ask>{".startswith(cut), choice
    assert any("e" in choice["message"].get("reasoning", "") for choice in choices)
    assert any("</ask>" in choice["message"]["content"] for choice in choices)


def test_a_stream_has_the_same(served: httpx.Client) -> None:
    fields = {"response_format": BY_SCHEMA, "logprobs": True}
    (whole,) = chat(served, **fields)
    message, response = (
        whole["message"],
        post(
            served,
            "/v1/chat/completions",
            **{"messages": ASK, "seed": 1, "logit_bias": SOON, "stream": True, **fields},
        ),
    )
    events = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    choices = [event["choices"][0] for event in events if event["choices"]]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(c["delta"].get(name) or "" for c in choices) == message[name]
    logprobs = [entry for c in choices for entry in (c["logprobs"] or {}).get("content", [])]
    assert logprobs == whole["logprobs"]["content"]
    assert "</think>" in [entry["token"] for entry in logprobs]
    assert json.loads(message["content"])["answer"] in ("yes", "no")


def test_cut_in_the_reasoning(served: httpx.Client) -> None:
    never = {str(CLOSING_ID): -100}
    (choice,) = chat(served, max_tokens=12, logit_bias=never, response_format=BY_SCHEMA)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "" and choice["message"]["reasoning"]


def test_without_reasoning_the_grammar_holds_at_once(served: httpx.Client) -> None:
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"separate_reasoning": False},
    ):
        (choice,) = chat(served, logit_bias={}, response_format=BY_SCHEMA, max_tokens=60, **fields)
        assert set(json.loads(choice["message"]["content"])) == {"answer", "sure"}
        assert "reasoning" not in choice["message"]
    answer = post(served, "/v1/completions", prompt="Hm.<think>\n", guided_choice=["yes"]).json()
    assert answer["choices"][0]["text"] == "yes"


def test_responses_and_messages_reason_first_too(served: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields = {"seed": 2, "logit_bias": SOON}
    response = post(
        served,
        "/v1/responses",
        input="Is water wet?",
        text={"format": {**form, "name": "answer"}},
        **fields,
    ).json()
    reasoning, message = response["output"]
    assert (reasoning["type"], message["type"]) == ("reasoning", "message")
    assert set(json.loads(message["content"][0]["text"])) == {"answer", "sure"}
    blocks = post(
        served, "/v1/messages", messages=ASK, output_config={"format": form}, **fields
    ).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert set(json.loads(blocks[1]["text"])) == {"answer", "sure"}


def test_a_schema_that_allows_nothing_is_refused_before_any_reasoning(
    served: httpx.Client,
) -> None:
    body = {"messages": ASK, "guided_json": {"$ref": "#"}}
    response = served.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_grammar"


NEVER = {str(CLOSING_ID): -100}  # by itself


@pytest.mark.sampled
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_the_reasoning(served: httpx.Client, budget: int) -> None:
    fields = {"logit_bias": NEVER, "logprobs": True, "return_token_ids": True, "max_tokens": 20}
    fields["ignore_eos"] = True
    (free,) = chat(served, **fields)
    found = chat(served, **fields, thinking_token_budget=budget, n=3)
    for choice in found:
        ids = choice["token_ids"]
        assert [i for i, token in enumerate(ids) if token == CLOSING_ID] == [budget]
        assert len(ids) == 20 and choice["finish_reason"] == "length"
        assert choice["message"]["content"] and bool(choice["message"].get("reasoning")) <= (
            budget > 0
        )
        assert choice["logprobs"]["content"][budget]["token"] == "</think>"
        assert choice["logprobs"]["content"][budget]["logprob"] < 0, "the model's own"
    assert found[0]["token_ids"][:budget] == free["token_ids"][:budget]
    assert len({tuple(choice["token_ids"]) for choice in found}) == 3
    (alone,) = chat(served, **fields, thinking_token_budget=budget)
    assert alone == found[0], "the same in every batch"


def test_a_budget_that_is_not_spent_changes_nothing(served: httpx.Client) -> None:
    fields = {"return_token_ids": True, "max_tokens": 50, "n": 2}
    plain = chat(served, **fields)
    assert all(CLOSING_ID in choice["token_ids"] for choice in plain)
    for budget in (45, -1, None):
        assert chat(served, **fields, thinking_token_budget=budget) == plain


def test_a_budget_and_then_the_grammar(served: httpx.Client) -> None:
    fields = {"logit_bias": NEVER, "response_format": BY_SCHEMA, "return_token_ids": True}
    for choice in chat(served, **fields, thinking_token_budget=5, n=4, temperature=1.5):
        assert set(json.loads(choice["message"]["content"])) == {"answer", "sure"}
        place = choice["token_ids"].index(CLOSING_ID)
        assert 5 <= place <= 8, "at once, or when a character is complete"
        assert choice["finish_reason"] == "stop"
    for off in ({"reasoning_effort": "none"}, {"separate_reasoning": False}):
        (choice,) = chat(served, **{**fields, **off}, thinking_token_budget=0)
        assert CLOSING_ID not in choice["token_ids"]
        assert set(json.loads(choice["message"]["content"])) == {"answer", "sure"}


def test_a_budget_where_the_reasoning_stays_in_the_content(served: httpx.Client) -> None:
    fields = {"logit_bias": NEVER, "separate_reasoning": False, "return_token_ids": True}
    (choice,) = chat(served, **fields, max_tokens=9, thinking_token_budget=4)
    assert choice["token_ids"].index(CLOSING_ID) == 4 and "reasoning" not in choice["message"]


def test_budgets_of_responses_and_messages(served: httpx.Client) -> None:
    fields = {"seed": 2, "logit_bias": NEVER}
    post_to = {"max_output_tokens": 12, "thinking_token_budget": 3}
    output = post(served, "/v1/responses", input="Hm?", **fields, **post_to).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    body = {"messages": ASK, "max_tokens": 12, **fields}
    thinking = {"type": "enabled", "budget_tokens": 3}
    response = post(served, "/v1/messages", **body, thinking=thinking)
    # What the template does not look at is named; the budget is heeded.
    assert "budget_tokens" not in response.headers.get("X-Ignored-Parameters", "")
    assert [block["type"] for block in response.json()["content"]] == ["thinking", "text"]
    adaptive = {"type": "adaptive", "budget_tokens": 3}
    response = post(served, "/v1/messages", **body, thinking=adaptive)
    assert response.headers["X-Ignored-Parameters"] == "thinking.budget_tokens"
    assert [block["type"] for block in response.json()["content"]] == ["thinking"]
    both = {**body, "thinking": thinking, "thinking_token_budget": 4}
    error = served.post("/v1/messages", json=both).json()["error"]
    assert error["details"]["param"] == "thinking.budget_tokens"
    wrong = {**body, "thinking": {"type": "enabled", "budget_tokens": -1}}
    error = served.post("/v1/messages", json=wrong).json()["error"]
    assert error["details"]["param"] == "thinking.budget_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": -2},
        {"thinking_token_budget": "5"},
        {"thinking_token_budget": 2**31},
        {"thinking_token_budget": 5, "allowed_token_ids": [5, 6]},
        {"thinking_token_budget": 5, "bad_words": ["</think>"]},
    ],
    ids=str,
)
def test_budgets_that_cannot_be(served: httpx.Client, fields: dict[str, Any]) -> None:
    response = served.post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "thinking_token_budget"
