"""A LoRA gives the answers of the checkpoint that contains it, whatever module it changes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels.kernel_choice import KernelsName, native_refusal
from moe_serve.adapters.adapter_size import adapter_bytes
from moe_serve.errors import ConfigError
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.adapter_rows import AdapterRows, LayerAdditions
from moe_serve.offline.llm import LLM
from tests.support.adapters.adapter_folders import (
    ATTENTION,
    EXPERTS,
    tensors_of,
    write_lora,
    write_merged,
    write_peft,
)
from tests.support.adapters.answers import (
    GREEDY,
    PROMPTS,
    adapters_of,
    answers,
    answers_of,
    content,
    largest_difference,
)
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint
from tests.support.families.quantised_cases import CASES as QUANTISED
from tests.support.families.quantised_folder import write_pair
from tests.support.kernels.kernel_sets import KERNEL_SETS

EVERYTHING = re.compile(rf"{ATTENTION.pattern}|{EXPERTS.pattern}|.*\.mlp\.\w+_proj\.weight")
CLOSE = 1e-4  # of log probabilities, in fp32
FAMILIES = (
    "qwen2_moe",
    "deepseek_v2-lite",
    "gpt_oss",
    "llama4",
)  # biases, latents, sinks, rotation


def check_equals_merged(base: Path, adapter: Path, folder: Path, **model: Any) -> None:
    """The adapter's log probabilities are those of the merged checkpoint, and not the base's."""
    with LLM(str(base), dtype="float32", adapters=adapters_of(own=adapter), **model) as llm:
        own, without = answers(llm, "own"), answers(llm)
    own_settings = {key: value for key, value in model.items() if key != "expert_lora"}
    merged = answers_of(write_merged(folder, base, adapter), dtype="float32", **own_settings)
    assert largest_difference(own, merged) < CLOSE
    assert largest_difference(without, merged) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_on_attention(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", CASES[family])
    adapter = write_lora(tmp_path / "lora", base)
    check_equals_merged(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_on_attention_and_experts(base: Path, kernels: KernelsName, tmp_path: Path) -> None:
    both = re.compile(f"{ATTENTION.pattern}|{EXPERTS.pattern}")
    adapter = write_lora(tmp_path / "lora", base, pattern=both, rank=3)
    check_equals_merged(base, adapter, tmp_path / "merged", kernels=kernels)


@pytest.mark.parametrize("kind", ["added", "merged"])
def test_a_step_in_one_call(kind: str, tmp_path: Path) -> None:
    """All layers of Qwen3-MoE, dense ones among them, are one native call, with adapters too."""
    base = write_checkpoint(tmp_path / "base", CASES["qwen3_moe-dense-layers"])
    adapter = write_lora(tmp_path / "lora", base, pattern=EVERYTHING)
    check_equals_merged(base, adapter, tmp_path / "merged", expert_lora=kind)


@pytest.mark.skipif(
    native_refusal(torch.device("cpu"), torch.bfloat16) is not None, reason="no native kernels"
)
@pytest.mark.parametrize("family", ["deepseek_v3-groups", "granitemoe-shared", "llama4"])
def test_one_call_for_all_adapters_has_the_bits_of_one_for_each(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In families whose layers run part by part."""
    base = write_checkpoint(tmp_path / "base", CASES[family])
    adapters = adapters_of(
        one=write_lora(tmp_path / "one", base),
        two=write_lora(tmp_path / "two", base, seed=2, rank=20, pattern=EVERYTHING),
    )
    names, prompts = ["one", None, "two", "one", "two"], [*PROMPTS, *PROMPTS, PROMPTS[0]]
    of_layer, found = AdapterRows.layer, []

    def one_by_one(rows: AdapterRows, layer: int) -> LayerAdditions:
        return replace(of_layer(rows, layer), rows=None)

    for is_one_call in (True, False):
        if not is_one_call:
            monkeypatch.setattr(AdapterRows, "layer", one_by_one)
        with LLM(str(base), dtype="bfloat16", kernels="native", adapters=adapters) as llm:
            outputs = llm.generate(prompts, GREEDY, adapter=names, use_progress_bar=False)
            found.append(content(outputs))
    assert found[0] == found[1]
    assert len({str(each) for each in found[0]}) == 4  # the third and the last are the same


