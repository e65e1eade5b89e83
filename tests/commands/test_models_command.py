"""Models by name from the command line, against a hub on 127.0.0.1."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moe_serve.cli.main import main
from moe_serve.cli.place.place_inputs import model_facts
from moe_serve.cli.place.place_options import ModelFactsOptions
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.hub import hub_settings as settings_module
from moe_serve.model.hub import named_model
from moe_serve.model.hub.hub_settings import HubSettings
from moe_serve.offline.llm import LLM
from moe_serve.planning import plan_memory
from tests.support.hub.fake_hub import FakeHub, Fault, etag_of, fake_hub
from tests.support.server.server_process import SERVE, server_environment

REPO = "Demo/Mixture-16M"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = [path for path in demo_model_folder().iterdir() if path.is_file()]
    demo = {path.name: path.read_bytes() for path in files}
    with fake_hub() as hub:
        hub.add(REPO, {**demo, "modeling.py": b"raise SystemExit('code ran')"})
        yield hub


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSettings:
    """The hub settings of this process, whose `huggingface_hub` has read the environment
    already."""
    made = HubSettings(endpoint=hub.url, cache=tmp_path / "cache", retry_waits_s=())
    monkeypatch.setattr(settings_module, "hub_settings", lambda: made)
    monkeypatch.setattr(named_model, "hub_settings", lambda: made)
    monkeypatch.chdir(tmp_path)
    return made


def environment(hub: FakeHub, home: Path, **more: str) -> dict[str, str]:
    """Returns the environment of a process that uses only this hub."""
    kept = {name: value for name, value in server_environment().items() if "HF_" not in name}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **more}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert end.value.code is None or isinstance(end.value.code, int)
    return end.value.code or 0


def test_pull_list_and_remove(hub: FakeHub, settings: HubSettings, capsys: Capture) -> None:
    commit = hub.repos[REPO].revisions["main"]
    assert run("models") == 0
    assert "no models in" in capsys.readouterr().out
    assert run("models", "pull", REPO) == 0
    assert f"{REPO}@{commit} is in {settings.cache}" in capsys.readouterr().out
    assert run("models", "--json") == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["name"], model["commit"], model["revisions"]) == (REPO, commit, ["main"])
    assert (model["family"], model["is_complete"], model["problem"]) == ("qwen3_moe", True, None)
    assert run("models") == 0
    assert re.search(
        rf"{REPO} +main +{commit[:12]} +\d+\.\d MiB .*qwen3_moe +complete", capsys.readouterr().out
    )
    assert run("models", "remove", f"{REPO}@main") == 0
    assert re.search(r"1 revision removed \(.*\), 3\d\.\d MiB freed", capsys.readouterr().out)
    assert run("models", "remove", REPO) == 2
    assert capsys.readouterr().err.startswith(f"error: {REPO} is not in the cache")


def test_other_commands_read_what_they_need(
    hub: FakeHub, settings: HubSettings, capsys: Capture
) -> None:
    assert run("doctor", "--model", REPO, "--json") == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert any(c["name"] == "model" and f"models pull {REPO}" in c["text"] for c in checks)
    assert not hub.requests  # it looks, and fetches nothing
    facts = model_facts(ModelFactsOptions(folder=REPO))
    assert (facts.num_layers, facts.num_experts) == (6, 32)
    assert set(hub.sent) == {"config.json"}


def test_llm_by_name(hub: FakeHub, settings: HubSettings) -> None:
    with LLM(REPO, num_threads=1, num_pages=128) as llm:
        named = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    with LLM(num_threads=1, num_pages=128) as llm:
        assert llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids == named


def test_mistakes_are_one_sentence(
    hub: FakeHub, settings: HubSettings, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    config = b'{"architectures": ["LlamaForCausalLM"]}'
    hub.add("Other/Dense", {"config.json": config, "tokenizer.json": b"{}", "a.safetensors": b"a"})
    hub.fail("model.safetensors", Fault(cut_after=70_000))
    for model, words in {
        "./nothing": "is not a folder: give a local checkpoint",
        "models/tiny": "or hf://models/tiny to fetch the model of that name from the hub.",
        "Mixture-16M": "or OWNER/Mixture-16M with the owner of that model",
        "hf://Mixture-16M": "is not the name of a model on a hub",
        "No/Such": "does not exist; check the name",
        "Other/Dense": "'LlamaForCausalLM', which is not served",
        REPO: "70000 of",
    }.items():
        assert run("serve", model, "--port", "0") == 2
        *log, error = capsys.readouterr().err.splitlines()
        assert words in error and error.startswith("error: ")
        assert all("INFO moe_serve.startup" in line for line in log)
    assert run("models", "pull", "../x") == 2
    assert "OWNER/NAME" in capsys.readouterr().err


def test_memory_is_checked_before_the_weights(
    hub: FakeHub, settings: HubSettings, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_memory, "free_bytes", lambda device: 40 << 20)
    assert run("serve", REPO, "--port", "0") == 2
    error = capsys.readouterr().err
    assert "so its weights are not downloaded: the KV cache has" in error
    assert set(hub.sent) == {"config.json"}


def test_serves_by_name(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.repos[REPO].revisions["main"]
    with subprocess.Popen(
        [*SERVE, f"{REPO}@main", "--port", "0", "--num-threads", "1"],
        cwd=tmp_path,
        env=environment(hub, tmp_path / "home"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            lines = iter(process.stdout.readline, "")
            found = re.search(r"ready at (http://\S+)", next(lines, ""))
            assert found is not None, process.stderr.read()
            rows = [next(lines).strip() for _ in range(2)]
            assert rows[0].startswith(f"model   {REPO}: qwen3_moe")
            assert rows[1].startswith(f"source  {REPO}@{commit} in {tmp_path}")
            body = {"model": REPO, "prompt": "Once upon a time", "max_tokens": 4}
            answer = httpx.post(
                f"{found[1]}/v1/completions", json=body, trust_env=False, timeout=60
            ).json()
            assert answer["model"] == REPO and answer["usage"]["completion_tokens"] == 4
        finally:
            process.kill()
    assert not hub.asked("modeling.py")


def test_ctrl_c_ends_a_download_and_keeps_its_bytes(hub: FakeHub, tmp_path: Path) -> None:
    held = threading.Event()
    hub.fail("model.safetensors", Fault(cut_after=150_000, waits_for=held))
    command = [sys.executable, "-m", "moe_serve", "models", "pull", REPO]
    with subprocess.Popen(
        command, env=environment(hub, tmp_path), stderr=subprocess.PIPE, text=True
    ) as process:
        clock = threading.Event()
        digest = etag_of((demo_model_folder() / "model.safetensors").read_bytes())
        blobs = tmp_path / "hub" / "models--Demo--Mixture-16M" / "blobs"
        partial = blobs / f"{digest}.moe-serve.incomplete"
        while not partial.exists() or partial.stat().st_size < 150_000:
            assert process.poll() is None, process.communicate()[1]
            clock.wait(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        held.set()
    assert process.returncode == 130 and "Traceback" not in errors
    assert partial.stat().st_size == 150_000


def test_settings_come_from_the_hubs_own_variables(hub: FakeHub, tmp_path: Path) -> None:
    code = (
        "import sys; from moe_serve.model.hub.hub_settings import hub_settings; "
        "s = hub_settings(); "
        "print(s.endpoint, s.cache, s.token, s.is_offline, 'torch' in sys.modules)"
    )
    more = {"HF_TOKEN": "hf_x", "HF_HUB_CACHE": "/elsewhere", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(hub, tmp_path, **more),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [hub.url, "/elsewhere", "hf_x", "True", "False"]
