"""The start of a server: its port is open from the beginning, and says how far the model is."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

from moe_serve.config.logs import STARTUP_LOG
from moe_serve.config.sections import Config
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.loading import LoadingServer
from moe_serve.http.server import bind
from moe_serve.model.load.model_tensors import LoadProgress
from moe_serve.planning.plan_memory import plan_memory

_log = logging.getLogger(STARTUP_LOG)
_SIGTERM_STATUS = 128 + signal.SIGTERM


class ServiceStart:
    """`with` it, load, and take the listener by `hand_over`; without that the port is closed.

    Raises ConfigError where the address, a file of keys or a certificate cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loading, self._stack = contextlib.ExitStack(), contextlib.ExitStack()
        self.startup = Startup()

    def __enter__(self) -> ServiceStart:
        server = self._config.server
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(bind(server.host, server.port))
            loading = LoadingServer(self._listener, server, self.startup)
            stack.enter_context(_ending_at_sigterm())
            self._loading.enter_context(loading)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._loading.close()
        self._stack.close()

    def plan_memory(self, *, has_local_ranks: bool) -> None:
        """Say what memory it will take, before anything is read; raises ConfigError if there is
        not so much."""
        plan = self.startup.plan = plan_memory(self._config.engine, has_local_ranks=has_local_ranks)
        for line in plan.lines():
            _log.info("memory: %s", line)
        plan.check()
        self.startup.begin("loading")

    def progress(self, show: LoadProgress | None) -> LoadProgress:
        """What a loader is to call: who asks over HTTP learns of it too."""

        def note(done: int, total: int) -> None:
            self.startup.note_progress(done, total)
            if show is not None:
                show(done, total)

        return note

    def hand_over(self) -> socket.socket:
        """The model is there: whoever connects from now on waits for the next server. Until that
        listens to signals, a SIGTERM still ends what the start has begun."""
        self.startup.begin("ready")
        self._loading.close()
        return self._listener


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Where no server listens to the signal: the start is called off, and what it began is ended.

    That is before one does, and when it has served: then what is left to be closed is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_SIGTERM_STATUS)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
