"""Checks that the nodes can reach each other: each opens a port briefly and tries the others'
ports.

gloo and NCCL let the system choose their data ports when a group is made. A port that the system
chooses now, on the same interface, meets the same firewall.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from moe_serve.cluster.control.listener import bound_socket

_MAX_AT_ONCE = 32


class ProbeTarget(msgspec.Struct, frozen=True, array_like=True):
    """A port that should be open; `name` is the rank behind it, or "the coordinator"."""

    name: str
    host: str
    port: int


class ProbeResult(msgspec.Struct, frozen=True, array_like=True):
    """The result for one port; `failure` says why it could not be reached, None: it could."""

    target: ProbeTarget
    failure: str | None


class ProbePort:
    """An open port on `host` that accepts connections and drops them at once.

    Raises ConfigError.
    """

    def __init__(self, host: str) -> None:
        self._socket = bound_socket(host, 0)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="probe-port", daemon=True)
        self._thread.start()

    def __enter__(self) -> ProbePort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._wake.close()
        self._thread.join()
        self._woken.close()
        self._socket.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while all(descriptor != self._woken.fileno() for descriptor, _ in poll.poll()):
            with contextlib.suppress(OSError):  # the peer has left
                self._socket.accept()[0].close()


def probe(targets: Sequence[ProbeTarget], timeout_s: float) -> list[ProbeResult]:
    """Tries all targets at once; returns results in their order, in a little over `timeout_s` at
    most."""
    if not targets:
        return []
    deadline = time.monotonic() + timeout_s
    with ThreadPoolExecutor(min(len(targets), _MAX_AT_ONCE)) as pool:
        return list(pool.map(lambda target: _try(target, deadline), targets))


def _try(target: ProbeTarget, deadline: float) -> ProbeResult:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        return ProbeResult(target, "not tried, the time was up")
    try:
        socket.create_connection((target.host, target.port), remaining_s).close()
    except TimeoutError:
        return ProbeResult(target, f"no answer within {remaining_s:.1f} s (a firewall?)")
    except OSError as error:
        return ProbeResult(target, error.strerror or str(error))
    return ProbeResult(target, None)
