"""Runs a module of this package in another Python process, and exchanges messages with it."""

from __future__ import annotations

import os
import select
import sys
import time

# `-m` puts the working folder first on the path, so that files there, say a `queue.py` beside a
# model, would run. Python 3.11 has a switch against it; before that the entry is removed.
_SAFE_RUN = (
    "import sys; del sys.path[0]; import runpy; "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)
_HEAD_BYTES = 4  # the length of a frame's content, big-endian
_PIECE_BYTES = 1 << 20


class FrameTooLargeError(Exception):
    """The other side announced a frame larger than allowed."""


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs `module` as `__main__` and imports nothing from the working
    folder.

    Pass secrets through the environment, as every user of the machine may read a command line.
    """
    if sys.version_info >= (3, 11):
        return (sys.executable, "-P", "-m", module, *arguments)
    return command_without_switch(module, *arguments)


def command_without_switch(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns the same command for a Python without `-P`."""
    return (sys.executable, "-c", _SAFE_RUN.format(module=module), *arguments)


def send_frame(descriptor: int, content: bytes, timeout_s: float | None = None) -> None:
    """Writes one frame. Returns when all of it is in the pipe.

    With a timeout, which needs a non-blocking descriptor, it raises TimeoutError if the other side
    does not read. It raises BrokenPipeError if the other side has ended.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    rest = memoryview(len(content).to_bytes(_HEAD_BYTES, "big") + content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            _wait(descriptor, deadline, is_write=True)


def receive_frame(
    descriptor: int, timeout_s: float | None = None, max_bytes: int = 2**32 - 1
) -> bytes | None:
    """Returns the next frame's content, or None if the other side has ended.

    Raises TimeoutError, and FrameTooLargeError for a frame of more than `max_bytes`.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    head = _read(descriptor, _HEAD_BYTES, deadline)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    if size > max_bytes:
        raise FrameTooLargeError(f"a frame has {size} bytes; at most {max_bytes} are allowed")
    return _read(descriptor, size, deadline)


def _read(descriptor: int, count: int, deadline: float | None) -> bytes | None:
    pieces: list[bytes] = []
    while count:
        if deadline is not None:
            _wait(descriptor, deadline, is_write=False)
        piece = os.read(descriptor, min(count, _PIECE_BYTES))
        if not piece:
            return None
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _wait(descriptor: int, deadline: float | None, *, is_write: bool) -> None:
    """Waits until the descriptor is ready. Uses poll, as select takes no descriptor above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if is_write else select.POLLIN)
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poll.poll(left):
        raise TimeoutError
