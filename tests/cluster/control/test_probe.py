"""Ports that are open, closed and silent, on loopback."""

from __future__ import annotations

import re
import socket
import threading

import psutil
import pytest

from moe_serve.cluster.control.probe import ProbePort, ProbeTarget, probe
from moe_serve.errors import ConfigError


def test_open_closed_and_silent_ports() -> None:
    with ProbePort("127.0.0.1") as port, socket.socket() as closed, socket.socket() as full:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # nobody accepts: after one connection, the next gets no answer
        waiting = socket.create_connection(full.getsockname())
        names = {
            "open": port.port,
            "closed": closed.getsockname()[1],
            "silent": full.getsockname()[1],
        }
        targets = [ProbeTarget(name, "127.0.0.1", number) for name, number in names.items()]
        results = probe(targets, 2.0)
        waiting.close()
    failures = {result.target.name: result.failure for result in results}
    assert failures["open"] is None
    assert failures["closed"] == "Connection refused"
    assert re.fullmatch(r"no answer within [12]\.\d s \(a firewall\?\)", failures["silent"] or "")


def test_a_port_takes_many_and_leaves_nothing() -> None:
    me = psutil.Process()
    num_descriptors, num_threads = me.num_fds(), threading.active_count()
    with ProbePort("127.0.0.1") as port:
        results = probe([ProbeTarget("a", "127.0.0.1", port.port)] * 50, 60)
        assert [result.failure for result in results] == [None] * 50
    assert me.num_fds() <= num_descriptors, "descriptors leaked"
    assert threading.active_count() <= num_threads, "threads leaked"
    assert probe([], 1) == []


def test_it_opens_the_given_interface_only() -> None:
    with pytest.raises(ConfigError, match="means every interface"):
        ProbePort("0.0.0.0")
