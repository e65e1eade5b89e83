"""The shape that planners read from a config.json, against the families and published numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.checkpoint.expert_shape import read_expert_shape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families import family_of

PUBLISHED = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.json"))


def check_like_its_family(values: dict[str, Any], path: Path) -> None:
    config = HFConfig(values, str(path))
    spec = family_of(config).read_spec(config.text())
    path.write_text(json.dumps(values))
    shape = read_expert_shape(path)
    sparse = tuple(index for index, layer in enumerate(spec.layers) if layer.is_sparse)
    assert (shape.num_layers, shape.sparse_layers) == (spec.num_layers, sparse)
    router = spec.router
    assert (shape.num_experts, shape.top_k) == (router.num_experts, router.top_k)
    assert shape.num_groups == router.shape.num_groups
    assert shape.bytes_per_expert <= 3 * spec.width * spec.expert_width * 4


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_configs(path: Path, tmp_path: Path) -> None:
    check_like_its_family(json.loads(path.read_text()), tmp_path / "config.json")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DeepSeek-V3", {"first_k_dense_replace": 1}),
        ("DeepSeek-V2-Lite", {"moe_layer_freq": 2}),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0, 5]}),
        ("Llama-4-Maverick-17B-128E-Instruct", {}),
        ("ERNIE-4.5-300B-A47B-PT", {"moe_layer_end_index": 30}),
        ("GLM-4.5", {"first_k_dense_replace": None}),
    ],
)
def test_layers_by_every_word(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    values = json.loads(next(p for p in PUBLISHED if p.stem == name).read_text())
    kept = {key: value for key, value in (values | changes).items() if value is not None}
    check_like_its_family(kept, tmp_path / "config.json")


def test_the_demo_model() -> None:
    shape = read_expert_shape(demo_model_folder())
    assert (shape.num_layers, shape.sparse_layers) == (6, tuple(range(6)))
    assert (shape.num_experts, shape.top_k) == (32, 4)


def test_bytes_of_quantised_weights(tmp_path: Path) -> None:
    values = json.loads(next(p for p in PUBLISHED if p.stem == "DeepSeek-V3").read_text())
    path, count = tmp_path / "config.json", 3 * 7168 * 2048
    for stated, num_bytes in (
        (None, 2 * count),
        ({"quant_method": "fp8"}, count),
        ({"quant_method": "mxfp4"}, count * 4.25 / 8),
        ({"quant_method": "awq", "bits": 4}, count / 2),
    ):
        path.write_text(json.dumps(values | {"quantization_config": stated}))
        shape = read_expert_shape(path)
        assert shape.bytes_per_expert == num_bytes, stated
        assert shape.sparse_layers == tuple(range(3, 61)) and shape.num_groups == 8


def test_an_architecture_that_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    values = {
        "architectures": ["SomethingNewForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 1,
    }
    path.write_text(json.dumps(values))
    shape = read_expert_shape(tmp_path)
    assert shape.sparse_layers == (1, 2, 3) and shape.bytes_per_expert == 3 * 8 * 4 * 2
    for changes, message in (
        ({"first_k_dense_replace": 4}, "none of 4 layers has routed experts"),
        ({"n_routed_experts": 0}, "n_routed_experts must be a positive integer"),
        ({"first_k_dense_replace": "x"}, "must be the index of a layer"),
        ({"num_experts_per_tok": [1, 2, 2, 2]}, "differs between layers"),
    ):
        path.write_text(json.dumps(values | changes))
        with pytest.raises(CheckpointError, match=message):
            read_expert_shape(path)
    with pytest.raises(CheckpointError, match="neither the folder of a checkpoint"):
        read_expert_shape(tmp_path / "none")
