"""Starts a server with ranks, and observes its processes from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from harness.environment import child_environment

_STOP_LIMIT_S = 60.0
_REAPED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources of the coordinator at one moment, and the processes below it."""

    rss_mib: float
    num_fds: int
    num_threads: int
    num_zombies: int
    num_ranks: int
    num_shared_files: int  # in /dev/shm, of the whole machine


class Served:
    """A `moe-serve serve` with the demonstration model on a free port, which ends with the
    `with` block.
    """

    def __init__(
        self,
        attention: int,
        experts: int,
        heartbeat_s: float,
        num_pages: int = 512,
        speculation: str | None = None,
    ) -> None:
        """`speculation` is a method of `--speculative-config`; None: its default."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        flags = ["--port", "0", "--num-threads", "1", "--num-pages", str(num_pages)]
        if 16 * num_pages < 2048:  # the demonstration model's longest text
            flags += ["--max-model-len", str(16 * num_pages)]
        if speculation is not None:
            flags += ["--speculative-config", json.dumps({"method": speculation})]
        if attention:
            flags += ["--attention-ranks", str(attention), "--expert-ranks", str(experts)]
        environment = child_environment() | {"MOE_SERVE_CLUSTER_HEARTBEAT_S": str(heartbeat_s)}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "moe_serve", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.process = psutil.Process(self._popen.pid)
        assert self._popen.stdout is not None, "its output is a pipe"
        found = re.search(r"ready at (http://\S+)", self._popen.stdout.readline())
        if found is None:
            raise SystemExit(f"the server ended: {self.log}")
        self.url = found[1]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks().values():
            rank.resume()
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._log.close()

    @property
    def log(self) -> str:
        """Returns the text that it wrote to stderr."""
        self._log.seek(0)
        return self._log.read()

    def ranks(self) -> dict[str, psutil.Process]:
        """Returns the processes of ranks by name, as far as their command lines can be read."""
        found: dict[str, psutil.Process] = {}
        try:
            for child in self.process.children():
                command = _command_line(child)
                if "--role" in command:
                    role = command[command.index("--role") + 1]
                    found[f"{role}-{command[command.index('--rank') + 1]}"] = child
        except psutil.NoSuchProcess:
            return {}
        return found

    def usage(self) -> Usage:
        """A child counts as a zombie if the server does not reap it within seconds."""
        process = self.process
        deadline = time.monotonic() + _REAPED_WITHIN_S
        while psutil.STATUS_ZOMBIE in (statuses := [_status(c) for c in process.children()]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return Usage(
            rss_mib=round(process.memory_info().rss / 2**20, 1),
            num_fds=process.num_fds(),
            num_threads=process.num_threads(),
            num_zombies=statuses.count(psutil.STATUS_ZOMBIE),
            num_ranks=len(self.ranks()),
            num_shared_files=len(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else 0,
        )

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> tuple[int, int]:
        """Sends SIGTERM; returns the exit status, and the number of ranks that outlive the
        server.
        """
        ranks = list(self.ranks().values())
        self._popen.send_signal(signal.SIGTERM)
        status = self._popen.wait(_STOP_LIMIT_S)
        _, left = psutil.wait_procs(ranks, timeout=5)
        return status, len(left)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
