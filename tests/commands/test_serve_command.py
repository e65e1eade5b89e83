"""`moe-serve serve` as a newcomer runs it: the demonstration model, the ready message, the end."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moe_serve.cli.main import main
from tests.support.families.quantised_cases import CASES
from tests.support.families.quantised_folder import write_pair
from tests.support.server.server_process import serving

pytestmark = pytest.mark.timeout(400)  # processes start
FLAGS = ("--port", "0", "--num-threads", "1", "--num-pages", "256", "--api-key", "sesame")


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    with serving(*FLAGS) as process:
        yield process


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
    assert re.search(r"pages +/dashboard, /dashboard/playground\n", text)

    words = shlex.split(lines[-1])  # the line to paste
    assert words[:3] == ["curl", "-s", f"{url}/v1/chat/completions"]
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}
    body = words[words.index("-d") + 1]
    answer = httpx.post(words[2], content=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    keyless = httpx.post(words[2], content=body, timeout=60, trust_env=False)
    assert keyless.status_code == 401

    monkeypatch.setenv("MOE_SERVE_API_KEY", "sesame")
    with pytest.raises(SystemExit) as exit_info:
        main(["chat", "--url", url, "--message", "What is 3 plus 4?", "--max-tokens", "12"])
    assert exit_info.value.code in (None, 0)
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "first after" in captured.err

    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0
    assert server.stderr is not None
    said = server.stderr.read()
    assert " WARNING " not in said and " ERROR " not in said, said
    assert re.search(r"memory: server on \w+: weights .* KV pages .* in all", said), said


def test_a_quantised_folder_says_its_format_and_answers(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, CASES["Mixtral-8x7B-Instruct-v0.1-AWQ"])
    with serving(str(stored), *FLAGS) as process:
        text = "\n".join(ready_message(process))
        assert re.search(r"weights awq int4 groups of 128, \w.*(packed|dequantised)", text), text
        found = re.search(r"is ready at (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        answer = httpx.post(
            f"{found[1]}/v1/completions",
            json={"model": "stored", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True},
            headers={"Authorization": "Bearer sesame"},
            timeout=60,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method is 'modelopt'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format is True"),
    ],
)
def test_a_format_that_is_not_served_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    quantization: dict[str, object],
    complaint: str,
) -> None:
    stored, _ = write_pair(tmp_path, CASES["Mixtral-8x7B-Instruct-v0.1-AWQ"])
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = quantization
    (stored / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", str(stored), "--port", "0"])
    assert exit_info.value.code == 2
    *log, said = capsys.readouterr().err.strip().splitlines()
    assert all(" INFO moe_serve.startup: " in line for line in log), log
    assert said.startswith("error: ") and complaint in said and said.endswith("."), said
