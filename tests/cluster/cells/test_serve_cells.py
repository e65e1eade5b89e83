"""`moe-serve serve --cells` with ranks in processes: answers over HTTP are those of one process.

Requests move, clients leave, and an operator drains a cell meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from starlette.testclient import TestClient

from moe_serve.cli.serve.service import offline_app
from moe_serve.cluster.members.processes import WORKER_MODULE
from moe_serve.config.sections import Config, EngineConfig, ModelConfig
from tests.support.server.server_process import serving

pytestmark = pytest.mark.timeout(400)
LAYOUT = "1x(1A1E prefill) 1x(1A1E decode)"
ADMIN = {"Authorization": "Bearer root"}
SETTINGS = {
    "MOE_SERVE_CELLS_HAND_OVER": "always",
    "MOE_SERVE_CELLS_MIN_TOKENS": "32",
    "MOE_SERVE_SERVER_ADMIN_KEYS": "root",
}


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    found = re.search(r"ready at (http://\S+)", process.stdout.readline())
    assert found is not None, f"the server ended: {process.stderr.read()}"
    return found[1]


def bodies() -> list[dict[str, Any]]:
    """Greedy and seeded, one answer and three, short and long prompts."""
    rng = np.random.default_rng(3)
    return [
        {
            "prompt": rng.integers(5, 4000, 20 + 45 * index).tolist(),
            "max_tokens": 24,
            "ignore_eos": True,
            "temperature": float(index % 2),
            "seed": index,
            "logprobs": 2,
            "n": 3 if index == 3 else 1,
        }
        for index in range(6)
    ]


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    flags = ("--cells", LAYOUT, "--port", "0", "--num-pages", "512", "--num-threads", "1")
    with serving(*flags, settings=SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def url(process: subprocess.Popen[str]) -> str:
    return url_of(process)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    config = Config(engine=EngineConfig(model=ModelConfig(num_threads=1)))
    with offline_app(config) as app, TestClient(app) as client:
        return [client.post("/v1/completions", json=body).json()["choices"] for body in bodies()]


def post(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=90, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def cells_of(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/admin/cells", headers=ADMIN, timeout=30, trust_env=False)
    cells: list[dict[str, Any]] = answer.json()["cells"]
    return cells


def metric(url: str, start: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(start))


def test_answers_are_those_of_one_process(url: str, expected: list[Any]) -> None:
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda body: post(url, body), bodies())) == expected
        assert list(pool.map(lambda body: post(url, body), bodies())) == expected, "warm"
    assert metric(url, 'moe_serve:cell_moves_total{kind="hand_over"') > 0
    assert metric(url, "moe_serve:cell_moved_bytes_total") > 0
    assert [cell["role"] for cell in cells_of(url)] == ["prefill", "decode"]


def test_streams_go_on_while_their_cell_is_drained(url: str) -> None:
    body = {**bodies()[2], "max_tokens": 160, "logprobs": None, "stream": True, "n": 1}
    whole = post(url, {**body, "stream": False})[0]["text"]

    def stream(number: int) -> str:
        parts = []
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=90, trust_env=False
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line[6:])["choices"][0]["text"])
                    if number == 0 and len(parts) == 10:
                        drain(url, "drain")
                if number == 3 and len(parts) == 20:
                    break  # this client leaves
        return "".join(parts)

    try:
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(stream, range(4)))
        assert texts[:3] == [whole] * 3
        assert whole.startswith(texts[3])
        wait_until_idle(url)
        decode = cells_of(url)[1]
        assert decode["is_draining"] and decode["running"] == 0
    finally:
        drain(url, "undrain")
    assert metric(url, "moe_serve:cell_recomputed_tokens_total") == 0


def test_a_cell_is_added_and_the_first_one_removed_under_load(
    url: str, process: subprocess.Popen[str], expected: list[Any]
) -> None:
    """Answers keep their bits, no request fails, and nothing is left of the cell."""
    server, is_done = psutil.Process(process.pid), threading.Event()
    before, memories = ranks_of(server), shared_memories(server)
    assert len(before) == 4, [child.cmdline() for child in server.children()]

    def load(number: int) -> int:
        body, count = bodies()[number], 0
        while not is_done.is_set() or count == 0:
            salted = {**body, "cache_salt": f"{number} {count}"}  # no page is cached
            assert post(url, salted) == expected[number]
            count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        counts = [pool.submit(load, number) for number in range(6)]
        try:
            refused = admin(url, "POST", "cells", {"shape": "2x(1A1E)"})
            assert refused.status_code == 400 and "one cell such as" in refused.text
            added = [admin(url, "POST", "cells", {"shape": "1A1E prefill", "number": 2})] * 2
            assert [each.status_code for each in added] == [202, 202], added[0].text
            wait_until(url, lambda cells: cells["cell-2"] == "serving")
            removed = admin(url, "DELETE", "cells/0")
            assert removed.status_code == 202 and removed.json()["cell"]["state"] == "leaving"
            wait_until(url, lambda cells: cells == {"cell-1": "serving", "cell-2": "serving"})
            steps = cells_of(url)[1]["steps"]
            wait_until(url, lambda _: cells_of(url)[1]["steps"] > steps, "the new cell has work")
        finally:
            is_done.set()
    assert sum(each.result() for each in counts) >= 6
    assert admin(url, "POST", "cells/0/drain").status_code == 404
    assert admin(url, "DELETE", "cells/0").json()["cell"] == {"name": "cell-0", "state": "gone"}
    wait_until_idle(url)
    assert [cell["kv_used"] for cell in cells_of(url)] == [0.0, 0.0], "a page has leaked"
    after = ranks_of(server)
    assert len(after) == 4 and len(after & before) == 2, "the ranks of cell 0 have ended"
    assert shared_memories(server) == memories
    assert metric(url, "moe_serve:cell_recomputed_tokens_total") == 0
    assert metric(url, 'moe_serve:cell_count{model_name="moe-serve-demo",state="serving"') == 2


def ranks_of(server: psutil.Process) -> set[int]:
    return {each.pid for each in server.children() if WORKER_MODULE in each.cmdline()}


def shared_memories(server: psutil.Process) -> list[str]:
    """Returns the memories without a file that the server's process has open."""
    paths = [os.readlink(path) for path in Path(f"/proc/{server.pid}/fd").iterdir()]
    return sorted(path for path in paths if path.startswith("/memfd:"))


def admin(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return httpx.request(
        method, f"{url}/admin/{path}", json=body, headers=ADMIN, timeout=60, trust_env=False
    )


def wait_until(url: str, is_so: Callable[[dict[str, str]], bool], what: str = "") -> None:
    end = time.monotonic() + 120
    while not is_so({cell["name"]: cell["state"] for cell in cells_of(url)}):
        assert time.monotonic() < end, f"{what}: {cells_of(url)}"
        time.sleep(0.05)


def drain(url: str, verb: str) -> None:
    answer = httpx.post(f"{url}/admin/cells/1/{verb}", headers=ADMIN, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text


def wait_until_idle(url: str) -> None:
    end = time.monotonic() + 60
    while any(cell["running"] + cell["waiting"] for cell in cells_of(url)):
        assert time.monotonic() < end, cells_of(url)
        time.sleep(0.05)
