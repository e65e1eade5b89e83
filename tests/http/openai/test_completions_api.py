"""POST /v1/completions: the prompt's forms, echo, logprobs, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import decoders, models, normalizers

from moe_serve.text.tokenizer import Tokenizer


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"model": "tiny", "prompt": "ab", **fields})


def choices_of(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = post(client, **fields)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def streamed(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    events = [e for e in post(client, stream=True, **fields).text.split("\n\n") if e]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]


def test_answer(client: TestClient, engine: Any) -> None:
    body = post(client).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "Hello"
    assert body["usage"]["prompt_tokens"] == 2
    assert engine.submitted[0].rules.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([64, 65], None),
        ([[64, 65], [66]], None),
        ("x" * 400, ["x" * 400]),
    ],
)
def test_forms_of_the_prompt(
    client: TestClient, engine: Any, prompt: Any, expected: list[str] | None
) -> None:
    body = post(client, prompt=prompt).json()
    got = [request.prompt_token_ids for request in engine.submitted]
    if expected is None:
        lists = prompt if isinstance(prompt[0], list) else [prompt]
        assert got == [tuple(ids) for ids in lists]
    else:
        assert [engine.tokenizer.decode(ids) for ids in got] == expected
    assert body["usage"]["prompt_tokens"] == sum(map(len, got))


def test_several_prompts_and_choices_keep_their_order(client: TestClient, engine: Any) -> None:
    engine.script = lambda r: f"{engine.tokenizer.decode(r.prompt_token_ids)}{r.choice}"
    choices = choices_of(client, prompt=["a", "b"], n=2)
    assert [choice["text"] for choice in choices] == ["a0", "a1", "b0", "b1"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


def test_the_default_length_fits_what_is_left(client: TestClient, engine: Any) -> None:
    assert post(client, prompt=[1] * 505).status_code == 200
    assert engine.submitted[0].rules.max_tokens == 7


def test_echo(client: TestClient) -> None:
    assert choices_of(client, echo=True)[0]["text"] == "abHello"
    ids = [c["text"] for c in choices_of(client, prompt=[[68], [69]], echo=True)]
    assert [text[1:] for text in ids] == ["Hello", "Hello"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_with_logprobs(client: TestClient, is_stream: bool) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 2}
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    if is_stream:
        chunks = streamed(client, **fields)
        assert "".join(chunk["text"] for chunk in chunks) == "abHe"
        parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        logprobs = {name: [x for part in parts for x in part[name]] for name in names}
    else:
        logprobs = choices_of(client, **fields)[0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "H", "e"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {"b": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize("is_stream", [False, True])
def test_prompt_only(client: TestClient, engine: Any, is_stream: bool) -> None:
    fields: dict[str, Any] = {
        "prompt": [[64, 65, 66]],
        "echo": True,
        "logprobs": 2,
        "max_tokens": 0,
    }
    if is_stream:
        choice, end = streamed(client, **fields)
        assert end["finish_reason"] == "length"
    else:
        response = post(client, **fields).json()
        (choice,) = response["choices"]
        assert choice["finish_reason"] == "length"
        assert response["usage"]["completion_tokens"] == 0
    assert len(choice["text"]) == 3
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert engine.submitted[0].rules.max_tokens == 1


def test_logprobs_without_echo(client: TestClient) -> None:
    logprobs = choices_of(client, logprobs=0)[0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l", "l", "o", "<|end|>"]
    assert logprobs["top_logprobs"][0] == {"H": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]


def test_stream_offsets_continue(client: TestClient, engine: Any) -> None:
    engine.at_readers_pace = True
    engine.script = lambda request: "añb"
    parts = [c["logprobs"] for c in streamed(client, logprobs=1, echo=True) if c["logprobs"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    tokens = [token for part in parts for token in part["tokens"]]
    assert tokens == ["a", "b", "a", "bytes:\\xc3", "bytes:\\xb1", "b", "<|end|>"]
    assert offsets == [0, 1, 2, 3, 3, 4, 5]


def test_stop_token_id_is_the_stop_reason(client: TestClient, engine: Any) -> None:
    token = engine.tokenizer.encode("l")[0]
    choice = choices_of(client, stop_token_ids=[token])[0]
    assert (choice["text"], choice["stop_reason"]) == ("He", token)


def spaced_tokenizer() -> Tokenizer:
    """Makes a tokenizer like Mixtral's: "▁" is a space, and a text's first space is dropped."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<|end|>", "▁", *"abHelo"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, eos_token_ids=[256])


def test_the_first_space_of_what_goes_on_is_told(start_served: Any) -> None:
    """A completion continues the prompt's text, and a chat may continue the last message."""
    template = "{% for m in messages %}{{ m.content }}b{% endfor %}"
    client, engine = start_served(template, spaced_tokenizer())
    engine.script = lambda request: " Hello"
    assert choices_of(client)[0]["text"] == " Hello"
    (echoed,) = choices_of(client, echo=True, logprobs=1)
    assert echoed["text"] == "ab Hello" == "".join(echoed["logprobs"]["tokens"][:-1])
    assert "".join(choice["text"] for choice in streamed(client)) == " Hello"
    asked = {"model": "tiny", "messages": [{"role": "assistant", "content": "a"}]}
    for fields, text in (({}, "Hello"), ({"continue_final_message": True}, " Hello")):
        body = client.post("/v1/chat/completions", json=asked | fields).json()
        assert body["choices"][0]["message"]["content"] == text
