"""A BitDelta adapter gives the checkpoint that it stands for, whatever runs beside it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_kernels.kernel_choice import KernelsName
from moe_serve.adapters.adapter_build import AdapterBuilder
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.adapter_part import LiveModel
from moe_serve.adapters.bitdelta import bitdelta_builder
from moe_serve.adapters.bitdelta.make import make_bitdelta
from moe_serve.cli import adapter_commands
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.model.load.loader import ModelLoader
from moe_serve.offline.llm import LLM
from tests.support.adapters.adapter_folders import EXPERTS, tensors_of, write_lora
from tests.support.adapters.answers import (
    GREEDY,
    PROMPTS,
    adapters_of,
    answers,
    answers_of,
    content,
    largest_difference,
)
from tests.support.adapters.bitdelta_folders import dense, write_fine_tune, write_merged
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.sampled_cases import EVERY_CASE

FAMILIES = [
    "qwen3_moe-dense-layers",
    "glm4_moe-qk-norm-groups",
    "qwen2_moe",
    "deepseek_v2-lite",
    "gpt_oss",
    "granitemoe-shared",
]


def made(folder: Path, base: Path, seed: int = 0, scales: str = "matrix") -> Path:
    tuned = write_fine_tune(folder / f"tuned{seed}", base, seed=seed)
    out = folder / f"bits{seed}"
    make_bitdelta(base, tuned, out, "row" if scales == "row" else "matrix")
    return out


def test_signs_and_scales_of_a_fine_tune(base: Path, tmp_path: Path) -> None:
    tuned = write_fine_tune(tmp_path / "tuned", base)
    before, after = tensors_of(base), tensors_of(tuned)
    same = "model.layers.1.mlp.experts.0.up_proj.weight"
    after[same] = before[same]
    save_file(after, tuned / "model.safetensors")
    size = make_bitdelta(base, tuned, tmp_path / "bits", "row")
    own = load_file(tmp_path / "bits" / "model.safetensors")
    assert f"{same.removesuffix('.weight')}.delta_sign" not in own
    assert torch.equal(own["model.norm.weight"], after["model.norm.weight"])
    name = "model.layers.0.self_attn.q_proj"
    delta = (after[f"{name}.weight"] - before[f"{name}.weight"]).double()
    wanted = torch.where(delta >= 0, 1.0, -1.0) * delta.abs().mean(dim=1, keepdim=True)
    found = dense(own[f"{name}.delta_sign"], own[f"{name}.delta_scale"])
    assert torch.allclose(found[:, : delta.shape[1]], wanted, atol=1e-6)
    assert size.matrix_bytes == sum(
        own[k].nbytes for k in own if k.endswith((".delta_sign", ".delta_scale"))
    )


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_log_probabilities_of_the_merged_checkpoint(
    family: str, kernels: KernelsName, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", CASES[family])
    adapter = made(tmp_path, base, scales="row" if kernels == "torch" else "matrix")
    with LLM(str(base), adapters=adapters_of(own=adapter), dtype="float32", kernels=kernels) as llm:
        own, without = answers(llm, "own"), answers(llm)
    merged = write_merged(tmp_path / "merged", base, adapter)
    assert largest_difference(own, answers_of(merged, dtype="float32", kernels=kernels)) < 1e-4
    assert largest_difference(own, without) > 1e-3
    assert content(without) == content(answers_of(base, dtype="float32", kernels=kernels))


def adapters_beside(tmp_path: Path, base: Path) -> dict[str, str]:
    """Returns two fine-tunes, and LoRAs that run beside them."""
    return adapters_of(
        one=made(tmp_path, base, 1),
        two=made(tmp_path, base, 2),
        lora=write_lora(tmp_path / "lora", base),
        experts=write_lora(tmp_path / "experts", base, seed=3, pattern=EXPERTS),
    )


NAMES = (None, "one", "lora", "two", "experts", "one")


def mixed(llm: LLM) -> list[object]:
    """Answers the same prompt with different adapters in one batch."""
    prompts = [PROMPTS[0]] * len(NAMES)
    return content(llm.generate(prompts, GREEDY, adapter=list(NAMES), use_progress_bar=False))


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_bits_do_not_depend_on_the_batch(base: Path, kernels: KernelsName, tmp_path: Path) -> None:
    adapters = adapters_beside(tmp_path, base)
    with LLM(str(base), dtype="bfloat16", kernels=kernels, adapters=adapters) as llm:
        alone = {name: content(answers(llm, name, PROMPTS[:1])) for name in dict.fromkeys(NAMES)}
        assert [[each] for each in mixed(llm)] == [alone[name] for name in NAMES]
    assert len({str(each) for each in alone.values()}) == 5
    assert alone[None] == content(answers_of(base, dtype="bfloat16", kernels=kernels))[:1]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe-dense-layers",
        "gpt_oss",
        "qwen2_moe",
        "deepseek_v2-lite",
        "deepseek_v3-groups",
        *(["mistral4"] if EVERY_CASE else []),  # has the attention of deepseek_v3
        "granitemoe-shared",
    ],
)
def test_rows_that_pass_the_layers_with_others_have_the_bits_of_a_pass_of_their_own(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_checkpoint(tmp_path / "base", CASES[family])
    adapters = adapters_of(one=made(tmp_path, base, 1), two=made(tmp_path, base, 2))
    found = []
    for is_common in (True, False):
        if not is_common:
            monkeypatch.setattr(bitdelta_builder, "prepare", lambda *_: None)
        with LLM(str(base), dtype="bfloat16", kernels="native", adapters=adapters) as llm:
            assert llm._adapters is not None
            prepared = llm._adapters.acquire("one").weights.prepared
            assert (prepared is not None) == is_common
            names = [None, "one", "two", "one"]
            prompts = [PROMPTS[0], *PROMPTS, PROMPTS[0]]
            outputs = llm.generate(prompts, GREEDY, adapter=names, use_progress_bar=False)
            found.append(content(outputs))
    assert found[0] == found[1]


Q = "model.layers.0.self_attn.q_proj"
WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scale": (lambda w: w.pop(f"{Q}.delta_scale"), "has no counterpart"),
    "another shape": (
        lambda w: w.update({f"{Q}.delta_sign": w[f"{Q}.delta_sign"][:-1]}),
        "has the shape",
    ),
    "no bits": (lambda w: w.update({f"{Q}.delta_sign": torch.zeros(4, 4)}), "must be one of U8"),
    "not finite": (
        lambda w: w.update({f"{Q}.delta_scale": torch.tensor([torch.nan])}),
        "not finite",
    ),
    "a matrix in full": (
        lambda w: w.update({f"{Q}.weight": torch.zeros(4, 4)}),
        "is a matrix in full: store its signs",
    ),
    "an unknown tensor": (
        lambda w: w.update({"model.other.weight": torch.zeros(4)}),
        "belongs to no tensor",
    ),
}


def test_files_that_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = made(tmp_path, base)
    loader = ModelLoader(base)
    live = LiveModel(attention=loader.attention_stage(64))
    builder = AdapterBuilder(loader, AdapterConfig(), live=live)
    whole = (adapter / "model.safetensors").read_bytes()
    for what, (change, message) in WRONG.items():
        weights = load_file(adapter / "model.safetensors")
        change(weights)
        save_file(weights, adapter / "model.safetensors")
        with open_unchanged(adapter) as files, pytest.raises(CheckpointError) as found:
            builder.build(files)
        assert message in str(found.value), what
        (adapter / "model.safetensors").write_bytes(whole)
    (adapter / "bitdelta_config.json").write_text(json.dumps({"format": "bitdelta", "version": 2}))
    with open_unchanged(adapter) as files, pytest.raises(CheckpointError, match="version must be"):
        builder.build(files)


def test_other_routers_are_refused_where_expert_ranks_route(base: Path, tmp_path: Path) -> None:
    adapter, loader = made(tmp_path, base), ModelLoader(base)
    live = LiveModel(is_routing=True)
    with open_unchanged(adapter) as files, pytest.raises(CheckpointError, match="cluster.router"):
        AdapterBuilder(loader, AdapterConfig(), live=live).build(files)


def test_bits_with_an_expert_memory(base: Path, tmp_path: Path) -> None:
    adapters = adapters_of(own=made(tmp_path, base))
    with LLM(str(base), adapters=adapters) as llm:
        expected = content(answers(llm, "own"))
    with LLM(str(base), adapters=adapters, expert_memory_bytes=200_000) as llm:
        assert content(answers(llm, "own")) == expected


def test_a_command_that_is_terminated_leaves_no_folder(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, out = write_fine_tune(tmp_path / "tuned", base), tmp_path / "bits"
    before = signal.getsignal(signal.SIGTERM)

    @contextmanager
    def terminated() -> Iterator[Callable[[str, float], None]]:
        def report(what: str, share: float) -> None:
            assert out.is_dir()
            os.kill(os.getpid(), signal.SIGTERM)

        yield report

    monkeypatch.setattr(adapter_commands, "progress_bar", terminated)
    with pytest.raises(KeyboardInterrupt):
        adapter_commands._run(lambda report: make_bitdelta(base, tuned, out, "matrix", report), out)
    assert not out.exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_no_adapter_is_made_of(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no difference to store"):
        make_bitdelta(base, base, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    other = write_checkpoint(tmp_path / "other", CASES["deepseek_v2-lite"])
    with pytest.raises(CheckpointError, match="is not a fine-tune of"):
        make_bitdelta(base, other, tmp_path / "none")
    (tmp_path / "there").mkdir()
    tuned = write_fine_tune(tmp_path / "tuned", base)
    with pytest.raises(ConfigError, match="exists: name a new folder"):
        make_bitdelta(base, tuned, tmp_path / "there")
