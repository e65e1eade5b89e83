"""An ESFT has every bit of the checkpoint that contains its experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_kernels.kernel_choice import KernelsName
from moe_serve.offline.llm import LLM
from tests.support.adapters.adapter_folders import write_esft, write_merged
from tests.support.adapters.answers import (
    GREEDY,
    PROMPTS,
    adapters_of,
    answers,
    answers_of,
    content,
)
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint
from tests.support.kernels.kernel_sets import KERNEL_SETS

EXPERTS = {0: [1, 3], 2: [0]}


def check_bits(
    base: Path, tmp_path: Path, experts: Mapping[int, list[int]] = EXPERTS, **model: Any
) -> None:
    adapter = write_esft(tmp_path / "esft", base, experts)
    with LLM(str(base), adapters=adapters_of(own=adapter), **model) as llm:
        own, without = content(answers(llm, "own")), content(answers(llm))
    model.pop("expert_memory_bytes", None)
    merged = write_merged(tmp_path / "merged", base, adapter)
    assert own == content(answers_of(merged, **model))
    assert own != without
    assert without == content(answers_of(base, **model))


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_the_merged_checkpoint(
    base: Path, kernels: KernelsName, dtype: str, tmp_path: Path
) -> None:
    check_bits(base, tmp_path, kernels=kernels, dtype=dtype)


def test_bits_of_a_step_in_one_call(tmp_path: Path) -> None:
    """All layers of Qwen3-MoE are one native call, with adapters too."""
    base = write_checkpoint(tmp_path / "base", CASES["qwen3_moe-dense-layers"])
    check_bits(base, tmp_path, {1: [0, 3]}, dtype="bfloat16")


def test_bits_with_an_expert_memory(base: Path, tmp_path: Path) -> None:
    check_bits(base, tmp_path, dtype="float32", expert_memory_bytes=200_000)


def test_a_prompt_of_each_adapter_in_one_batch(base: Path, tmp_path: Path) -> None:
    folders = {f"a{i}": write_esft(tmp_path / str(i), base, EXPERTS, seed=i) for i in range(4)}
    with LLM(str(base), dtype="bfloat16", adapters=adapters_of(**folders)) as llm:
        alone = {name: content(answers(llm, name, PROMPTS[:1])) for name in folders}
        names = [None, *folders, None]
        both = llm.generate([PROMPTS[0]] * 6, GREEDY, adapter=names, use_progress_bar=False)
        base_alone = content(answers(llm, None, PROMPTS[:1]))
    found = [content([each]) for each in both]
    assert found == [base_alone, *alone.values(), base_alone]
    assert len({str(each) for each in found}) == 5


def test_latent_attention_with_an_esft(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", CASES["deepseek_v2-lite"])
    adapter = write_esft(tmp_path / "esft", base, {1: [0, 5], 2: [1]})
    with LLM(str(base), dtype="float32", adapters=adapters_of(own=adapter)) as llm:
        own = content(answers(llm, "own"))
    merged = write_merged(tmp_path / "merged", base, adapter)
    assert own == content(answers_of(merged, dtype="float32"))
