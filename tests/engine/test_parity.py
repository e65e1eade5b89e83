"""Logits and greedy tokens equal those of transformers, for every family, however steps are cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from moe_kernels.kernel_choice import KernelsName
from moe_serve.cache.kv_cache import KVCache
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.offline.llm import LLM
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport
from tests.support.families.parity import most_likely
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.sampled_cases import EVERY_CASE

VARIANTS = ["qwen3_moe", "qwen3_moe-biased", "mixtral", "mixtral-window", "olmoe", "olmoe-clipped"]
LENGTHS = [1, 5, 16, 17, 40, 130]
NUM_TOKENS = 64 if EVERY_CASE else 28


@cache
def reference(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def continued(folder: Path, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[int]:
    """Returns `tokens` exactly if they are what transformers continues the prompt with."""
    return most_likely(reference(folder), prompt, tokens)


def random_prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(1, 300, n).tolist() for n in lengths]


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [100, 7])
def test_logits(
    checkpoints: dict[str, Path], kernels: KernelsName, variant: str, chunk: int
) -> None:
    folder, cpu = checkpoints[variant], torch.device("cpu")
    loader = ModelLoader(folder, kernels=kernels)
    kv = KVCache(loader.spec, 9, 16, torch.float32, cpu)
    transport = LocalTransport(loader.expert_stage())
    pipeline = Pipeline(loader.attention_stage(512), transport, kv, cpu)
    (prompt,) = random_prompts([100])
    pages = (4, 9, 1, 7, 2, 8, 3)
    parts = []
    for start in range(0, 100, chunk):
        ids = np.array(prompt[start : start + chunk])
        piece = SequenceSlice(0, start, ids, pages, len(ids))
        parts.append(pipeline.run(StepPlan((MicroBatch((piece,)),))))
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([prompt])).logits[0]
    error = ((torch.cat(parts) - expected).abs().max() / expected.abs().max()).item()
    assert error < 1e-4, f"{kernels}, {variant=}, {chunk=}, {error=:.2e}"


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens(checkpoints: dict[str, Path], kernels: KernelsName, variant: str) -> None:
    folder = checkpoints[variant]
    prompts = random_prompts(LENGTHS)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # the answer that the reference has read
    # The batch of mixed lengths at once, then in chunks of 7 tokens, where the first ones tell.
    for budget, num_tokens in ((1024, NUM_TOKENS), (7, NUM_TOKENS if EVERY_CASE else 16)):
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        with LLM(str(folder), kernels=kernels, max_batched_tokens=budget) as llm:
            outputs = llm.generate(prompts, params, use_progress_bar=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            found = tuple(output.outputs[0].token_ids)
            assert len(found) == num_tokens, f"{len(found)} tokens"
            longest = known.setdefault(tuple(prompt), found)
            expected = continued(folder, tuple(prompt), longest)[:num_tokens]
            assert list(found) == expected, f"{kernels}, {variant=}, {budget=}, {len(prompt)=}"


DEMO_PROMPTS = [
    "Once upon a time",
    "It was a dark night, and",
    '"My dear Watson," said he,',
    "The whale",
    "def main():\n    ",
    "import os\n\nclass Reader:\n",
    "for i in range(",
    "# Sort the list\n",
    "static int read_line(",
    "#include <stdio.h>\n",
    "/* The table is",
    "Question: Tom has 3 apples and buys 4 more. How many apples has he?\nAnswer:",
    "Q: What is 12 + 30?\nA:",
    "The Roman Empire was",
    "Cells are the basic units of",
    "Le comte de Monte-Cristo",
    "Il y avait une fois",
    "(1) Die Bundesregierung wird",
    "### Instruction:\nName three colours.\n\n### Response:\n",
    "<|im_start|>user\nWhat is a poem?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_the_demonstration_model_says_what_transformers_says(kernels: KernelsName) -> None:
    folder = demo_model_folder()
    num_tokens = 24 if EVERY_CASE else 14
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    with LLM(dtype="float32", kernels=kernels) as llm:
        outputs = llm.generate(DEMO_PROMPTS, params, use_progress_bar=False)
        tokenizer = llm.tokenizer
        for output in outputs:
            found = list(output.outputs[0].token_ids)
            expected = continued(folder, tuple(output.prompt_token_ids), tuple(found))
            assert found == expected, f"{output.prompt=}"
            assert output.outputs[0].text == tokenizer.decode(found), f"{output.prompt=}"
