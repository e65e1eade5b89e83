"""`moe-serve serve --cells` with ranks in processes: answers over HTTP are those of one process.

Requests move, clients leave, and an operator drains a cell meanwhile.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from moe_serve.cli.serve.service import offline_app
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
def url() -> Iterator[str]:
    flags = ("--cells", LAYOUT, "--port", "0", "--num-pages", "512", "--num-threads", "1")
    with serving(*flags, settings=SETTINGS) as process:
        yield url_of(process)


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


def drain(url: str, verb: str) -> None:
    answer = httpx.post(f"{url}/admin/cells/1/{verb}", headers=ADMIN, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text


def wait_until_idle(url: str) -> None:
    end = time.monotonic() + 60
    while any(cell["running"] + cell["waiting"] for cell in cells_of(url)):
        assert time.monotonic() < end, cells_of(url)
        time.sleep(0.05)