def test_experts_that_come_and_go(base: Path, tmp_path: Path) -> None:
    """An expert memory loads the base model's experts; what is added to them stays."""
    adapter = adapters_of(own=write_lora(tmp_path / "lora", base, pattern=EXPERTS))
    with LLM(str(base), adapters=adapter) as llm:
        wanted = content(answers(llm, "own"))
    with LLM(str(base), adapters=adapter, expert_memory_bytes=200_000) as llm:
        assert content(answers(llm, "own")) == wanted


@pytest.mark.parametrize("products", ["exact", "int8"])
def test_experts_in_few_bits(products: str, tmp_path: Path) -> None:
    """Additions need no floats: with exact products, the bits are those of a base model that
    is stored in floats."""
    packed, floats = write_pair(tmp_path, QUANTISED["DeepSeek-V2-Lite-AWQ"])
    adapter = adapters_of(own=write_lora(tmp_path / "lora", floats, pattern=EVERYTHING, size=0.1))
    few: dict[str, Any] = {"expert_weights": "auto", "low_bit_products": products}
    with LLM(str(packed), adapters=adapter, **few) as llm:
        own, without = answers(llm, "own"), answers(llm)
        alone = answers(llm, "own", PROMPTS[:1])
    assert largest_difference(own, without) > 0.01
    assert content(alone) == content(own[:1])
    if products == "exact":
        with LLM(str(floats), adapters=adapter) as llm:
            assert content(answers(llm, "own")) == content(own)


def test_a_lora_of_experts_needs_little_memory(base: Path, tmp_path: Path) -> None:
    """Sixteen of them are sixteen small matrices, and not sixteen copies of all experts, shared
    ones among them."""
    folder = write_lora(tmp_path / "lora", base, pattern=EXPERTS, rank=1)
    found, spec = {}, ModelLoader(base).spec
    for kind in ("added", "merged"):
        with LLM(str(base), adapters=adapters_of(own=folder), expert_lora=kind) as llm:
            assert llm._adapters is not None
            found[kind] = llm._adapters.stats.bytes_in_memory
        planned = adapter_bytes(folder, base, spec, 4, is_merging=kind == "merged").total
        assert planned == pytest.approx(found[kind], rel=0.05), kind
    weights = tensors_of(base)
    copied = sum(t.nbytes for name, t in weights.items() if EXPERTS.fullmatch(name))
    assert found["merged"] == copied and found["added"] < copied, f"{found}, {copied=}"


