"""The server's handle of one process that renders chats: asks it, ends it and starts it again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import weakref
from collections.abc import Callable

from moe_serve.child_python import (
    FrameTooLargeError,
    module_command,
    receive_frame,
    send_frame,
)
from moe_serve.errors import ServerOverloadedError
from moe_serve.text.template_frames import Kind, Reply, Setup

_log = logging.getLogger(__name__)

_COMMAND = module_command("moe_serve.text.template_worker")
_START_TIMEOUT_S = 60.0  # usually a tenth of a second
# The worker ends itself; these limits are for one that the system delays.
_GRACE_S = 5.0
_EXIT_TIMEOUT_S = 1.0
_BYTES_PER_CHAR = 4  # in UTF-8
# Environment variables that a template can observe through `strftime_now`, and those Python needs.
_KEPT_VARIABLES = (
    "PATH",
    "TZ",
    "LANG",
    "LD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)


class TemplateWorkerError(ServerOverloadedError):
    """No process that renders chats can be started; the message gives the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=5.0)


class TemplateWorker:
    """A process for one template. Only one thread may use it at a time.

    It starts with the first request, or earlier by `start`.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Callable[[], object] | None = None
        self._is_ready = False

    @property
    def readiness(self) -> int:
        """Readiness to render: 2 at once, 1 when its process has started, 0 without a process."""
        return 0 if self._process is None else 1 + self._is_ready

    def ask(self, order: bytes) -> Reply:
        """Return the answer to an encoded Order. Errors of the rendering do not raise.

        Raises TemplateWorkerError if no worker can be started.
        """
        invalid = self.make_ready()
        if invalid is not None:
            return invalid
        process = self._process
        assert process is not None and process.stdin and process.stdout, "it was just made ready"
        timeout_s = self._setup.max_seconds + _GRACE_S
        max_bytes = 1024 + _BYTES_PER_CHAR * self._setup.max_chars
        try:
            send_frame(process.stdin.fileno(), order, timeout_s)
            content = receive_frame(process.stdout.fileno(), timeout_s, max_bytes)
        except (BrokenPipeError, FrameTooLargeError, TimeoutError):
            content = None
        if content is None:
            _log.warning(
                "a process that renders chats ended unexpectedly (status %s)", process.poll()
            )
            self.close()
            return Reply(Kind.LARGE)
        return Reply.decode(content)

    def make_ready(self) -> Reply | None:
        """Wait until the template is compiled;
        returns the reply with the reason if it cannot be.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended between two requests, so neither caused it
        self.start()
        if self._is_ready:
            return None
        process = self._process
        assert process is not None and process.stdin and process.stdout, "it was just started"
        try:
            send_frame(process.stdin.fileno(), self._setup.encode(), _START_TIMEOUT_S)
            content = receive_frame(process.stdout.fileno(), _START_TIMEOUT_S)
        except (BrokenPipeError, TimeoutError):
            content = None
        if content is None:
            status = self._status()
            self.close()
            if status == -signal.SIGALRM:
                return Reply(Kind.INVALID, "compiling it takes too long")
            raise TemplateWorkerError(
                f"The process that renders chats ended before its first one (status {status})."
            )
        reply = Reply.decode(content)
        if reply.kind is Kind.READY:
            self._is_ready = True
            return None
        self.close()
        return reply

    def start(self) -> None:
        """Start the process if there is none, without waiting for it."""
        if self._process is not None:
            return
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment["MALLOC_ARENA_MAX"] = "1"
        try:
            process = subprocess.Popen(
                _COMMAND,
                stdin=pipe,
                stdout=pipe,
                stderr=nothing,
                bufsize=0,
                env=environment,
                start_new_session=True,  # so that it can be ended together with its child
            )
        except OSError as error:
            raise TemplateWorkerError(
                f"The process that renders chats cannot be started: {error}."
            ) from None
        assert process.stdin is not None, "the process has pipes"
        os.set_blocking(process.stdin.fileno(), False)
        self._process, self._is_ready = process, False
        self._finalizer = weakref.finalize(self, _end, process)

    def close(self) -> None:
        """End the process. The next request starts another one."""
        finalizer, self._finalizer = self._finalizer, None
        self._process, self._is_ready = None, False
        if finalizer is not None:
            finalizer()

    def _status(self) -> int | None:
        assert self._process is not None, "there is a process"
        try:
            return self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "the process has pipes"
        pipe.close()
