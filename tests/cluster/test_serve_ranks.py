"""`moe-serve serve` with ranks in processes of their own: how it ends, and what it leaves."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.support.server import server_process

FLAGS = ("--attention-ranks", "1", "--expert-ranks", "2", "--num-threads", "1")
WAIT_S = 90.0
HEARTBEAT_S = 1.5
RANK_MODULE = "moe_serve.cluster.ranks.rank_worker"
pytestmark = pytest.mark.timeout(400)


@contextmanager
def serving() -> Iterator[subprocess.Popen[str]]:
    """The server, not waited for; its ranks' processes are children of it."""
    settings = {
        "MOE_SERVE_CLUSTER_HEARTBEAT_S": str(HEARTBEAT_S),
        "MOE_SERVE_SERVER_DRAIN_TIMEOUT_S": str(WAIT_S),  # for slow machines
    }
    flags = ("--port", "0", "--num-pages", "256", *FLAGS)
    with server_process.serving(*flags, settings=settings) as process:
        yield process


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    found = re.search(r"ready at (http://\S+)", process.stdout.readline())
    assert found is not None, f"the server ended: {process.stderr.read()}"
    return found[1]


def complaints(said: str) -> list[str]:
    """What the server wrote beside how its start went."""
    return [line for line in said.splitlines() if " INFO moe_serve.startup: " not in line]


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every process below the server: its ranks and those that render chats."""
    return psutil.Process(process.pid).children(recursive=True)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for child in children_of(process):
        with contextlib.suppress(psutil.NoSuchProcess):  # a process that only started another one
            if RANK_MODULE in child.cmdline():
                found.append(child)
    return found


def assert_all_end(ranks: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(ranks, timeout=WAIT_S)
    assert not left, f"{left} outlive the server"


def answer_in_background(url: str, answers: list[httpx.Response]) -> threading.Thread:
    """A streamed request; the thread ends with the answer."""
    body = {"prompt": [5] * 20, "max_tokens": 200, "ignore_eos": True, "stream": True}
    began = threading.Event()

    def ask() -> None:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False
        ) as answer:
            began.set()
            answer.read()
            answers.append(answer)

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(WAIT_S), "no answer begins"
    return thread


def test_ctrl_c_drains_and_leaves_nothing() -> None:
    with serving() as server:
        url = url_of(server)
        children = children_of(server)
        assert len(ranks_of(server)) == 3
        answers: list[httpx.Response] = []
        thread = answer_in_background(url, answers)
        server.send_signal(signal.SIGINT)
        thread.join(WAIT_S)
        (answer,) = answers
        assert '"finish_reason":"length"' in answer.text.replace(" ", ""), "it was cut"
        assert server.wait(WAIT_S) == 0
        assert server.stderr is not None
        assert complaints(server.stderr.read()) == [], "nothing to say about it"
        assert_all_end(children)


def test_ctrl_c_while_ranks_load() -> None:
    """At once, with the shell's status for it, and without a traceback."""
    with serving() as server:
        while not ranks_of(server):
            assert server.poll() is None, "it ended by itself"
            time.sleep(0.01)
        ranks = ranks_of(server)
        server.send_signal(signal.SIGINT)
        assert server.wait(WAIT_S) == 130
        assert server.stderr is not None
        said = server.stderr.read()
        assert "Traceback" not in said, said
        assert_all_end(ranks)


def test_ranks_end_with_their_coordinator() -> None:
    """Killed, it can tell nobody. A frozen rank goes too."""
    with serving() as server:
        url_of(server)
        children = children_of(server)
        ranks_of(server)[1].suspend()
        server.kill()
        assert_all_end(children)


def test_a_coordinator_that_was_stopped_itself_loses_nobody() -> None:
    """The ranks beat all the time; it was not there to read it."""
    with serving() as server:
        url = url_of(server)
        pids = {rank.pid for rank in ranks_of(server)}
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(httpx.TimeoutException):  # longer than a rank may be silent
            httpx.get(f"{url}/health/live", timeout=4 * HEARTBEAT_S, trust_env=False)
        server.send_signal(signal.SIGCONT)
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": [5] * 20, "max_tokens": 20, "ignore_eos": True},
            timeout=WAIT_S,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        assert {rank.pid for rank in ranks_of(server)} == pids, "all are the same processes"
        server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT_S) == 0
        assert server.stderr is not None and complaints(server.stderr.read()) == []
