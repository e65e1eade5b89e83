"""BitDelta adapters behind the Triton set: whole tiny models beside the torch set."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from moe_kernels.gpu.signs.step_rows import GpuAdapterKernels
from moe_serve.adapters.bitdelta.make import make_bitdelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.offline.llm import LLM
from tests.support.adapters.answers import content, largest_difference
from tests.support.adapters.bitdelta_folders import write_fine_tune
from tests.support.families.case import TINY, Case
from tests.support.families.parity import write_checkpoint

SMALL = TINY | {"hidden_size": 32, "num_hidden_layers": 1}
CASES = {
    "qwen2_moe": Case(  # biases, a shared expert with a gate
        transformers.Qwen2MoeConfig(
            **SMALL,
            intermediate_size=40,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            num_experts=4,
        )
    ),
    "qwen3_moe": Case(  # norms of queries and keys
        transformers.Qwen3MoeConfig(
            **SMALL,
            head_dim=16,
            intermediate_size=40,
            moe_intermediate_size=24,
            num_experts=4,
        )
    ),
    "deepseek_v2": Case(  # latent attention, a dense layer
        transformers.DeepseekV2Config(
            **SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 4},
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            intermediate_size=40,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
        )
    ),
}
PROMPTS = [[5, 9, 2, 7], [3, 3, 8, 1]]
PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=1, logprobs=1)
NAMES = (None, "one", "two", "one")


@pytest.mark.parametrize("family", CASES)
def test_rows_of_fine_tunes_and_of_the_base_model(
    family: str, tmp_path: Path, rows_are_alike: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the bits of rows alone, and of rows that pass the attention adapter by adapter."""
    base = write_checkpoint(tmp_path / "base", CASES[family])
    adapters = {}
    for seed, name in enumerate(("one", "two"), start=1):
        tuned = write_fine_tune(tmp_path / f"tuned{seed}", base, seed=seed)
        make_bitdelta(base, tuned, tmp_path / name, "row" if seed == 1 else "matrix")
        adapters[name] = str(tmp_path / name)
    prompts, names, found = [PROMPTS[0], *PROMPTS, PROMPTS[1]], list(NAMES), {}
    for kernels in ("torch", "triton"):
        with LLM(str(base), dtype="float32", kernels=kernels, adapters=adapters) as llm:
            found[kernels] = llm.generate(prompts, PARAMS, adapter=names, use_progress_bar=False)
            alone = llm.generate(prompts[1:2], PARAMS, adapter="one", use_progress_bar=False)
    monkeypatch.setattr(GpuAdapterKernels, "adapter", lambda *_: None)
    with LLM(str(base), dtype="float32", kernels="triton", adapters=adapters) as llm:
        apart = llm.generate(prompts, PARAMS, adapter=names, use_progress_bar=False)
    assert content(apart) == content(found["triton"])
    assert largest_difference(found["triton"], found["torch"]) < 1e-4
    assert content(alone) == content(found["triton"])[1:2], "a row depends on its batch"
    assert content(found["triton"])[0] != content(found["triton"])[1]
