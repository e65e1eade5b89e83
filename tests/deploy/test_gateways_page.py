"""docs/operate/gateways.md: its manifests are read, its settings exist, and its subscriber runs."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_serve.cache.events.kv_events import KVEvents
from moe_serve.cache.page_key import following_keys, root_key, token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cli.serve.server_options import flag_settings
from moe_serve.config.event_config import KVEventsConfig
from moe_serve.config.sections import EngineConfig
from moe_serve.config.sources import load_config
from moe_serve.http.gate.auth import OPEN_PATHS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "gateways.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of the page."""
    text = PAGE.read_text("utf-8")
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def manifests() -> list[dict[str, Any]]:
    return [part for block in blocks("yaml") for part in yaml.safe_load_all(block)]


def containers() -> Iterator[dict[str, Any]]:
    for manifest in manifests():
        pod = manifest.get("spec", {}).get("template", {}).get("spec", manifest)
        yield from pod.get("containers", ())


def test_the_manifests_name_each_other() -> None:
    by_kind = {manifest.get("kind"): manifest for manifest in manifests()}
    pod, pool = by_kind["Deployment"]["spec"]["template"], by_kind["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    assert {port["number"] for port in pool["targetPorts"]} <= ports
    assert container["readinessProbe"]["httpGet"]["path"] in OPEN_PATHS
    ((backend,),) = [rule["backendRefs"] for rule in by_kind["HTTPRoute"]["spec"]["rules"]]
    assert (backend["kind"], backend["name"]) == (
        "InferencePool",
        by_kind["InferencePool"]["metadata"]["name"],
    )
    picker = by_kind["EndpointPickerConfig"]
    known = {plugin["type"] for plugin in picker["plugins"]}
    (profile,), (source,) = picker["schedulingProfiles"], picker["dataLayer"]["sources"]
    used = [*profile["plugins"], source, *source["extractors"]]
    assert {each["pluginRef"] for each in used} <= known


def test_containers_have_settings_that_load() -> None:
    found = list(containers())
    assert len(found) == 2
    for container in found:
        environ = {
            entry["name"]: entry["value"].replace("$(POD_IP)", "10.0.0.7")
            for entry in container["env"]
            if entry["name"].startswith("MOE_SERVE_")
        }
        config = load_config(flags={}, environ=environ).config
        assert config.server.allow_open
    assert config.engine.kv_events.topic == "kv@10.0.0.7@OWNER/NAME"


def test_the_flag_on_the_page_is_read() -> None:
    (text,) = re.findall(r"--kv-events-config \\\n +'(.*?)'", PAGE.read_text("utf-8"))
    settings = flag_settings({"kv_events.endpoint": text})
    assert settings.keys() == {"kv_events.endpoint", "kv_events.replay_endpoint"}
    assert json.loads(text)["enable_kv_cache_events"]


@pytest.mark.timeout(60)
def test_the_subscriber_shows_stored_and_removed_pages(tmp_path: Path) -> None:
    script = next(text for text in blocks("python") if "zmq" in text)
    live, past = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/past"
    script = script.replace("tcp://127.0.0.1:5557", live).replace("tcp://127.0.0.1:5657", past)
    events = KVEvents(EngineConfig(kv_events=KVEventsConfig(endpoint=live, replay_endpoint=past)))
    listener = events.listener(0)
    cache = PrefixCache(1, 16, listener=listener)
    root = root_key(b"model", b"", "")

    def store(first: int) -> str:
        tokens = token_array([*range(first, first + 16)])
        (page,), (key,) = cache.allocate(1), following_keys(root, tokens, 16)
        cache.release([cache.enter(page, key, root, tokens)])
        listener.step_ended()
        return key[-8:].hex()

    first, is_done = store(0), threading.Event()

    def work() -> None:
        for index in itertools.count(1):  # until it is connected, it sees only what it asks for
            if is_done.wait(0.02):
                return
            store(100 * index)

    worker = threading.Thread(target=work)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            lines = (line.decode() for line in iter(process.stdout.readline, b""))
            assert "AllBlocksCleared" in next(lines)
            assert first in next(line for line in lines if "BlockStored" in line)
            worker.start()
            assert next(line for line in lines if "BlockRemoved" in line)
        finally:
            is_done.set()
            process.terminate()
    worker.join()
    events.close()
