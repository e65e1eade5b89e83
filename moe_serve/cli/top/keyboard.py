"""Reads single keys from a terminal without Enter; does nothing without a terminal."""

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
    """Makes the terminal deliver keys at once, and restores it afterwards. Ctrl-C keeps its
    meaning."""
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
    """Returns the keys that were typed; empty if none was typed within the time."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    descriptor = sys.stdin.fileno()
    ready, _, _ = select.select([descriptor], [], [], seconds)
    return os.read(descriptor, 64).decode("utf-8", errors="replace") if ready else ""
