"""A merged checkpoint has the weights that an adapter stands for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from moe_serve.adapters.bitdelta.make import make_bitdelta
from moe_serve.adapters.merge import merge_adapter
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.model.load.loader import ModelLoader
from tests.support.adapters.adapter_folders import (
    ATTENTION,
    EXPERTS,
    tensors_of,
    write_esft,
    write_lora,
    write_merged,
    write_peft,
)
from tests.support.adapters.bitdelta_folders import write_fine_tune
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint

DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize("kind", ["lora", "esft"])
def test_the_weights_are_those_of_the_formula(base: Path, kind: str, tmp_path: Path) -> None:
    if kind == "esft":
        adapter = write_esft(tmp_path / "adapter", base, {0: [0, 3], 2: [1]})
    else:
        both = re.compile(f"{ATTENTION.pattern}|{EXPERTS.pattern}")
        adapter = write_lora(tmp_path / "adapter", base, pattern=both, lora_alpha=7)
    wanted = tensors_of(write_merged(tmp_path / "wanted", base, adapter))
    size = merge_adapter(base, adapter, tmp_path / "merged")
    found, before = tensors_of(tmp_path / "merged"), tensors_of(base)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, atol=1e-5), name
    changed = [name for name, tensor in before.items() if not torch.equal(found[name], tensor)]
    assert size.num_changed == len(changed) > 0 and size.num_tensors == len(wanted)
    ModelLoader(tmp_path / "merged")  # has its configuration


def test_what_cannot_be_merged_is_refused(base: Path, tmp_path: Path) -> None:
    tuned = write_fine_tune(tmp_path / "tuned", base)
    make_bitdelta(base, tuned, tmp_path / "bits")
    with pytest.raises(CheckpointError, match="serve the fine-tune that it was made from"):
        merge_adapter(base, tmp_path / "bits", tmp_path / "merged")
    fused = write_checkpoint(tmp_path / "fused", CASES["gpt_oss"])
    num_experts, num_inputs, num_outputs = tensors_of(fused)[DOWN].shape
    matrices = {
        f"base_model.model.{DOWN}.lora_A.weight": torch.ones(num_experts, 4, num_inputs),
        f"base_model.model.{DOWN}.lora_B.weight": torch.ones(num_experts, num_outputs, 4),
    }
    stacked = write_peft(tmp_path / "stacked", matrices)
    with pytest.raises(
        CheckpointError, match="changes down of layer 0.*does not store as a separate matrix"
    ):
        merge_adapter(fused, stacked, tmp_path / "merged")
    with pytest.raises(ConfigError, match="exists: name another folder"):
        merge_adapter(base, tmp_path / "bits", tuned)
    assert not (tmp_path / "merged").exists()
