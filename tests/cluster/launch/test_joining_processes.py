"""A launch and a node that joins it, as users start them: two commands with processes of their own.

The node gets a cell by `moe-serve cells add --node`, and is killed while its cell answers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from moe_serve.cli.main import app
from tests.support.server.server_process import ROOT, port_of_ones_own, server_environment

pytestmark = pytest.mark.timeout(400)
LONGEST_S = 150.0
ADMIN = "root"
SETTINGS = {
    "MOE_SERVE_CLUSTER_SECRET": "s" * 40,
    "MOE_SERVE_CLUSTER_REJOIN_S": "1",
    "MOE_SERVE_SERVER_ADMIN_KEYS": ADMIN,
    "MOE_SERVE_CELLS_CAN_GROW": "true",
}
BODIES = [
    {"prompt": list(range(10 + n, 60 + n)), "max_tokens": 120, "ignore_eos": True, "seed": n}
    for n in range(4)
]


@contextmanager
def launched(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yields `moe-serve launch` as the leader of a group with its ranks. All of it is killed at the
    end."""
    command = [sys.executable, "-m", "moe_serve", "launch", *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=server_environment(SETTINGS),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills a launch with its ranks, as the loss of their host would."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(is_so: Callable[[], Any], log: Path) -> Any:
    """Waits for a value that is true, and returns it."""
    end = time.monotonic() + LONGEST_S
    while not (found := is_so()):
        assert time.monotonic() < end, log.read_text(errors="replace")
        time.sleep(0.05)
    return found


def answer(url: str, body: dict[str, Any]) -> str:
    got = httpx.post(f"{url}/v1/completions", json=body, timeout=LONGEST_S, trust_env=False)
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["text"])


def listed(url: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    found = httpx.get(f"{url}/admin/cells", headers=headers, timeout=30, trust_env=False)
    return dict(found.json())


def cells(url: str, *words: str) -> str:
    """Runs `moe-serve cells`."""
    ran = CliRunner().invoke(app, ["cells", *words, "--url", url, "--admin-key", ADMIN])
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_a_node_joins_gets_a_cell_and_is_killed_while_it_answers(tmp_path: Path) -> None:
    log, port = tmp_path / "launch.log", port_of_ones_own()
    at = f"127.0.0.1:{port}"
    one = ("--cells", "1x(1A1E)", "--node-rank", "0", "--num-nodes", "1", "--coordinator", at)
    small = ("--num-pages", "256", "--num-threads", "1", "--port", "0")
    joining = ("--join", at, "--node", "beta", "--places", "2")
    with launched(log, *one, *small) as first, launched(tmp_path / "beta.log", *joining) as beta:
        url = until(lambda: re.search(r"ready at (http://\S+)", log.read_text()), log)[1]
        with ThreadPoolExecutor(len(BODIES)) as pool:
            expected = list(pool.map(lambda body: answer(url, body), BODIES))
        until(lambda: [n for n in listed(url)["nodes"] if n["name"] == "beta"], log)
        assert re.search(r"cell-1 .* beta", cells(url, "add", "1A1E", "--node", "beta"))
        cells(url, "drain", "0")
        assert answer(url, BODIES[0]) == expected[0], "on the node that joined alone"
        cells(url, "undrain", "0")
        assert [cell["nodes"] for cell in listed(url)["cells"]] == [["0"], ["beta"]]
        with ThreadPoolExecutor(len(BODIES)) as pool:
            answers = [pool.submit(answer, url, body) for body in BODIES]
            until(lambda: listed(url)["cells"][1]["running"] or answers[-1].done(), log)
            kill_all(beta)
            assert [one.result() for one in answers] == expected
        until(lambda: [cell["name"] for cell in listed(url)["cells"]] == ["cell-0"], log)
        until(lambda: [node["name"] for node in listed(url)["nodes"]] == ["0"], log)
        assert answer(url, BODIES[1]) == expected[1]
        ranks = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGTERM)
        assert first.wait(LONGEST_S) == 0, log.read_text(errors="replace")
        psutil.wait_procs(ranks, timeout=LONGEST_S)
        assert not [rank for rank in ranks if rank.is_running()]
