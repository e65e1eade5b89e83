"""Two hosts with addresses of their own, as network namespaces of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import two_hosts
from two_hosts import VirtualHost

REASON = two_hosts.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

SAY = """
import socket, sys
node, host, coordinator = sys.argv[1:]
address, port = coordinator.rsplit(":", 1)
if node == "0":
    with socket.create_server((address, int(port))) as server:
        connection, peer = server.accept()
        with connection:
            connection.sendall(f"hello {peer[0]}".encode())
else:
    for attempt in range(200):
        try:
            with socket.create_connection((address, int(port)), 5) as connection:
                print(f"{host} hears: {connection.recv(100).decode()}")
                break
        except ConnectionRefusedError:
            import time
            time.sleep(0.05)
"""


def namespaces() -> set[str]:
    done = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if line.startswith("moe")}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = namespaces()
    yield
    assert namespaces() <= before


def test_one_command_runs_on_both_and_they_reach_each_other() -> None:
    lines: list[str] = []
    command = [sys.executable, "-c", SAY, "{node}", "{host}", "{coordinator}"]
    assert two_hosts.run_in_both(command, lines.append) == 0, lines
    assert lines == ["[host-1] 198.18.0.2 hears: hello 198.18.0.2"]


def test_a_hosts_addresses_are_its_own() -> None:
    with two_hosts.two_hosts() as (first, second):
        listening = "import socket; socket.create_server(('{}', 0)); print('ok')"

        def can_listen(host: VirtualHost, address: str) -> bool:
            done = host.run(sys.executable, "-c", listening.format(address))
            return done.returncode == 0

        assert can_listen(first, first.address) and can_listen(second, second.address)
        assert not can_listen(first, second.address), "that is the other host's"
    with pytest.raises(OSError, match="Cannot assign requested address"):
        socket.create_server((first.address, 0))


def test_the_first_failure_ends_both() -> None:
    lines: list[str] = []
    script = 'if [ "$1" = 1 ]; then exit 7; fi; sleep 1000'
    code = two_hosts.run_in_both(["sh", "-c", script, "sh", "{node}"], lines.append)
    assert code == 7
    assert "host-1 ended with status 7: stopping the others" in lines


def test_nothing_is_left_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), two_hosts.two_hosts() as (first, _):
        process = first.popen("sleep", "1000")
        _ = 1 // 0
    assert process.wait(10) == -signal.SIGKILL


def test_ctrl_c_ends_both(tmp_path: Path) -> None:
    script = Path(two_hosts.__file__)
    command = ["sh", "-c", 'echo up > "$1"; trap "echo drained; exit 0" TERM; sleep 1000 & wait']
    process = subprocess.Popen(
        [sys.executable, str(script), *command, "sh", str(tmp_path / "{node}")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with contextlib.closing(process.stdout) if process.stdout else contextlib.nullcontext():
        for _ in range(500):
            if all((tmp_path / node).exists() for node in "01"):
                break
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        text = process.stdout.read() if process.stdout else ""
    assert text.count("drained") == 2, text
