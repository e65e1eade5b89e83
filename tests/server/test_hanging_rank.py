"""A rank that hangs in the real server: it is found and reported once with all stacks, and requests
survive.

Other checks need a whole start: the phases on the port, and a log that is JSON to its last line.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server.server_process import ROOT, SERVE, port_of_ones_own, server_environment

FLAGS = (
    "--attention-ranks",
    "1",
    "--expert-ranks",
    "2",
    "--num-threads",
    "1",
    "--num-pages",
    "256",
)
SETTINGS = {
    "MOE_SERVE_CLUSTER_HEARTBEAT_S": "5.0",  # a frozen rank is given up after 15 s
    "MOE_SERVE_SERVER_HANG_REPORT_S": "5.0",  # no step takes as long, on a slow machine either
    "MOE_SERVE_SERVER_ADMIN_KEYS": "boss",
    "MOE_SERVE_LOG_ACCESS": "true",
    "MOE_SERVE_LOG_FORMAT": "json",
}


class Server:
    """The server's process, polled from its first moment on."""

    def __init__(self, folder: Path) -> None:
        port = port_of_ones_own()
        self.reports = folder / "reports"
        own = {"MOE_SERVE_SERVER_HANG_REPORT_DIRECTORY": str(self.reports)}
        self.log = folder / "log"
        command = [*SERVE, "--port", str(port), *FLAGS]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=server_environment(SETTINGS | own),
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120
        )

    def answers_until_ready(self) -> list[dict[str, Any]]:
        """Returns the answers of /health/ready before it was ready."""
        deadline, seen = time.monotonic() + 200, list[dict[str, Any]]()
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                answer = self.client.get("/health/ready")
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code == 200:
                return seen
            seen.append(answer.json()["error"])
            time.sleep(0.05)
        raise AssertionError(f"not ready: {seen[-1:]}")

    def rank(self, role: str, index: int) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it only started another one
                if f"--role {role} --rank {index}" in " ".join(child.cmdline()):
                    return child
        raise AssertionError(f"no process of {role}-{index}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.client.close()
    if made.process.poll() is None:
        for child in psutil.Process(made.process.pid).children(recursive=True):
            child.kill()
    made.process.kill()
    made.process.wait()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def step_of(report: Path) -> int:
    """Returns the number of steps before the report. A busy machine may hang again in a later
    step."""
    found = re.search(r"-step(\d+)\.txt$", report.name)
    assert found is not None, report.name
    return int(found[1])


@pytest.mark.timeout(400)
def test_a_frozen_rank_is_reported_and_survived(server: Server) -> None:
    seen = server.answers_until_ready()
    assert {error["code"] for error in seen} == {"loading"}
    startup = server.client.get("/startup").json()
    loading = next(phase for phase in startup["phases"] if phase["name"] == "loading")
    assert loading["done"] == loading["total"] > 0, "tensors, told by every rank"
    names = [process["name"] for process in startup["memory"]["processes"]]
    assert names == ["attention-0", "expert-0", "expert-1"]

    body = {"prompt": "The king", "max_tokens": 4, "temperature": 0}
    expected = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    before = set(server.reports.glob("*.txt"))  # steps that took as long on a starved machine
    server.rank("expert", 1).send_signal(signal.SIGSTOP)
    with httpx.stream(
        "POST",
        server.client.base_url.join("/v1/completions"),
        json=body | {"stream": True, "prompt": "The queen"},
        trust_env=False,
        timeout=120,
    ) as stream:
        wait_until(lambda: set(server.reports.glob("*.txt")) - before)
        stalled = server.client.get("/health/live")
        lines = list(stream.iter_lines())
    assert lines[-2] == "data: [DONE]", "the request outlived the rank"
    steps = {step_of(path): path for path in set(server.reports.glob("*.txt")) - before}
    report = steps[min(steps)]
    assert len(list(server.reports.glob(f"*step{min(steps)}.txt"))) == 1, "a hang is told once"
    text = report.read_text()
    assert stalled.json()["error"]["code"] == "engine_stalled"
    # All layers of a step are one native call or, in several micro-batches, some calls for each.
    at = r"(step|wait_combine), layer \d+, (.* )?waits for expert-1, for"
    assert re.search(rf"attention-0: serving, .* {at}", text)
    assert re.search(r"step \d+ was sent out .* waits for attention-0", text)
    assert "the last output of attention-0" in text
    assert "group_transport.py" in text or "native_rank_steps.py" in text
    again = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert again == expected
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    entries = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert any("memory: attention-0 on " in entry["message"] for entry in entries)
    assert any("made no step for" in entry["message"] for entry in entries)
    assert any(entry["logger"] == "moe_serve.ranks" for entry in entries)
    paths = {entry["path"] for entry in entries if "path" in entry}
    assert paths == {"/startup", "/v1/completions"}