def test_ranks_and_alphas_of_single_modules(base: Path, tmp_path: Path) -> None:
    adapter = write_lora(
        tmp_path / "lora",
        base,
        lora_alpha=7,
        use_rslora=True,
        rank_pattern={"o_proj": 2, "v_proj": 6},
        alpha_pattern={"k_proj": 1.5},
    )
    check_equals_merged(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_vl_moe"])  # inputs first, outputs first
def test_on_fused_experts(family: str, is_older: bool, tmp_path: Path) -> None:
    """PEFT's layout: A has the expert slowest, B has it fastest; older versions take the other
    dimension of the tensor for the inputs."""
    base = write_checkpoint(tmp_path / "base", CASES[family])
    names = {
        k: t for k, t in tensors_of(base).items() if re.search(r"experts\.(gate_up|down)_proj$", k)
    }
    assert names, "the checkpoint has no fused experts"
    generator = torch.Generator().manual_seed(3)
    matrices: dict[str, Tensor] = {}
    changed: dict[str, Tensor] = {}
    for name, weight in names.items():
        num_experts, first, second = weight.shape
        # older: inputs are the tensor's dimension 1; newer: those that the layer multiplies
        is_first = is_older or family == "gpt_oss"
        num_inputs, num_outputs = (first, second) if is_first else (second, first)
        a = 0.3 * torch.randn(num_experts, 2, num_inputs, generator=generator)
        b = 0.3 * torch.randn(num_outputs, 2, num_experts, generator=generator)
        delta = torch.einsum("ore,eri->eio", b.double(), a.double())
        if not is_first:
            delta = delta.transpose(1, 2)
        changed[name] = weight + (0.5 * delta).to(weight.dtype)
        module, _, part = name.rpartition(".")
        nested = f"base_model.model.{module}{'.base_layer' if part == 'down_proj' else ''}"
        matrices[f"{nested}.lora_A.weight"] = a.flatten(0, 1)
        matrices[f"{nested}.lora_B.weight"] = b.flatten(1, 2)
    adapter = write_peft(tmp_path / "lora", matrices, r=2, lora_alpha=1)
    merged = write_merged(tmp_path / "merged", base, adapter, changed)
    with LLM(str(base), dtype="float32", adapters=adapters_of(own=adapter)) as llm:
        own = answers(llm, "own")
        assert largest_difference(own, answers(llm)) > 0.1
    assert largest_difference(own, answers_of(merged, dtype="float32")) < CLOSE


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_vl_moe"])  # gate and up: interleaved, apart
def test_on_stacked_experts_that_share_their_outer_matrices(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", CASES[family])
    generator = torch.Generator().manual_seed(4)
    matrices: dict[str, Tensor] = {}
    changed: dict[str, Tensor] = {}
    for name, weight in tensors_of(base).items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            continue
        weight_EIO = weight if family == "gpt_oss" else weight.transpose(1, 2)
        num_experts, num_inputs, num_outputs = weight_EIO.shape
        is_down = name.endswith("down_proj")
        a = 0.3 * torch.randn(num_experts if is_down else 1, 2, num_inputs, generator=generator)
        b = 0.3 * torch.randn(1 if is_down else num_experts, num_outputs, 2, generator=generator)
        delta_EIO = 0.5 * (b.double() @ a.double()).transpose(1, 2)
        delta = delta_EIO if family == "gpt_oss" else delta_EIO.transpose(1, 2)
        changed[name] = weight + delta.to(weight.dtype)
        matrices[f"base_model.model.{name}.lora_A.weight"] = a
        matrices[f"base_model.model.{name}.lora_B.weight"] = b
    adapter = write_peft(tmp_path / "lora", matrices, r=2, lora_alpha=1)
    merged = write_merged(tmp_path / "merged", base, adapter, changed)
    with LLM(str(base), dtype="float32", adapters=adapters_of(own=adapter)) as llm:
        own = answers(llm, "own")
        assert largest_difference(own, answers(llm)) > 0.1
    assert largest_difference(own, answers_of(merged, dtype="float32")) < CLOSE


def test_blocks_of_another_layout_are_refused(base: Path, tmp_path: Path) -> None:
    """One matrix for all experts (shared-outer) is not PEFT's layout."""
    folder = write_checkpoint(tmp_path / "base", CASES["gpt_oss"])
    weight = tensors_of(folder)["model.layers.0.mlp.experts.down_proj"]
    num_experts, num_inputs, num_outputs = weight.shape
    module = "base_model.model.model.layers.0.mlp.experts"
    matrices = {
        f"{module}.lora_A.weight": torch.ones(4, num_inputs),
        f"{module}.lora_B.weight": torch.ones(num_outputs, 4 * num_experts),
    }
    adapter = write_peft(tmp_path / "lora", matrices)
    with pytest.raises(ConfigError, match="one matrix for all experts"):
        LLM(str(folder), adapters=adapters_of(own=adapter))
    stacked = {
        f"{module}.down_proj.lora_A.weight": torch.ones(num_experts, 4, num_inputs),
        f"{module}.down_proj.lora_B.weight": torch.ones(2, num_outputs, 4),
    }
    adapter = write_peft(tmp_path / "stacked", stacked)
    with pytest.raises(ConfigError, match=rf"the rank and .* or 1 in place of {num_experts}\."):
        LLM(str(folder), adapters=adapters_of(own=adapter))
