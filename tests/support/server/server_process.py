"""The real server with the demonstration model, in its own process."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

# Below those that kernels hand out: a socket that asks for any free port does not get one of them.
_PORTS = range(10_000, 16_000)


def port_of_ones_own() -> int:
    """Returns a port that is free now. No other call returns it, in this process and in others,
    until the process ends."""
    return neighbouring_ports(1)[0]


def neighbouring_ports(num: int) -> range:
    """Returns neighbouring ports that are all like `port_of_ones_own`."""
    firsts = _PORTS[: len(_PORTS) + 1 - num]
    for first in random.SystemRandom().sample(firsts, len(firsts)):
        ports = range(first, first + num)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in ports:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            for port in ports:
                _reserve(port)
            return ports
    raise AssertionError("no port is free")


def _reserve(port: int) -> None:
    """Takes a name that exists once on this machine; raises `OSError` where it is taken already."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        if sys.platform == "linux":
            lock.bind(f"\0moe-serve-test-port-{port}")
            lock.detach()  # open until the process ends


ROOT = Path(__file__).resolve().parents[3]
SERVE = (sys.executable, "-m", "moe_serve", "serve")


def server_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process of this checkout; the server's variables are only those
    in `settings`."""
    environment = {name: value for name, value in os.environ.items() if "MOE_SERVE" not in name}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    return environment | dict(settings or {})


@contextmanager
def serving(
    *arguments: str, settings: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Yields a server without waiting until it is ready; the server is killed at the end."""
    with subprocess.Popen(
        [*SERVE, *arguments],
        cwd=ROOT,
        env=server_environment(settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


class ServerProcess:
    """`moe-serve serve` on a free port."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*SERVE, "--port", "0", "--num-threads", "1", *flags],
            cwd=ROOT,
            env=server_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.search(r"ready at (http://\S+)", self.process.stdout.readline())
        assert found is not None, f"the server ended with {self.process.wait()}"
        self.url = found[1]

    def metric(self, name: str) -> float:
        """Returns the value of one `moe_serve:` gauge or counter."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=60).text
        found = re.search(rf"^moe_serve:{name}\{{.*\}} (\S+)$", text, re.M)
        assert found is not None, f"{name} is not in /metrics"
        return float(found[1])

    def wait_until_idle(self) -> None:
        """Waits, for about a minute at most, until all pages are free and nothing runs or waits."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        for _ in range(600):
            values = [self.metric(name) for name in names]
            if not any(values):
                return
            time.sleep(0.1)
        raise AssertionError(f"not idle: {dict(zip(names, values, strict=True))}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
