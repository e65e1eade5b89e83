"""A merged checkpoint has the weights that an adapter stands for."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_serve.adapters import merged_folder as merged_folder_module
from moe_serve.adapters.bitdelta.make import make_bitdelta
from moe_serve.adapters.merge import merge_adapter
from moe_serve.adapters.merged_folder import delete_unused, merged_folder
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.model.load.loader import ModelLoader
from moe_serve.offline.llm import LLM
from tests.support.adapters.adapter_folders import (
    ATTENTION,
    EXPERTS,
    tensors_of,
    write_esft,
    write_lora,
    write_merged,
    write_peft,
)
from tests.support.adapters.answers import answers_of, content
from tests.support.adapters.bitdelta_folders import write_fine_tune
from tests.support.adapters.bitdelta_folders import write_merged as write_bitdelta_merged
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint
from tests.support.families.quantised_cases import CASES as QUANTISED
from tests.support.families.quantised_folder import write_pair

EXPERTS_OF_0 = "model.layers.0.mlp.experts"


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


@pytest.mark.parametrize("family", ["qwen3_moe-dense-layers", "gpt_oss", "granitemoe-shared"])
def test_bitdelta(family: str, tmp_path: Path) -> None:
    """Also where a checkpoint has all experts of a layer in one tensor."""
    base = write_checkpoint(tmp_path / "base", CASES[family])
    bits = tmp_path / "bits"
    make_bitdelta(base, write_fine_tune(tmp_path / "tuned", base), bits, "row")
    merge_adapter(base, bits, tmp_path / "merged")
    wanted = tensors_of(write_bitdelta_merged(tmp_path / "wanted", base, bits))
    check_equal(tmp_path / "merged", wanted)


def test_stacked_experts(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", CASES["gpt_oss"])
    before = tensors_of(base)
    generator = torch.Generator().manual_seed(1)
    matrices, wanted = {}, dict(before)
    for part in ("gate_up_proj", "down_proj"):
        name = f"{EXPERTS_OF_0}.{part}"
        num_experts, num_inputs, num_outputs = before[name].shape
        a = torch.randn(num_experts, 4, num_inputs, generator=generator)
        b = torch.randn(num_experts, num_outputs, 4, generator=generator)
        matrices |= {
            f"base_model.model.{name}.lora_A.weight": a,
            f"base_model.model.{name}.lora_B.weight": b,
        }
        wanted[name] = before[name] + 2.0 * (b @ a).transpose(1, 2)
    adapter = write_peft(tmp_path / "adapter", matrices, r=4, lora_alpha=8)
    size = merge_adapter(base, adapter, tmp_path / "merged")
    assert size.num_changed == 2
    check_equal(tmp_path / "merged", wanted)


def check_equal(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    found = tensors_of(folder)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, atol=1e-4), name
    ModelLoader(folder)  # has its configuration


def test_what_cannot_be_merged_is_refused(base: Path, tmp_path: Path) -> None:
    packed, floats = write_pair(tmp_path, QUANTISED["DeepSeek-V2-Lite-AWQ"])
    adapter = write_lora(tmp_path / "adapter", floats)
    with pytest.raises(CheckpointError, match="which .* does not store in floats: merge it into"):
        merge_adapter(packed, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(ConfigError, match="exists: name another folder"):
        merge_adapter(base, adapter, floats)


def test_a_model_of_one_fine_tune(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter is merged once, and its answers are those of the checkpoint that it stands
    for. Another content of the adapter is merged anew."""
    monkeypatch.setattr(merged_folder_module, "merged_root", lambda: tmp_path / "cache")
    adapter = write_lora(tmp_path / "adapter", base, pattern=EXPERTS)
    merge_adapter(base, adapter, tmp_path / "merged")
    wanted = content(answers_of(tmp_path / "merged"))
    for _ in range(2):
        assert content(answers_of(base, merge_adapter=str(adapter))) == wanted
        assert len(list((tmp_path / "cache").iterdir())) == 1
    assert content(answers_of(base)) != wanted
    shutil.rmtree(adapter)
    write_lora(adapter, base, pattern=EXPERTS, seed=1)
    assert content(answers_of(base, merge_adapter=str(adapter))) != wanted
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(str(base), merge_adapter=str(tmp_path / "nowhere"))


def merged_names(cache: Path) -> set[str]:
    return {path.parent.parent.name for path in cache.glob("*/*/config.json")}


def test_the_cache_keeps_the_checkpoints_used_last(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, in_use = tmp_path / "cache", list[int]()
    monkeypatch.setattr(merged_folder_module, "merged_root", lambda: cache)
    monkeypatch.setattr(merged_folder_module, "_in_use", in_use)
    adapters = [write_lora(tmp_path / f"adapter{i}", base, seed=i, rank=1) for i in range(4)]
    digests = []
    for i, adapter in enumerate(adapters[:3]):
        digests.append(merged_folder(base, adapter, 3).parent.name)
        os.utime(cache / digests[i] / "lock", (i, i))
    assert merged_names(cache) == set(digests)
    merged_folder(base, adapters[0], 3)  # used again, after the others
    while in_use:
        os.close(in_use.pop())
    digests.append(merged_folder(base, adapters[3], 3).parent.name)
    assert merged_names(cache) == {digests[i] for i in (0, 2, 3)}
    merged_folder(base, adapters[1], 1)
    kept = {digests[i] for i in (1, 3)}  # this process uses both, whatever the limit
    assert merged_names(cache) == kept
    (cache / "a file").touch()
    (cache / digests[3] / "deleted").mkdir()  # of a process that was killed
    while in_use:
        os.close(in_use.pop())
    delete_unused(cache, 1)
    assert merged_names(cache) == {digests[1]}
    assert [path.name for path in (cache / digests[3]).iterdir()] == ["lock"]


def test_another_process_does_not_delete_a_checkpoint_in_use(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_folder_module, "merged_root", lambda: tmp_path / "cache")
    folder = merged_folder(base, write_lora(tmp_path / "adapter", base), 1)
    delete_in_another_process(tmp_path / "cache")
    assert (folder / "config.json").exists()
    os.close(merged_folder_module._in_use.pop())
    delete_in_another_process(tmp_path / "cache")
    assert not folder.exists()


def delete_in_another_process(cache: Path) -> None:
    """Deletes in a copy of this process, which works with files only, what nobody uses."""
    pid = os.fork()
    if not pid:
        try:
            delete_unused(cache, 0)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
