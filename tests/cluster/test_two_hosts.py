"""Two hosts with addresses of their own, as network namespaces of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import two_hosts
from moe_serve import LLM, SamplingParams
from moe_serve.cluster.control.secret import new_secret
from tests.support.forks.popen import is_template
from two_hosts import VirtualHost

REASON = two_hosts.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 180.0
PROMPTS = ("Once upon a time", "The capital of", "def main(", "1 + 1 =", "Es war einmal", "a")
# Waits until the server is ready, then sends all requests at once and prints the texts.
CLIENT = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen
url, patience_s = sys.argv[1], float(sys.argv[2])
requests = json.loads(sys.argv[3])
def is_ready():
    try:
        return urlopen(url + "/health/ready", timeout=60).status == 200
    except OSError:  # also of other statuses
        return False
deadline = time.monotonic() + patience_s
while not is_ready():
    if time.monotonic() > deadline:
        sys.exit("the server was not ready in time")
    time.sleep(0.1)
def ask(body):
    headers = {"Content-Type": "application/json"}
    asked = Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(asked, timeout=patience_s) as answer:
        return json.load(answer)["choices"][0]["text"]
with ThreadPoolExecutor(len(requests)) as pool:
    print(json.dumps(list(pool.map(ask, requests))))
"""
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
    for attempt in range(1200):
        try:
            with socket.create_connection((address, int(port)), 5) as connection:
                print(f"{host} hears: {connection.recv(100).decode()}")
                break
        except ConnectionRefusedError:
            import time
            time.sleep(0.05)
"""


def namespaces(pid: int) -> list[str]:
    """Those that a process has made: others may be making some at the same time."""
    done = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    own = f"moe{pid % 100_000}-"
    return [line for line in done.stdout.splitlines() if line.startswith(own)]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert namespaces(os.getpid()) == []


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
    command = ["sh", "-c", 'trap "echo drained; exit 0" TERM; echo up > "$1"; sleep 1000 & wait']
    process = subprocess.Popen(
        [sys.executable, str(script), *command, "sh", str(tmp_path / "{node}")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with contextlib.closing(process.stdout) if process.stdout else contextlib.nullcontext():
        for _ in range(3000):
            if all((tmp_path / node).exists() for node in "01"):
                break
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        text = process.stdout.read() if process.stdout else ""
    assert text.count("drained") == 2, text
    assert namespaces(process.pid) == []


def requests() -> list[dict[str, object]]:
    """Greedy and seeded ones."""
    return [
        {"prompt": prompt, "max_tokens": 20, "temperature": temperature, "seed": 7}
        for prompt in PROMPTS
        for temperature in (0.0, 1.0)
    ]


def colocated_texts() -> list[str]:
    with LLM() as llm:
        texts = []
        for request in requests():
            prompt = str(request.pop("prompt"))
            output = llm.generate(prompt, SamplingParams(**request))[0]  # type: ignore[arg-type]
            texts.append(output.outputs[0].text)
        return texts


CLUSTER = """
name: cable
coordinator: {host: 198.18.0.1, port: 29600}
nodes:
  - {name: left, address: 198.18.0.1, attention_ranks: [0], expert_ranks: [1]}
  - {name: right, address: 198.18.0.2, expert_ranks: [0]}
serve:
  server: {port: 8123}
"""


class Launch:
    """A launch on two hosts; on leaving the `with`, node 0 is told to end, and so ends both."""

    def __init__(self, hosts: tuple[VirtualHost, VirtualHost], folder: Path) -> None:
        assert all(host.address in CLUSTER for host in hosts)
        (folder / "secret").write_text(new_secret().text)
        (folder / "cluster.yaml").write_text(CLUSTER)
        self.hosts, self.folder = hosts, folder
        self.said = (folder / "output").open("w+b")
        self.processes = [self.start(host) for host in hosts]

    def start(self, host: VirtualHost) -> subprocess.Popen[bytes]:
        """The same command on both: each host finds itself in the file by its address."""
        files = ["--cluster", str(self.folder / "cluster.yaml")]
        secret = ["--secret-file", str(self.folder / "secret")]
        return host.popen(
            *(sys.executable, "-m", "moe_serve", "launch", *files, *secret),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdout=self.said,
            stderr=subprocess.STDOUT,
        )

    def texts(self) -> list[str]:
        """What the server answers to `requests`, asked on its own host, as soon as it is ready."""
        arguments = ("http://127.0.0.1:8123", str(PATIENCE_S), json.dumps(requests()))
        client = self.hosts[0].run(sys.executable, "-c", CLIENT, *arguments)
        assert client.returncode == 0, f"{client.stderr}\n{self.output()}"
        return list(json.loads(client.stdout))

    def wait_for(self, words: str, count: int = 1) -> None:
        """Until they have been said so often."""
        for _ in range(1200):
            if self.output().count(words) >= count:
                return
            threading.Event().wait(0.1)
        raise AssertionError(f"not {count} times {words!r}:\n{self.output()}")

    def output(self) -> str:
        return (self.folder / "output").read_text("utf-8", "replace")

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes[0].send_signal(signal.SIGTERM)
        try:
            codes = [process.wait(120) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
            self.said.close()
        assert codes == [0, 0], self.output()


@pytest.mark.timeout(900)
def test_launch_on_two_hosts_gives_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Attention and an expert rank on one host, an expert rank on the other; the other host's
    agent is killed, which takes its rank along, and comes back. Then the cable is out for longer
    than either end waits, and at last nothing that is sent arrives while the launch ends."""
    expected = colocated_texts()
    with two_hosts.two_hosts() as hosts, Launch(hosts, tmp_path) as launch:
        assert launch.texts() == expected
        launch.processes[1].kill()
        launch.processes[1].wait()
        assert launch.texts() == expected, "the other rank takes the experts over"
        launch.processes[1] = launch.start(hosts[1])
        launch.wait_for("starting expert-0", 2)
        assert launch.texts() == expected
        plug(hosts[1], "down")
        launch.wait_for("looking for node 0")
        assert launch.texts() == expected, "the other rank has taken the experts over"
        plug(hosts[1], "up")
        launch.wait_for("starting expert-0", 3)
        assert launch.texts() == expected and launch.processes[1].poll() is None
        lose_everything_between(hosts)
        launch.processes[0].send_signal(signal.SIGTERM)
        assert launch.processes[0].wait(25) == 0, "it needs no word of the other host"
        launch.processes[1].send_signal(signal.SIGTERM)
        assert launch.processes[1].wait(25) == 0, "it notices by itself that node 0 is gone"
        for host in hosts:
            deadline = time.monotonic() + 60  # a rank ends by itself when its agent is gone
            while left := [pid for pid in host.pids() if not is_template(pid)]:
                assert time.monotonic() < deadline, f"{left} still run: {launch.output()}"
                time.sleep(0.1)


def plug(host: VirtualHost, state: str) -> None:
    subprocess.run(["ip", "-netns", host.name, "link", "set", host.device, state], check=True)


def lose_everything_between(hosts: tuple[VirtualHost, VirtualHost]) -> None:
    """Both send to an address that no card has: connections are open, and nothing arrives."""
    for host, peer in (hosts, hosts[::-1]):
        neighbour = (peer.address, "lladdr", "02:00:00:00:00:99", "dev", host.device)
        subprocess.run(
            ["ip", "-netns", host.name, "neigh", "replace", *neighbour, "nud", "permanent"],
            check=True,
        )
