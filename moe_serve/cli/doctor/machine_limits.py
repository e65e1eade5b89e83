"""System limits that concern a server: descriptors, processes, shared memory, a port and the
clock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path

Fact = str | int | float | bool | None | list[str]
SHARED_MEMORY = Path("/dev/shm")
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_TIME_ERROR = 5  # result of adjtimex while the clock is not synchronised
_TIMEX_BYTES = 1024  # more than the structure has anywhere


def limits() -> Mapping[str, Fact]:
    """Returns the limits of this process and its children; None means no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "open_files": _bound(soft),
        "open_files_hard": _bound(hard),
        "processes": _bound(processes),
        "locked_memory_bytes": _bound(locked),
        **_shared_memory(),
    }


def network(host: str, port: int) -> Mapping[str, Fact]:
    """Checks that the server could listen at its configured address."""
    return {
        "host_name": socket.gethostname(),
        "listen": f"{host}:{port}",
        "port": _port(host, port),
    }


def clock() -> Mapping[str, Fact]:
    """Checks the clocks: cluster deadlines use the monotonic clock, certificates and logs need the
    time of day."""
    source = None
    with contextlib.suppress(OSError):
        source = CLOCK_SOURCE.read_text("utf-8").strip()
    return {
        "utc": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "source": source,
        "synchronised": _is_synchronised(),
    }


def _bound(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _shared_memory() -> Mapping[str, Fact]:
    """Checks the memory in which attention and expert ranks of one host exchange rows."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return {"shared_memory_bytes": None, "shared_memory_free_bytes": None}
    return {"shared_memory_bytes": usage.total, "shared_memory_free_bytes": usage.free}


def _port(host: str, port: int) -> str:
    if port == 0:
        return "any free one"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        return "taken by another program" if is_taken else f"not usable: {error.strerror}"
    except UnicodeError:  # an empty label, as in 127..0.1, or one that is too long
        return "not usable: this is not a valid host name"
    return "free"


def _is_synchronised() -> bool | None:
    """Returns whether the kernel reports a synchronised clock; None if that cannot be read."""
    with contextlib.suppress(OSError, AttributeError):
        answer = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
        return None if answer < 0 else answer != _TIME_ERROR
    return None
