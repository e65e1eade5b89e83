"""The real server on a real socket: the openai client, disconnects, overload, drain, signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from moe_serve.errors import ConfigError
from moe_serve.http.server import bind
from tests.support.http.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def client(live: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_openai_client(client: openai.OpenAI, engine: Any) -> None:
    engine.script = lambda request: "Grüße 🎉"
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Grüße 🎉"] * 2
    options = {"include_usage": True}
    stream = client.chat.completions.create(**CHAT, stream=True, stream_options=options)
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Grüße 🎉"
    assert chunks[-1].usage is not None
    completion = client.completions.create(model="tiny", prompt="a", echo=True, logprobs=1)
    assert completion.choices[0].text == "aGrüße 🎉"
    assert completion.choices[0].logprobs is not None
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**CHAT, temperature=5)
    assert bad.value.param == "temperature"


def test_overload_is_retried_by_the_client(live: Any, engine: Any) -> None:
    engine.max_requests = 0
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**CHAT)
        assert caught.value.response.headers["retry-after"] == "1"
    timer = threading.Timer(0.1, lambda: setattr(engine, "max_requests", 10))
    timer.start()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=3) as client:
        answer = client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == "Hello"
    timer.join()


def test_pings_fill_silence(make_app: Callable[..., FastAPI], engine: Any, start_live: Any) -> None:
    engine.gate = asyncio.Event()
    app = make_app(sse_ping_s=0.05)
    with start_live(app) as live:
        body = {"prompt": "a", "stream": True, "max_tokens": 1}
        start = time.monotonic()
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            for num_pings in range(1, 4):
                assert next(line for line in lines if line) == ": ping"
                assert time.monotonic() - start > num_pings * 0.049, "each after a silence"
            live.open_gate()
            events = [line for line in lines if line and line != ": ping"]
    assert json.loads(events[0][6:])["choices"][0]["text"] == "H"
    assert events[-1] == "data: [DONE]"


def test_what_was_there_at_the_start_is_no_garbage_to_look_for(
    make_app: Callable[..., FastAPI], start_live: Any
) -> None:
    """The garbage collector would hold up all streams while it looks through imported modules."""
    loaded: list[list[int]] = [[]]

    def is_looked_at() -> bool:
        return any(item is loaded for item in gc.get_objects())

    assert is_looked_at()
    with start_live(make_app()):
        assert not is_looked_at()


def test_drain_finishes_streams_and_refuses_new_ones(live: Any, engine: Any) -> None:
    engine.script = lambda request: "x" * 50
    body = {"prompt": "a", "stream": True, "max_tokens": 60}
    engine.gate = asyncio.Event()
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        live.shut_down()
        wait_until(lambda: engine.is_draining)
        assert httpx.get(f"{live.url}/health/ready").status_code == 503
        assert httpx.get(f"{live.url}/health/live").status_code == 200
        refused = httpx.post(f"{live.url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        live.open_gate()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert "".join(event["choices"][0]["text"] for event in events) == "x" * 50


def test_a_second_shutdown_cuts_with_an_error_event(live: Any, engine: Any) -> None:
    engine.step_s = 0.05
    engine.script = lambda request: "x" * 400
    body = {"prompt": "a", "stream": True, "max_tokens": 400, "n": 2}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        live.shut_down()
        live.shut_down()
        events = [line for line in lines if line]
    assert json.loads(events[-2][6:])["error"]["code"] == "server_draining"
    assert events[-1] == "data: [DONE]"
    wait_until(lambda: len(engine.aborted) == 2)


def test_odd_bodies_over_the_wire(make_app: Callable[..., FastAPI], start_live: Any) -> None:
    """An endless chunked body gets 413 and a closed connection, and is not read on."""
    app = make_app(max_body_bytes=1000)
    with start_live(app) as live:
        with socket.create_connection(("127.0.0.1", live.port), timeout=60) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n" + (b"400\r\n" + b" " * 1024 + b"\r\n") * 2
            )
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := raw.recv(65536):
                    answer += chunk
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'"code":"body_too_large"' in answer
        assert httpx.get(f"{live.url}/health/live").status_code == 200


@contextlib.contextmanager
def server_process(step_s: float, drain_s: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    program = "tests.support.http.serve_fake"
    command = [sys.executable, "-m", program, str(step_s), str(drain_s)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("num_signals", [1, 2])
def test_signals(num_signals: int) -> None:
    """After one signal the stream finishes, a second one cuts it; the exit status is 0."""
    step_s = 0.02 if num_signals == 1 else 1.0  # 40 steps: the second one comes in time
    with server_process(step_s=step_s, drain_s=90.0) as (process, port):
        body = {"prompt": "a", "stream": True, "max_tokens": 40}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            for sig in (signal.SIGTERM, signal.SIGINT)[:num_signals]:
                process.send_signal(sig)
                time.sleep(0.1)
            events = [line for line in lines if line]
        assert process.wait(60) == 0
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2][6:])
    if num_signals == 1:
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert last["error"]["code"] == "server_draining"


def test_a_taken_port_is_a_config_error() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"server\.port: cannot listen on 127\.0\.0\.1:{port}"
        ):
            bind("127.0.0.1", port)
    for host in ("no such host", "two..dots", "x" * 64 + ".example"):
        with pytest.raises(ConfigError, match=rf"server\.host: '{host}' is not an address"):
            bind(host, 0)
