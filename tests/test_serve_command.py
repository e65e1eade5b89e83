"""`moe-serve serve` as a newcomer runs it: the demonstration model, the ready message, the end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moe_serve.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--port", "0", "--num-threads", "1", "--num-pages", "256", "--api-key", "sesame")


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    environ = {name: value for name, value in os.environ.items() if "MOE_SERVE" not in name}
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    with subprocess.Popen(
        [sys.executable, "-m", "moe_serve", "serve", *FLAGS],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def ready_message(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None and process.stderr is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith("curl "):
            return lines
    raise AssertionError(f"the server ended: {process.stderr.read()}")


def test_from_start_to_ready_to_the_end(
    server: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ready_message(server)
    text = "\n".join(lines)
    found = re.search(r"is ready at (http://127\.0\.0\.1:\d+)$", lines[0])
    assert found is not None, text
    url = found[1]
    assert re.search(r"attention stage on \w+, expert stage on \w+ \(32 experts, top-4\)", text)
    assert "256 KV pages of 16 tokens = 4096 tokens" in text

    words = shlex.split(lines[-1])  # the line to paste
    assert words[:3] == ["curl", "-s", f"{url}/v1/chat/completions"]
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}
    body = words[words.index("-d") + 1]
    answer = httpx.post(words[2], content=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert httpx.post(words[2], content=body, trust_env=False).status_code == 401

    monkeypatch.setenv("MOE_SERVE_API_KEY", "sesame")
    with pytest.raises(SystemExit) as exit_info:
        main(["chat", "--url", url, "--message", "What is 3 plus 4?", "--max-tokens", "12"])
    assert exit_info.value.code in (None, 0)
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "first after" in captured.err

    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=30) == 0
    assert server.stderr is not None and server.stderr.read() == ""
