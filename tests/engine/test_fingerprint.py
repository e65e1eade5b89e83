"""The fingerprint of answers: it is stable, and changes when answers could change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_serve.config.sections import CacheConfig, Config, EngineConfig, ModelConfig, ServerConfig
from moe_serve.engine import fingerprint
from moe_serve.engine.engine_facts import EngineFacts
from moe_serve.engine.fingerprint import checkpoint_digest, system_fingerprint
from moe_serve.model.checkpoint.checkpoint import demo_model_folder

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copy(demo_model_folder() / name, made)
    torch.manual_seed(0)
    save_file({f"t{i}": torch.randn(64, 64) for i in range(8)}, made / WEIGHTS)
    return made


def layout(folder: Path, **others: Any) -> EngineFacts:
    fields: dict[str, Any] = {
        **{"family": "qwen3_moe", "num_layers": 1, "num_experts": 4, "top_k": 2},
        **{"vocab_size": 9, "max_model_len": 64, "dtype": "bfloat16", "device": "cpu"},
        **{"kernels": "native", "weight_format": "plain", "expert_weights": "plain"},
        **{"num_threads": 1, "num_pages": 4, "page_size": 16, "kv_bytes": 1},
        **{"micro_batches": 1, "load_seconds": 0.0},
    }
    return EngineFacts(folder=folder, **{**fields, **others})


def test_copies_and_other_machine_sizes_agree(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "another name")
    first = system_fingerprint(layout(folder), Config())
    second = system_fingerprint(layout(copy, num_threads=8, num_pages=999), Config())
    assert first == second
    assert first.startswith("fp_") and len(first) == 15
    (copy / "README.md").write_text("another", "utf-8")
    os.mkfifo(copy / "pipe.safetensors")  # nothing waits for it
    port = Config(server=ServerConfig(port=9, api_keys=("k" * 20,)))
    assert system_fingerprint(layout(copy), port) == first


@pytest.mark.parametrize(
    "others", [{"dtype": "float32"}, {"kernels": "torch"}, {"max_model_len": 32}]
)
def test_another_way_to_compute(folder: Path, others: dict[str, Any]) -> None:
    assert system_fingerprint(layout(folder, **others), Config()) != (
        system_fingerprint(layout(folder), Config())
    )


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(cache=CacheConfig(kv_dtype="int8")),
        EngineConfig(model=ModelConfig(low_bit_products="int8")),
    ],
)
def test_another_rounding(folder: Path, engine: EngineConfig) -> None:
    assert system_fingerprint(layout(folder), Config(engine=engine)) != (
        system_fingerprint(layout(folder), Config())
    )


def test_settings_that_shape_answers(folder: Path) -> None:
    shaped = Config(server=replace(ServerConfig(), reasoning_parser="none"))
    assert system_fingerprint(layout(folder), shaped) != (
        system_fingerprint(layout(folder), Config())
    )


def test_another_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = system_fingerprint(layout(folder), Config())
    monkeypatch.setattr(fingerprint, "__version__", "999")
    assert system_fingerprint(layout(folder), Config()) != before


def change_text(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(path.read_text("utf-8") + " ", "utf-8")

    return change


def change_one_value(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-12345] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def change_one_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "t5": tensors["t5"] * 1.01}, folder / WEIGHTS)


CHANGES = [change_text("tokenizer.json"), change_text("chat_template.jinja"), change_one_tensor]


@pytest.mark.parametrize("change", [*CHANGES, change_one_value])
def test_another_checkpoint(folder: Path, change: Callable[[Path], None]) -> None:
    before = checkpoint_digest(folder)
    change(folder)
    assert checkpoint_digest(folder) != before


@pytest.mark.parametrize("change", CHANGES)
def test_another_large_checkpoint(
    folder: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a part of a large checkpoint is read; a tensor that changed as a whole is still
    noticed."""
    monkeypatch.setattr(fingerprint, "MAX_WHOLE_BYTES", 1000)
    (folder / "other.safetensors").write_bytes(b"\xff" * 64)
    before = checkpoint_digest(folder)
    assert checkpoint_digest(folder) == before
    change(folder)
    assert checkpoint_digest(folder) != before
