"""The real pages and key check over made-up data, on a port that a restart keeps."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from moe_serve.http.gate.auth import ApiKeyMiddleware, KeyRing
from moe_serve.http.pages.page_files import add_page_routes
from moe_serve.http.server import bind
from tests.support.dashboard.fake_state import NUM_EXPERTS, NUM_LAYERS, TOP_K, fake_state
from tests.support.server.server_process import port_of_ones_own

ANSWER = ["The", " king", "\ufffd", "é", " sat", " <b>down", "</b>."]
TEXTS = ["The", " king", "", "é", " sat", " <b>down", "</b>."]
DRAFTED = (4, 5)  # the places of the answer's tokens that a draft had


class FakeServer:
    """A server whose `make_state(now, started)`, `keys`, `has_experts`, `token_pause_s` and
    `answer` a test sets."""

    def __init__(self) -> None:
        self.make_state: Callable[[float, float], dict[str, Any]] = fake_state
        self.keys: tuple[str, ...] = ()
        self.has_experts = True
        self.token_pause_s = 0.0
        self.answer = list(zip(ANSWER, TEXTS, strict=True))  # (token, text) of each
        self.bodies: list[dict[str, Any]] = []
        self.since: list[int] = []
        self.port = port_of_ones_own()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listener = bind("127.0.0.1", self.port)
        config = uvicorn.Config(self._app(time.time()), log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)

        def serve() -> None:
            with listener:
                self._server.run(sockets=[listener])  # type: ignore[union-attr]

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        assert self._server is not None and self._thread is not None
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the fake server did not end"

    def _app(self, started: float) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None)
        add_page_routes(app)

        @app.get("/dashboard/state")
        async def state(since: int = 0) -> Response:
            self.since.append(since)
            content = self.make_state(time.time(), started)
            content["events"] = [e for e in content["events"] if e["seq"] > since]
            return Response(msgspec.json.encode(content), media_type="application/json")

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            if body["temperature"] > 2:
                error = {"error": {"message": "temperature must be in [0, 2], got 9.", "code": "x"}}
                return Response(msgspec.json.encode(error), 400, media_type="application/json")
            return StreamingResponse(self._events(), media_type="text/event-stream")

        app.add_middleware(_Keys, server=self)
        return app

    async def _events(self) -> AsyncIterator[bytes]:
        for i, (token, text) in enumerate(self.answer):
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            if self.has_experts:
                choice["routed_tokens"] = [token]
                choice["routed_experts"] = [experts_of(i)]
                if i in DRAFTED:
                    choice["routed_drafts"] = ["suffix"]
            yield b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n: ping\n\n"
            await asyncio.sleep(self.token_pause_s)
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        yield b"data: " + msgspec.json.encode(last) + b"\n\ndata: [DONE]\n\n"


class _Keys:
    """The real check, with the keys that the test has set so far."""

    def __init__(self, app: Any, server: FakeServer) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        keys = KeyRing(self._server.keys)
        await ApiKeyMiddleware(self._app, keys, KeyRing(()))(scope, receive, send)


def experts_of(token: int) -> list[list[int]]:
    """Returns the experts of a token i: (i // 2 + layer) and those after it, so that tokens 2 j and
    2 j + 1 choose the same."""
    return [
        [(token // 2 + layer + k) % NUM_EXPERTS for k in range(TOP_K)]
        for layer in range(NUM_LAYERS)
    ]


@contextlib.contextmanager
def running(server: FakeServer) -> Any:
    server.start()
    try:
        yield server
    finally:
        server.stop()
