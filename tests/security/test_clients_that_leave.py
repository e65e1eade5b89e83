"""A client that hangs up holds nothing: its pages are free within a step, on every route."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.support.security.real_server import RealServer

LONG = "word " * 500  # over 30 pages
MANY = 900
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG, "ignore_eos": True, "max_tokens": MANY},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": LONG}],
        "ignore_eos": True,
        "max_tokens": MANY,
    },
    "/v1/responses": {"input": LONG, "max_output_tokens": MANY, "temperature": 0},
    "/v1/messages": {
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": MANY,
        "temperature": 0,
    },
}
HELD = 25  # pages that the prompt takes at least


class Turns:
    """Records the free pages after each step, and the step at which a request was aborted."""

    def __init__(self, server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: list[tuple[int, int]] = []  # steps so far, free pages
        self.aborted_at: list[int] = []
        engine, front = server.engine._engine, server.engine
        step, abort = engine.step, front.abort

        def counted() -> Any:
            deltas = step()
            stats = engine.stats()
            self.free.append((stats.num_steps, stats.load.num_free_pages))
            time.sleep(0.002)  # as on a larger model: the answer outlasts what is tried with it
            return deltas

        def noted(request_id: str) -> None:
            abort(request_id)  # first: steps made until it is called still hold the pages
            self.aborted_at.append(front.stats().num_steps)

        monkeypatch.setattr(engine, "step", counted)
        monkeypatch.setattr(front, "abort", noted)

    def free_now(self) -> int:
        return self.free[-1][1] if self.free else 10**9


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def sent(server: RealServer, route: str, body: dict[str, Any]) -> socket.socket:
    content = msgspec.json.encode(body)
    head = (
        f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(head.encode() + content)
    return client


@pytest.fixture
def turns(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    yield Turns(server, monkeypatch)


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_its_pages_are_free_within_a_step(
    server: RealServer, turns: Turns, route: str, is_streamed: bool
) -> None:
    others = {"prompt": "Once", "ignore_eos": True, "max_tokens": 2000, "stream": True}
    with sent(server, "/v1/completions", others) as other:  # so that steps go on
        until(lambda: server.engine.stats().counts.num_generated_tokens > 0, "nobody runs")
        with sent(server, route, {**ROUTES[route], "stream": is_streamed}) as client:
            until(lambda: server.engine.stats().load.num_running == 2, "it does not run")
            most = server.engine.stats().load.num_pages - HELD
            until(lambda: turns.free_now() < most, "it holds no pages")
            time.sleep(0.05)
            assert not turns.aborted_at, "it had ended before it left"
            client.shutdown(socket.SHUT_RDWR)
        until(lambda: bool(turns.aborted_at), "nobody noticed that it left")
        # The step that runs then may be the one after; the next one begins without the request.
        last = turns.aborted_at[0] + 2
        until(lambda: turns.free[-1][0] >= last + 1, "steps do not go on")
        free = next(free for step, free in turns.free if step >= last)
        assert free > most, "it held its pages for longer than a step"
        assert server.engine.stats().load.num_running == 1, "the other one goes on"
        other.shutdown(socket.SHUT_RDWR)
    server.check_unharmed()
