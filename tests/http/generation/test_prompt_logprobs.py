"""The log probabilities of a prompt are computed once and shown with all of its choices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from moe_serve.engine.request.request import DecodingRules, GenerationRequest, TokenLogprob
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation.answer_sequence import Piece
from moe_serve.http.generation.chat_request import AnswerOptions
from moe_serve.http.generation.context import EngineLimits
from moe_serve.http.generation.generation import SharedPromptLogprobs
from moe_serve.http.generation.prompts import Prompt
from moe_serve.http.generation.requests import build_engine_requests
from moe_serve.http.openai.bodies import CompletionBody
from moe_serve.text.text_stream import TextDelta

LIMITS = EngineLimits(max_model_len=4096, vocab_size=10)


def requests_for(num_prompts: int, length: int, **params: Any) -> list[GenerationRequest]:
    prompt = Prompt(token_ids=(1,) * length, text=None, param="prompt")
    options = AnswerOptions(params=SamplingParams(**params), default_max_tokens=16)
    rules = DecodingRules.of(options.params)
    return build_engine_requests("id", [prompt] * num_prompts, options, rules, LIMITS)


def piece(index: int, text: str, logprob: float | None = None) -> Piece:
    entry = None if logprob is None else (None, TokenLogprob(1, logprob, 1, ()))
    return Piece(index=index, delta=TextDelta(text=text), prompt_logprobs=entry)


def shown(pieces: list[Piece]) -> list[tuple[int, str, float | None]]:
    found = []
    for one in pieces:
        entry = one.prompt_logprobs and one.prompt_logprobs[1]
        found.append((one.index, one.delta.text, entry.logprob if entry else None))
    return found


def test_only_choice_0_asks_the_engine() -> None:
    requests = requests_for(2, 3, n=2, logprobs=1, prompt_logprobs=1)
    assert [request.rules.prompt_logprobs for request in requests] == [1, None, 1, None]


def test_a_choice_that_is_ahead_waits_for_its_choice_0() -> None:
    sharing = SharedPromptLogprobs(requests_for(2, 2, n=2, prompt_logprobs=0))
    assert sharing.share([piece(1, "a"), piece(3, "x")]) == []
    assert sharing.share([piece(1, "b")]) == []
    ready = sharing.share([piece(2, "y", -2.0), piece(0, "c", -1.0), piece(1, "d")])
    assert shown(ready) == [
        (2, "y", -2.0),
        (3, "x", -2.0),
        (0, "c", -1.0),
        (1, "a", -1.0),
        (1, "b", None),
        (1, "d", None),
    ]
    assert shown(sharing.share([piece(0, "e"), piece(3, "z")])) == [(0, "e", None), (3, "z", None)]


def test_their_number_is_limited() -> None:
    requests_for(1, 2000, n=47, logprobs=20, prompt_logprobs=20)
    message = r"logprobs = 20 requests 2016000 .* \(96000 tokens in 1 prompts and n = 48 choices"
    with pytest.raises(InvalidRequestError, match=message) as caught:
        requests_for(1, 2000, n=48, logprobs=20, prompt_logprobs=20)
    assert caught.value.param == "prompt_logprobs"
    assert str(caught.value).startswith("prompt_logprobs = 20")
    requests_for(1, 2000, n=48, logprobs=20)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "logprobs": 2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "echo with logprobs"),
    ],
)
def test_a_refusal_names_the_field_that_asked(fields: dict[str, Any], name: str) -> None:
    body = CompletionBody.model_validate({"prompt": "a", **fields})
    assert body.prompt_logprobs_field == name


@pytest.mark.parametrize("is_stream", [False, True])
def test_all_choices_show_them(client: TestClient, engine: Any, is_stream: bool) -> None:
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2, "n": 3}
    response = client.post("/v1/completions", json={**fields, "stream": is_stream})
    tokens: dict[int, list[str]] = {0: [], 1: [], 2: []}
    if is_stream:
        events = [e for e in response.text.split("\n\n") if e.startswith("data: {")]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    else:
        choices = response.json()["choices"]
    for choice in choices:
        if choice["logprobs"]:
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert tokens == {i: ["a", "b", "H", "e"] for i in range(3)}
    asked = [request.rules.prompt_logprobs for request in engine.submitted]
    assert asked == [1, None, None]
