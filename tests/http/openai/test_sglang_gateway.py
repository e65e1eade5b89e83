"""Bodies as the SGLang gateway sends them on: its defaults of SGLang's fields change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

SHARED: dict[str, Any] = {
    "model": "tiny",
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
CHAT: dict[str, Any] = {
    **SHARED,
    "messages": [{"role": "user", "content": "hi"}],
    "logprobs": False,
    "max_completion_tokens": 3,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": "hi",
    "store": True,
    "stream": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "priority": 0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {**SHARED, "prompt": "hi", "max_tokens": 3, "echo": False}),
        ("/v1/responses", RESPONSE),
    ],
)
def test_a_body_of_the_gateway_is_accepted(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "X-Ignored-Parameters" not in answer.headers or path == "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "return_hidden_states": True}, "return_hidden_states"),
        ("/v1/responses", {**RESPONSE, "priority": 1}, "priority"),
    ],
)
def test_what_would_change_the_answer_is_refused(
    client: TestClient, path: str, body: dict[str, Any], field: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
