"""Models by name from the command line: `models`, `serve` and the others, against a hub on
127.0.0.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from tests.support.hub.fake_hub import FakeHub, fake_hub
from tests.support.server.server_process import server_environment

REPO = "Demo/Mixture-16M"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    demo = {p.name: p.read_bytes() for p in demo_model_folder().iterdir() if p.is_file()}
    with fake_hub() as hub:
        hub.add(REPO, {**demo, "modeling.py": b"raise SystemExit"})
        yield hub


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    kept = {n: v for n, v in server_environment().items() if not n.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moe_serve", *words],
            cwd=tmp_path,
            env=environment | settings,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run
