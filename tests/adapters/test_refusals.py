"""Adapters that cannot be served are refused with one sentence, never changed or left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_kernels.interface.kernels import Kernels
from moe_serve.adapters.adapter_build import AdapterBuilder, is_merging
from moe_serve.adapters.adapter_files import open_adapter
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import EngineConfig, SpeculationConfig
from moe_serve.engine.build_adapters import check_adapters
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.model.load.loader import ModelLoader
from tests.support.adapters.adapter_folders import write_esft, write_lora

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def builder(base: Path) -> AdapterBuilder:
    return AdapterBuilder(ModelLoader(base), AdapterConfig())


def refusal(builder: AdapterBuilder, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        builder.build(open_adapter(folder))
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peft_type", "IA3", "peft_type is 'IA3', but only 'LORA' is served"),
        ("peft_type", None, "peft_type is None"),
        ("use_dora", True, "use_dora is True, which is not served"),
        ("bias", "all", "bias is 'all', which is not served"),
        ("lora_bias", True, "lora_bias is True"),
        ("modules_to_save", ["lm_head"], "modules_to_save is ['lm_head']"),
        ("trainable_token_indices", [3], "trainable_token_indices is [3]"),
        ("fan_in_fan_out", True, "fan_in_fan_out is True"),
        ("layer_replication", [[0, 2]], "layer_replication is"),
        ("r", 0, "r is 0, but must be in [1, 64]"),
        ("r", 65, "r is 65, but must be in [1, 64]; adapters.max_rank"),
        ("r", True, "r is True"),
        ("r", "8", "r is '8'"),
        ("r", 5, "has the shape [4, 48], but the rank and the base model need [5, 48]"),
        ("lora_alpha", None, "lora_alpha is None, but must be a number"),
        ("lora_alpha", 1e300, "lora_alpha is 1e+300, but must be a number in [-1000000, 1000000]"),
        ("lora_alpha", 1e400, "lora_alpha is inf"),
        ("rank_pattern", {".*q_proj": 4}, "rank_pattern has the key '.*q_proj', a regular"),
        ("rank_pattern", {"q_proj": 3}, "has the shape [4, 48]"),
        ("alpha_pattern", [1], "alpha_pattern is [1], but must be an object"),
    ],
)
def test_configurations(
    builder: AdapterBuilder, base: Path, field: str, value: Any, message: str, tmp_path: Path
) -> None:
    folder = write_lora(tmp_path / "a", base)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert message in refusal(builder, folder)


def _with_tensors(**changes: torch.Tensor | None) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        for name, tensor in changes.items():
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor.clone()
        save_file(tensors, path)

    return spoil


def _as_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _both(folder: Path) -> None:
    (folder / "expert_cfg.json").write_text("{}")


def _not_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


ROUTER = "base_model.model.model.layers.0.mlp.gate"
HEAD = "base_model.model.lm_head"
ONES = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_as_pickle, "adapter_model.bin is a pickle, which can run code and is never opened"),
        (_cut, "adapter_model.safetensors"),
        (_both, "both adapter_config.json and expert_cfg.json"),
        (_not_json, "adapter_config.json is not JSON"),
        (_with_tensors(**{f"{Q}.lora_B.weight": None}), "has no counterpart A or B"),
        (_with_tensors(**{f"{Q}.lora_B.weight": torch.ones(4, 4)}), "has the shape [4, 4]"),
        (
            _with_tensors(**{f"{Q}.lora_A.weight": torch.full((4, 48), float("nan"))}),
            "has values that are not finite",
        ),
        (_with_tensors(**{f"{Q}.lora_A.weight": torch.ones(4, 48).to(torch.int8)}), "is I8"),
        (_with_tensors(**{f"{Q}.lora_magnitude_vector": ONES}), "is not named base_model.model"),
        (
            _with_tensors(**{f"{ROUTER}.lora_A.weight": ONES, f"{ROUTER}.lora_B.weight": ONES}),
            "changes a router",
        ),
        (
            _with_tensors(**{f"{HEAD}.lora_A.weight": ONES, f"{HEAD}.lora_B.weight": ONES}),
            "changes the output head",
        ),
        (
            _with_tensors(**{f"{Q}x.lora_A.weight": ONES, f"{Q}x.lora_B.weight": ONES}),
            "belongs to no matrix that an adapter of this model may change",
        ),
    ],
)
def test_files(
    builder: AdapterBuilder, base: Path, spoil: Spoil, message: str, tmp_path: Path
) -> None:
    folder = write_lora(tmp_path / "a", base)
    spoil(folder)
    assert message in refusal(builder, folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"non_expert_modules": True}, "non_expert_modules is true"),
        ({"other": 1}, "the field 'other' is not known"),
        ({"experts": {}}, "experts must be an object of lists"),
        ({"experts": {"99": [0]}}, "experts has the layer '99'"),
        ({"experts": {"0": [1000]}}, "experts.0 must be a list of expert ids in [0, "),
        ({"experts": {"0": [1, 2]}}, "has no down matrix of expert 2 of layer 0"),
        ({"experts": {"0": [2]}}, "belongs to expert 1 of layer 0, which"),
    ],
)
def test_experts(
    builder: AdapterBuilder, base: Path, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_esft(tmp_path / "a", base, {0: [1]})
    path = folder / "expert_cfg.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    assert message in refusal(builder, folder)


def test_a_folder_without_weights(builder: AdapterBuilder, base: Path, tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "a", base)
    (folder / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refusal(builder, folder)
    (folder / "adapter_config.json").unlink()
    assert "has no configuration: an adapter has exactly one of" in refusal(builder, folder)
    assert "is not a folder" in refusal(builder, tmp_path / "nothing")


ON = AdapterConfig(is_enabled=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(adapters=AdapterConfig(modules=("a=b",))), "adapters.is_enabled is false"),
        (EngineConfig(adapters=AdapterConfig(root="/a")), "adapters.root is set"),
        (
            EngineConfig(adapters=AdapterConfig(expert_lora="merged")),
            "adapters.expert_lora is set, but adapters.is_enabled is false",
        ),
        (
            EngineConfig(adapters=ON, speculation=SpeculationConfig(method="self")),
            "speculation.method 'self' drafts with the base model",
        ),
    ],
)
def test_combinations(config: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_adapters(config)


def test_a_root_that_is_no_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    adapters = AdapterConfig(is_enabled=True, root=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"adapters\.root is '.*none', which is not a folder"):
        check_adapters(EngineConfig(adapters=adapters))
    check_adapters(EngineConfig(adapters=replace(adapters, root=str(tmp_path))))


def test_kernels_without_additions() -> None:
    """They merge LoRAs of experts, unless they are told not to."""
    kinds = SimpleNamespace(adds_to_experts=False)
    without = cast(Kernels, SimpleNamespace(name="triton", adapters=kinds))
    assert is_merging(AdapterConfig(), without)
    with pytest.raises(ConfigError, match=r"adapters.expert_lora is 'added', .*\(triton\) cannot"):
        is_merging(AdapterConfig(expert_lora="added"), without)
