"""Single keys from a terminal, without Enter; nothing at all where nobody types."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator


@contextlib.contextmanager
def single_keys() -> Iterator[None]:
    """The terminal hands keys over at once, and is as before afterwards. Ctrl-C stays Ctrl-C."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def wait_for_key(seconds: float) -> str:
    """The keys that were typed; empty if none was for so long."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    descriptor = sys.stdin.fileno()
    ready, _, _ = select.select([descriptor], [], [], seconds)
    return os.read(descriptor, 64).decode("utf-8", errors="replace") if ready else ""
