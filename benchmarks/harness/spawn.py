"""Starts a `moe-serve serve` for the time of a benchmark."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from .environment import child_environment

_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 60.0


@contextmanager
def spawned_server(options: str) -> Iterator[str]:
    """Starts a server on a free port with additional `options`, yields its URL when it is ready,
    stops it.
    """
    port = _free_port()
    command = [sys.executable, "-m", "moe_serve", "serve", "--port", str(port)]
    process = subprocess.Popen(
        [*command, *shlex.split(options)], stdout=subprocess.DEVNULL, env=child_environment()
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"moe-serve ended with code {process.returncode} before it was ready.")
        with contextlib.suppress(httpx.TransportError):  # it does not listen yet
            if httpx.get(f"{url}/health/ready", timeout=2).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"moe-serve was not ready after {_START_LIMIT_S:.0f} s.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
