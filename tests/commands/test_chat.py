"""The terminal client against a scripted server: streaming, history, refusals, broken answers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moe_serve.cli import chat as chat_module
from moe_serve.cli.chat import (
    AnswerTiming,
    ChatClient,
    ChatError,
    ChatOptions,
    Conversation,
    Message,
    chat,
)
from moe_serve.cli.main import main

Capture = pytest.CaptureFixture[str]
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


def events(*documents: object) -> bytes:
    lines = [f"data: {json.dumps(document)}\n\n" for document in documents]
    return "".join([": ping\n\n", *lines, "data: [DONE]\n\n"]).encode()


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


class ScriptedServer:
    """Answers each request with the next of `answers` and keeps the requests."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        self.bodies.append(json.loads(request.content))
        return self.answers.pop(0)


def client_of(server: ScriptedServer, api_key: str | None = None) -> ChatClient:
    return ChatClient("http://127.0.0.1:8000/v1/", api_key, httpx.MockTransport(server))


def conversation_of(server: ScriptedServer, system: str | None = None) -> Conversation:
    client = client_of(server)
    conversation = Conversation(client, client.model(), ChatOptions(), system)
    conversation.reset()
    return conversation


def test_an_answer_streams_and_is_timed() -> None:
    server = ScriptedServer(httpx.Response(200, content=events(piece("a"), piece("b"), USAGE)))
    timing = AnswerTiming()
    with client_of(server, "key") as client:
        options = ChatOptions(temperature=0.0, max_tokens=5)
        answer = client.answer("tiny", [Message(role="user", content="hi")], options, timing)
        assert list(answer) == ["a", "b"]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert (server.bodies[0]["temperature"], server.bodies[0]["max_tokens"]) == (0.0, 5)
    assert server.headers[0]["Authorization"] == "Bearer key"
    assert timing.num_tokens == 3
    assert timing.summary().startswith("3 tokens, ")
    assert "first after " in timing.summary()


def test_the_speed_is_of_all_tokens_that_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning is not shown, but its tokens are in the usage, so the time it takes counts too."""
    clock = iter(range(100))
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    usage = {"choices": [], "usage": {"completion_tokens": 9}}
    answer = events(thought, thought, piece("a"), piece("b"), usage)
    ticking = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(chat_module, "time", ticking)
    timing = AnswerTiming()
    with client_of(ScriptedServer(httpx.Response(200, content=answer))) as client:
        said = client.answer("tiny", [Message(role="user", content="hi")], ChatOptions(), timing)
        assert list(said) == ["a", "b"]
    assert timing.summary() == "9 tokens, 2.7 tokens/s, first after 1000 ms"


def test_turns_are_remembered_until_reset(capsys: Capture) -> None:
    answers = [httpx.Response(200, content=events(piece(text))) for text in ("A\x1b[2J", "B", "C")]
    server = ScriptedServer(*answers)
    conversation = conversation_of(server, system="be brief")
    conversation.ask("1")
    conversation.ask("2")
    roles = [message["role"] for message in server.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "temperature" not in server.bodies[1]
    conversation.reset()
    conversation.ask("3")
    assert [message["content"] for message in server.bodies[2]["messages"]] == ["be brief", "3"]
    assert capsys.readouterr().out == "A[2J\nB\nC\n", "control characters are dropped"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "bad key"}}), r"\(401\): bad key"),
        (httpx.Response(502, text="<html>"), r"\(502\): Bad Gateway"),
        (httpx.Response(200, content=b"data: {nonsense\n\n"), "not JSON"),
        (httpx.Response(200, content=b"data: {}\n\n"), "ended before the answer did"),
        (httpx.Response(200, content=events({"error": {"message": "it broke"}})), "it broke"),
        (httpx.Response(200, content=events({"error": "it broke"})), "answer: it broke"),
        (httpx.Response(200, content=events({"choices": ["x"]})), "an event of another kind"),
        (httpx.Response(400, json={"error": {"message": "a\x1b[2Jb\nc"}}), r": a \[2Jb c$"),
    ],
)
def test_a_refused_turn_leaves_no_trace(response: httpx.Response, message: str) -> None:
    conversation = conversation_of(ScriptedServer(response))
    with pytest.raises(ChatError, match=message):
        conversation.ask("hi")
    assert conversation.messages == []


def test_an_error_after_half_an_answer_begins_a_line(capsys: Capture) -> None:
    half = events(piece("half"), {"error": {"message": "it broke"}})
    with pytest.raises(ChatError, match="it broke"):
        conversation_of(ScriptedServer(httpx.Response(200, content=half))).ask("hi")
    assert capsys.readouterr().out == "half\n"


def test_ctrl_c_keeps_what_has_come(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def pieces(*_: object) -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    conversation = conversation_of(ScriptedServer())
    monkeypatch.setattr(conversation.client, "answer", pieces)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("hi")
    assert conversation.messages[-1] == Message(role="assistant", content="half")
    assert capsys.readouterr().out == "half\n"


def test_talk_takes_commands(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    server = ScriptedServer(
        httpx.Response(200, content=events(piece("A"))),
        httpx.Response(400, json={"error": {"message": "too long"}}),
    )
    typed = iter(["hi", "not \udcff text", "/reset", "", "/what", "/[/b]", "hi again", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    conversation = conversation_of(server)
    chat_module._talk(conversation)
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "hi again"}]
    captured = capsys.readouterr()
    assert captured.out == "A\n"
    for text in ("cleared", "/what is not a command", "/[/b] is not", "too long", "are not UTF-8"):
        assert text in captured.err


def test_piped_text_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    server = ScriptedServer(httpx.Response(200, content=events(piece("answer"), USAGE)))
    monkeypatch.setattr(chat_module, "ChatClient", lambda url, key: client_of(server, key))
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    chat(temperature=0.5)
    captured = capsys.readouterr()
    assert captured.out == "answer\n"
    assert "3 tokens" in captured.err
    assert server.bodies[0]["messages"][-1]["content"] == "from a pipe"
    assert server.bodies[0]["temperature"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9"),
        (["--url", "127.0.0.1"], 2, "is not a URL such as"),
        (["--message", ""], 2, "there is no message"),
        (["--api-key", "schlüssel"], 2, "a character that cannot be sent"),
        (["--api-key", "key\n"], 2, "a character that cannot be sent, such as a line break"),
    ],
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(
    capsys: Capture, arguments: list[str], code: int, message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["chat", "--message", "hi", *arguments])
    assert exit_info.value.code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
