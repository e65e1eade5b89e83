"""The start of a server: opens the port at once and reports the progress of loading."""

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
from moe_serve.model.load.weight_reader import LoadProgress
from moe_serve.planning.plan_memory import plan_memory

_log = logging.getLogger(STARTUP_LOG)
_SIGTERM_STATUS = 128 + signal.SIGTERM


class ServiceStart:
    """Use it with `with`, load the model, and take the listener by `hand_over`; without that the
    port is closed.

    Raises ConfigError if the address, a file of keys or a certificate cannot be used.
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
        """Reports the planned memory before anything is read; raises ConfigError if it does not
        fit."""
        plan = self.startup.plan = plan_memory(self._config.engine, has_local_ranks=has_local_ranks)
        for line in plan.lines():
            _log.info("memory: %s", line)
        plan.check()
        self.startup.begin("loading")

    def progress(self, show: LoadProgress | None) -> LoadProgress:
        """The callback for the loader; clients that ask over HTTP see its progress too."""

        def note(done: int, total: int) -> None:
            self.startup.note_progress(done, total)
            if show is not None:
                show(done, total)

        return note

    def hand_over(self) -> socket.socket:
        """Ends the loading: clients that connect from now on wait for the next server. Until that
        listens to signals, a SIGTERM still ends the start."""
        self.startup.begin("ready")
        self._loading.close()
        return self._listener


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Ends the start at SIGTERM while no server listens to the signal: before one does, and after
    it has served.

    Resources that are open at that moment are closed.
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
