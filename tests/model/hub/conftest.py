"""A hub with one small model, and its own cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_serve.model.hub.hub_settings import HubSettings
from tests.support.hub.fake_hub import FakeHub, fake_hub

REPO = "Tiny/Mixture-1M"
SHARDS = {f"model-0000{i}-of-00003.safetensors": bytes([i]) * (200_000 + i) for i in (1, 2, 3)}


def small_model() -> dict[str, bytes]:
    """Three shards with an index. No test reads the contents of the weights."""
    index = {"weight_map": {f"tensor.{i}": name for i, name in enumerate(SHARDS)}}
    return {
        "config.json": json.dumps({"architectures": ["Any"]}).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "tokenizer.json": b'{"model": "' + b"t" * 9_000 + b'"}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"# A model",
        "modeling_tiny.py": b"raise SystemExit('code of a repository ran')",
        "pytorch_model.bin": b"\x80\x04pickle",
        "consolidated.safetensors": b"c" * 9_000,
        "original/consolidated.00.pth": b"\x80\x04pickle",
        **SHARDS,
    }


SERVED = frozenset(
    {
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        *SHARDS,
    }
)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        hub.add(REPO, small_model())
        yield hub


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path) -> HubSettings:
    return HubSettings(endpoint=hub.url, cache=tmp_path / "cache", retry_waits_s=(0.0, 0.0))
