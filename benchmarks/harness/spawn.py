"""Starts a `moe-serve serve` for the time of a benchmark."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from .environment import child_environment

_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    url: str
    pid: int
    ready_s: float  # since its process was started


@contextmanager
def spawned_server(options: str) -> Iterator[str]:
    """Starts a server without drafts on a free port with additional `options`, yields its URL when
    it is ready, stops it.
    """
    with spawned_process(options) as server:
        yield server.url


@contextmanager
def spawned_process(
    options: str, limit_s: float = _START_LIMIT_S, settings: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Does the same and says more about the server. It has `limit_s` to get ready; `settings` are
    environment variables."""
    port = _free_port()
    command = [sys.executable, "-m", "moe_serve", "serve", "--port", str(port)]
    drafts = {"MOE_SERVE_SPECULATION_METHOD": "off"}
    environment, began = drafts | child_environment() | dict(settings or {}), time.monotonic()
    process = subprocess.Popen(
        [*command, *shlex.split(options)], stdout=subprocess.DEVNULL, env=environment
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url, limit_s)
        yield Server(url, process.pid, time.monotonic() - began)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"moe-serve ended with code {process.returncode} before it was ready.")
        with contextlib.suppress(httpx.TransportError):  # it does not listen yet
            if httpx.get(f"{url}/health/ready", timeout=2).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"moe-serve was not ready after {limit_s:.0f} s.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
