"""Published configs (configs/models/), read as the loader does, without a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.hf_config import HFConfig, check_spec
from moe_serve.model.families import family_of
from moe_serve.model.spec import ModelSpec

_CONFIGS = Path(__file__).parents[3] / "configs" / "models"


def published(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((_CONFIGS / f"{name}.json").read_text("utf-8"))
    return values


def spec_of(values: Mapping[str, Any], **changes: Any) -> ModelSpec:
    config = HFConfig({**values, **changes}, "config.json")
    spec = family_of(config).read_spec(config.text())
    check_spec(spec, config)
    return spec


def refusal_of(values: Mapping[str, Any], **changes: Any) -> str:
    """Returns the message for a config that must not be served."""
    with pytest.raises(CheckpointError) as caught:
        spec_of(values, **changes)
    return str(caught.value)


V2_LITE = published("DeepSeek-V2-Lite")
V2_CHAT = published("DeepSeek-V2-Chat")
V3 = published("DeepSeek-V3")
KIMI_K2 = published("Kimi-K2-Instruct")
GLM_FLASH = published("GLM-4.7-Flash")
MISTRAL_SMALL_4 = published("Mistral-Small-4-119B-2603")

__all__ = ["GLM_FLASH", "KIMI_K2", "MISTRAL_SMALL_4", "V2_CHAT", "V2_LITE", "V3", "spec_of"]
