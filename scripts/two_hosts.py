"""Simulates two hosts on one machine: network namespaces with their own addresses, joined by a
cable.

    sudo python scripts/two_hosts.py moe-serve launch MODEL --attention-ranks 1 --expert-ranks 1 \\
        --node-rank {node} --num-nodes 2 --coordinator {coordinator}

Runs the command in both hosts. {node} is 0 or 1, {host} the address of that node, {coordinator}
HOST:PORT on node 0. Each line of output begins with the name of the host. Ctrl-C or a failure ends
both commands. The namespaces, the cable and every process in them are then removed. Needs root and
iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_serve.cluster.launch.launchers import HostCommand, run_on_hosts

# From the range for benchmarks (RFC 2544). Addresses mean something inside the namespaces only.
_ADDRESSES = ("198.18.0.1", "198.18.0.2")
PORT = 29600
_KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualHost:
    """A network namespace."""

    name: str  # of the namespace
    node: int
    address: str
    device: str  # its end of the cable
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)  # that were started here

    def command(self, *argv: str) -> tuple[str, ...]:
        """Returns the command that runs `argv` in the namespace."""
        return ("ip", "netns", "exec", self.name, *argv)

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        """Starts a process in the namespace, with subprocess's options."""
        process = subprocess.Popen(self.command(*argv), **options)
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        """Returns the ids of all processes in the namespace."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).stdout.split()]

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "check": False, **options}
        return subprocess.run(self.command(*argv), **options)


def why_not() -> str | None:
    """Returns why this machine cannot create namespaces; None if it can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"moe-probe-{os.getpid()}"
    tried = _ip("netns", "add", name)
    if tried.returncode != 0:
        return f"ip netns add: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[VirtualHost, VirtualHost]]:
    """Creates both hosts for the `with` block, and removes them after it."""
    tag = f"moe{os.getpid() % 100_000}"
    hosts = tuple(
        VirtualHost(name=f"{tag}-{node}", node=node, address=address, device=f"{tag}-e{node}")
        for node, address in enumerate(_ADDRESSES)
    )
    try:
        for host in hosts:
            _must("netns", "add", host.name)
        first, second = (host.device for host in hosts)
        _must("link", "add", first, "type", "veth", "peer", "name", second)
        for host in hosts:
            _must("link", "set", host.device, "netns", host.name)
            inside = ("-netns", host.name)
            _must(*inside, "addr", "add", f"{host.address}/24", "dev", host.device)
            _must(*inside, "link", "set", host.device, "up")
            _must(*inside, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            _remove(host)


def _remove(host: VirtualHost) -> None:
    """Removes a namespace after killing its processes; with a process in it, it would stay without
    a name.

    A process that is just about to enter it is not known to the namespace yet.
    """
    for process in host.processes:
        if process.poll() is None:
            process.kill()
    deadline = time.monotonic() + _KILL_WAIT_S
    while pids := host.pids():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break  # zombies, which their parent has not taken yet, hold no namespace
        time.sleep(0.05)
    _ip("netns", "del", host.name)  # takes its end of the cable, and so the other one, along


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


def _must(*arguments: str) -> None:
    done = _ip(*arguments)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def run_in_both(command: Sequence[str], write: Callable[[str], None] | None = None) -> int:
    """Returns the exit code of the first command that fails, else 0."""
    with two_hosts() as hosts:
        coordinator = f"{hosts[0].address}:{PORT}"
        commands = []
        for host in hosts:
            values = {"node": str(host.node), "host": host.address, "coordinator": coordinator}
            filled = [_fill(word, values) for word in command]
            argv = host.command("sh", "-c", _UNTIL_END_OF_INPUT, "sh", *filled)
            commands.append(HostCommand(name=f"host-{host.node}", argv=argv))
        return run_on_hosts(commands) if write is None else run_on_hosts(commands, write)


# The end of our standard input is SIGTERM for the command, as with ssh.
_UNTIL_END_OF_INPUT = (
    'exec 3<&0; "$@" </dev/null 3<&- & pid=$!; '
    '(cat <&3; kill -TERM "$pid") >/dev/null 2>&1 & watcher=$!; '
    'exec 3<&-; wait "$pid"; code=$?; kill "$watcher" 2>/dev/null; exit "$code"'
)


def _fill(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run on both hosts")
    command = parser.parse_args().command
    if not command:
        parser.error("say what to run")
    reason = why_not()
    if reason is not None:
        print(f"two_hosts: {reason}", file=sys.stderr)
        return 2
    return run_in_both(command)


if __name__ == "__main__":
    sys.exit(main())
