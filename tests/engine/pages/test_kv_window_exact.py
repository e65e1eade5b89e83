"""Answers that forget the middle of their context have the same bits in every batch, and equal
those of a dense model with the same mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from moe_kernels.kernel_choice import KernelsName
from moe_serve.config.sections import KVDtypeName
from moe_serve.engine.request.kv_window import KVWindow
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import InvalidRequestError
from moe_serve.offline.llm import LLM
from moe_serve.offline.outputs import RequestOutput
from tests.support.engine.windows import seen
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.sampled_cases import EVERY_CASE

WINDOW = KVWindow(window=24, sinks=4)
NUM_TOKENS = 44


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns requests with windows of several sizes, and one without a window."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 300, n).tolist() for n in (15, 33, 70, 90)]
    windows = [WINDOW, None, KVWindow(window=33, sinks=20), KVWindow(window=27, sinks=0)]
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=float(index == 2),
            seed=index,
            ignore_eos=True,
            logprobs=1,
            kv_window=window,
        )
        for index, window in enumerate(windows)
    ]
    return prompts, params


def content(output: RequestOutput) -> tuple[object, object]:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize(
    ("variant", "kv_dtype"), [("qwen3_moe", "auto"), ("mixtral-window", "auto"), ("olmoe", "int8")]
)
def test_company_chunks_and_preemptions_change_no_bit(
    checkpoints: dict[str, Path], kernels: KernelsName, variant: str, kv_dtype: KVDtypeName
) -> None:
    folder, (prompts, params) = str(checkpoints[variant]), prompts_and_params()
    with LLM(folder, kernels=kernels, kv_dtype=kv_dtype) as llm:
        together = llm.generate(prompts, params, use_progress_bar=False)
        for index in range(4) if EVERY_CASE else (0, 2):
            (alone,) = llm.generate([prompts[index]], params[index], use_progress_bar=False)
            assert content(alone) == content(together[index]), f"{index=}"
        free = replace(params[3], kv_window=None, max_tokens=20)
        (whole,) = llm.generate([prompts[3]], free, use_progress_bar=False)
    beginning = together[3].outputs[0].token_ids[:20], (together[3].outputs[0].logprobs or [])[:20]
    if variant == "mixtral-window":  # no layer looks farther back than the window
        assert whole.outputs[0].token_ids == beginning[0]
    else:
        assert content(whole) != beginning, "the window had no effect"
    assert [output.num_dropped_tokens for output in together] == [16, 0, 48, 96]
    with LLM(
        folder, kernels=kernels, kv_dtype=kv_dtype, num_pages=11, max_model_len=160,
        max_batched_tokens=23,
    ) as llm:  # fmt: skip
        short = llm.generate(prompts, params, use_progress_bar=False)
        assert llm.stats().counts.num_preemptions > 0, "the pool was meant to be too small"
    assert [content(output) for output in short] == [content(output) for output in together]


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_a_dense_model_with_the_same_mask_says_the_same(
    checkpoints: dict[str, Path], kernels: KernelsName
) -> None:
    folder, (prompts, params) = checkpoints["qwen3_moe"], prompts_and_params()
    prompt, length = prompts[2], len(prompts[2]) + NUM_TOKENS
    own = replace(params[2], kv_window=WINDOW, temperature=0.0)
    with LLM(str(folder), kernels=kernels, dtype="float32") as llm:
        (output,) = llm.generate([prompt], own, use_progress_bar=False)
    answer = output.outputs[0]
    mask = torch.full((length, length), torch.finfo(torch.float32).min)
    for position in range(length):
        mask[position, seen(position, len(prompt), WINDOW)] = 0.0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        dense, full = (
            model(ids, attention_mask=each).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            for each in (mask[None, None], None)
        )
    assert answer.logprobs is not None
    found = torch.tensor(
        [entry[t].logprob for entry, t in zip(answer.logprobs, answer.token_ids, strict=True)]
    )
    chosen = torch.tensor(answer.token_ids)[:, None]
    error = (found - dense.gather(1, chosen)[:, 0]).abs().max().item()
    assert error < 1e-3, f"{error=:.2e}"
    assert (found - full.gather(1, chosen)[:, 0]).abs().max() > 0.1, "the mask had no effect"


def test_a_window_below_the_models_own_is_refused(checkpoints: dict[str, Path]) -> None:
    with LLM(str(checkpoints["mixtral-window"])) as llm:
        for window, why in ((23, "the model's own window .24 tokens."), (2**31, "integer in")):
            with pytest.raises(InvalidRequestError, match=why):
                params = SamplingParams(kv_window=KVWindow(window=window))
                llm.generate([[1, 2]], params, use_progress_bar=False)
