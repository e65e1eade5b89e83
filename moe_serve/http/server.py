"""Runs the application: the socket, the signals, the drain.

first SIGTERM or SIGINT   new requests get 503, open ones finish, then the process ends with 0
drain_timeout_s later, or
at a second signal        open ones end with an error (a clean event in a stream)
the engine has died       the same, and `run_server` raises: a dead engine must not look busy
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

from fastapi import FastAPI

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.client import EngineClient
from moe_serve.errors import ConfigError, EngineDeadError
from moe_serve.http.generation.generation import GenerationService
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.schema.api_error import ApiError, draining_error, engine_dead_error
from moe_serve.http.wire.uvicorn_server import ClosingServer, Tls, uvicorn_config

PERIOD_S = 0.02
_MAX_MISSED = 3000  # a minute; longer blocks are not counted to the end


class LoopLag:
    """Calls `observe` with the lag of every tick from `start` to `stop`, both on the loop's
    thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, observe: Callable[[float], None]) -> None:
        self._loop = loop
        self._observe = observe
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now = self._loop.time()
        for lag in lags(self._due, now):
            self._observe(lag)
        self._due += PERIOD_S * (1 + max(0, int((now - self._due) / PERIOD_S)))
        self._timer = self._loop.call_at(self._due, self._tick)


def lags(due: float, now: float) -> list[float]:
    """Returns the lags of the first due tick and of those missed since, the longest first."""
    count = min(_MAX_MISSED, 1 + max(0, int((now - due) / PERIOD_S)))
    return [max(0.0, now - due - i * PERIOD_S) for i in range(count)]


_ENGINE_CHECK_S = 1.0
# The engine's thread and the event loop's thread take turns holding the GIL. With Python's default
# of 5 ms each waits that long for the other whenever a kernel or a socket has released it.
SWITCH_INTERVAL_S = 0.0005

OnReady = Callable[[str, int], None]


def run_server(
    app: FastAPI,
    engine: EngineClient,
    config: ServerConfig,
    on_ready: OnReady | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Serves until a signal comes. `on_ready` gets the host and the real port once both are bound.

    `listener` is the result of `bind`, if the caller has bound already; it is closed at the end.
    Raises ConfigError if the address cannot be bound, EngineDeadError when the engine dies. The
    caller starts and stops the engine.
    """
    with listener or bind(config.host, config.port) as bound:
        server = DrainingServer(app, engine, config, on_ready)
        server.run(sockets=[bound])
    stats = engine.stats()
    if not stats.is_alive:
        raise EngineDeadError(f"the engine died: {stats.death or 'its thread is gone'}.")


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes any free one.

    Only listening reserves the port: two programs that start at once may both bind it.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:  # UnicodeError: of labels that cannot be host names
        raise ConfigError(
            f"server.host: {host!r} is not an address of this machine ({error})."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.port: cannot listen on {host}:{port} ({error.strerror}). Choose another port."
        ) from error
    return listener


class DrainingServer(ClosingServer):
    """A uvicorn server that drains on a signal before the sockets close."""

    def __init__(
        self,
        app: FastAPI,
        engine: EngineClient,
        config: ServerConfig,
        on_ready: OnReady | None = None,
    ) -> None:
        self._tls = Tls.of(config)
        super().__init__(uvicorn_config(app, self._tls))
        self._engine = engine
        self._server_config = config
        self._on_ready = on_ready
        self._generations: GenerationService = app.state.generations
        self._metrics: ServerMetrics = app.state.metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lag: LoopLag | None = None
        self._drain_deadline: float | None = None
        self._next_engine_check = 0.0

    def begin_shutdown(self) -> None:
        """Starts the drain; at the second call it ends open requests at once. On the loop's thread
        only."""
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + self._server_config.drain_timeout_s
            self._generations.begin_drain()
        else:
            self._drain_deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in a signal handler, so it only wakes the loop. The signal is not raised again
        later."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.begin_shutdown)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # Loaded objects stay: scanning them again would stall all streams for 150 ms.
        gc.collect()
        gc.freeze()
        self._lag = LoopLag(self._loop, self._metrics.observe_loop_lag)
        self._lag.start()
        await super().startup(sockets)
        if self._on_ready is not None and sockets:
            self._on_ready(self._server_config.host, sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._lag is not None:
            self._lag.stop()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called every 100 ms."""
        now = time.monotonic()
        if self._tls is not None:
            self._tls.look()
        if now >= self._next_engine_check:
            self._next_engine_check = now + _ENGINE_CHECK_S
            if not self._engine.is_alive:
                self._generations.cut_all(engine_dead_error())
                self.should_exit = True
        if self._drain_deadline is not None:
            if self._generations.num_open == 0:
                self.should_exit = True
            elif now >= self._drain_deadline:
                self._generations.cut_all(_cut_error())
                self.should_exit = True
        return await super().on_tick(counter)


def _cut_error() -> ApiError:
    return draining_error("The server shut down before this request was finished.")
