"""Reads the output of worker processes line by line, passes it on and keeps each one's last
lines.

One thread serves all of them. A pipe that a grandchild keeps open is closed with the pump.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

TAIL_LINES = 50
_READ_BYTES = 65_536
_MAX_LINE_BYTES = 8192  # longer lines are cut into several


class Output:
    """The lines of one process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_ended = threading.Event()
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._tail)

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > _MAX_LINE_BYTES:
            whole.append(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]
        return self._keep(whole)

    def end(self) -> list[str]:
        """Returns the last line, if it had no line end."""
        rest, self._rest = self._rest, b""
        return self._keep([rest] if rest else [])

    def _keep(self, raw: list[bytes]) -> list[str]:
        lines = [line.decode("utf-8", "replace").rstrip("\r") for line in raw]
        self._tail.extend(lines)
        return lines


class OutputPump:
    """Calls `sink` on its own thread with every line, prefixed by the process's name."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards the selector's table
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="worker-output", daemon=True)
        self._thread.start()

    def add(self, name: str, descriptor: int) -> Output:
        """Takes over `descriptor`, the reading end of a pipe."""
        output = Output(name)
        os.set_blocking(descriptor, False)
        with self._lock:
            assert not self._is_closed, f"{name} was added after the pump was closed"
            self._selector.register(descriptor, selectors.EVENT_READ, output)
        return output

    def close(self) -> None:
        """Closes every pipe, including those that a process could still write to."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._wake.send(b"x")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Output):
                self._drain(key.fd, key.data)
                self._end(key.fd, key.data)
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select():
                if isinstance(key.data, Output):
                    self._read(key.fd, key.data)

    def _read(self, descriptor: int, output: Output) -> bool:
        """Passes one piece on; returns True if there may be more."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        self._pass_on(output.name, output.feed(data))
        if not data:
            self._end(descriptor, output)
        return bool(data)

    def _drain(self, descriptor: int, output: Output) -> None:
        """Passes on the present contents of the pipe. The amount is limited, because a grandchild
        may write for ever.
        """
        for _ in range(16):
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            self._pass_on(output.name, output.feed(data))

    def _end(self, descriptor: int, output: Output) -> None:
        self._pass_on(output.name, output.end())
        with self._lock:
            self._selector.unregister(descriptor)
        os.close(descriptor)
        output.has_ended.set()

    def _pass_on(self, name: str, lines: list[str]) -> None:
        for line in lines:
            self._sink(f"[{name}] {line}")
