"""Ports for tests that must know one before they listen, or listen on it twice."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket

# Below those that kernels hand out: no socket of anybody that asks for any port gets it meanwhile.
_FIRST, _END = 20_000, 30_000
_ports = itertools.cycle(range(_FIRST, _END))
_start = random.SystemRandom().randrange(_END - _FIRST)  # another one in each process
next(itertools.islice(_ports, _start, _start), None)


def port_of_ones_own() -> int:
    """Free now, and another one at each call."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports do not end")
