"""Connects the two ranks, and delays their messages.

On one host, frames travel through shared memory, and the transport adds the delay: a receiver sees
a message no sooner. Over a cable between two network namespaces they travel by gloo and TCP, and
the kernel delays every packet (`tc netem`), as a network would.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import two_hosts
from two_hosts import VirtualHost

_MOST_PACKETS = 1_000_000  # packets that may wait at once; netem drops the others


class Way(Protocol):
    @property
    def addresses(self) -> tuple[str, str]:
        """Returns the address at which each rank listens."""
        ...

    @property
    def networks(self) -> tuple[str | None, str | None]:
        """Returns the network namespace of each rank; None is that of this process."""
        ...

    def delay(self, seconds: float) -> float:
        """Delays messages by this much from now on; returns the part that the transport must
        add.
        """
        ...


class OneHost:
    """Implements Way on one host."""

    addresses = ("127.0.0.1", "127.0.0.1")
    networks = (None, None)

    def delay(self, seconds: float) -> float:
        return seconds


class Cable:
    """Implements Way between two namespaces."""

    def __init__(self, hosts: tuple[VirtualHost, VirtualHost]) -> None:
        self._hosts = hosts
        self.addresses = (hosts[0].address, hosts[1].address)
        self.networks = (hosts[0].name, hosts[1].name)

    def delay(self, seconds: float) -> float:
        for host in self._hosts:
            done = set_delay(host, seconds)
            if done.returncode != 0:
                raise SystemExit(f"tc netem on {host.device}: {done.stderr.strip()}")
        return 0.0


@contextmanager
def cable() -> Iterator[Cable]:
    """Creates a cable for the `with` block. Needs root and iproute2: see `why_no_cable`."""
    with two_hosts.two_hosts() as hosts:
        yield Cable(hosts)


def why_no_cable() -> str | None:
    """Returns why this machine cannot delay packets; None if it can."""
    reason = two_hosts.why_not()
    if reason is not None:
        return reason
    if shutil.which("tc") is None:
        return "iproute2's tc is not installed"
    with two_hosts.two_hosts() as (host, _):
        done = set_delay(host, 1e-3)
    return None if done.returncode == 0 else f"tc netem: {' '.join(done.stderr.split())}"


def set_delay(host: VirtualHost, seconds: float) -> subprocess.CompletedProcess[str]:
    """Delay every packet that leaves a host."""
    delay = f"{1e6 * seconds:.0f}us"
    return host.run(
        *("tc", "qdisc", "replace", "dev", host.device, "root", "netem"),
        *("delay", delay, "limit", str(_MOST_PACKETS)),
    )
