"""An adapter that PEFT writes gives PEFT's own log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moe_serve.offline.llm import LLM
from moe_serve.offline.outputs import RequestOutput
from tests.support.adapters.answers import PROMPTS, adapters_of, answers, logprobs_of
from tests.support.families import quantised_models as tiny
from tests.support.families.all_cases import CASES
from tests.support.families.case import Case
from tests.support.families.parity import write_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of peft and transformers
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
]
CLOSE = 1e-4  # of log probabilities, in fp32
MLPS = ["gate_proj", "up_proj", "down_proj"]  # PEFT turns those of experts into FUSED
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_proj", "kv_a_proj_with_mqa", "o_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, attention": (
        "qwen3_moe-dense-layers",
        {"target_modules": ATTENTION, "use_rslora": True},
    ),
    "qwen3, fused experts": ("qwen3_moe-dense-layers", {"target_parameters": FUSED}),
    "qwen3, all mlps": ("qwen3_moe-dense-layers", {"target_modules": MLPS}),
    "qwen2, all mlps": ("qwen2_moe", {"target_modules": MLPS}),
    "gpt-oss, attention": ("gpt_oss", {"target_modules": ATTENTION}),
    "gpt-oss, fused experts": ("gpt_oss", {"target_parameters": FUSED}),
    "deepseek, latent attention": ("deepseek_v2-lite", {"target_modules": LATENT}),
    "deepseek, fused experts": ("deepseek_v2-lite", {"target_parameters": FUSED}),
    "mixtral, both": ("mixtral", {"target_modules": ATTENTION, "target_parameters": FUSED}),
    "qwen2, both": ("qwen2_moe", {"target_modules": ATTENTION, "target_parameters": FUSED}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities(kind: str, tmp_path: Path) -> None:
    family, config = KINDS[kind]
    base = write_checkpoint(tmp_path / "base", mixtral() if family == "mixtral" else CASES[family])
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    import peft  # takes seconds, which every process that collects the tests would need

    lora = peft.LoraConfig(r=4, lora_alpha=6, **{"target_modules": [], **config})
    adapted = peft.get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(tmp_path / "lora")
    with LLM(str(base), dtype="float32", adapters=adapters_of(own=tmp_path / "lora")) as llm:
        own, without = answers(llm, "own"), answers(llm)
    found = logprobs(own)
    assert (found - logprobs(without)).abs().max() > 0.1
    assert (found - theirs(adapted)).abs().max() < CLOSE
    merged = adapted.merge_and_unload()
    assert (found - theirs(merged)).abs().max() < CLOSE


def mixtral() -> Case:
    """Returns a model whose fused matrices are not square: PEFT's layouts can be told apart."""
    case = tiny.mixtral()
    case.config.intermediate_size = 96
    return case


def logprobs(outputs: Sequence[RequestOutput]) -> torch.Tensor:
    """Returns the log probabilities of all prompts' tokens but the first."""
    return torch.tensor([each for output in outputs for each in logprobs_of(output)])


@torch.inference_mode()
def theirs(model: Any) -> torch.Tensor:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        rows = model(ids).logits[0, :-1].log_softmax(-1)
        found.append(rows.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)
