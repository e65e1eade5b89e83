"""A request's tokens and log probabilities do not depend on its neighbours, chunks or preemptions.

The prefix cache is off, so that everything that is compared was computed. test_prefix_cache.py has
it on.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from moe_kernels.kernel_choice import KernelsName
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.offline.llm import LLM
from moe_serve.offline.outputs import RequestOutput
from tests.support.families.quantised_cases import CASES
from tests.support.families.quantised_folder import write_pair
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.sampled_cases import EVERY_CASE

Dtype = Literal["float32", "bfloat16"]
NUM_TOKENS = 9 if EVERY_CASE else 6
WHOLE_NUMBERS = {"linear_weights": "packed", "low_bit_products": "int8"}


def prompts_and_params(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and seeded requests of mixed lengths."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 300, int(n)).tolist() for n in rng.integers(1, 90, count)]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=2)
        if i % 2
        else SamplingParams(
            max_tokens=NUM_TOKENS, temperature=1.3, top_p=0.95, seed=i, ignore_eos=True, logprobs=2
        )
        for i in range(count)
    ]
    return prompts, params


def content(output: RequestOutput) -> tuple[object, object]:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


# int4 with zeros, int4 without them and latent attention, int8.
QUANTISED = (
    "Mixtral-8x7B-Instruct-v0.1-AWQ",
    "Kimi-K2-Thinking",
    "Qwen3-30B-A3B-quantized.w8a8",
)


@pytest.fixture(scope="module", params=QUANTISED)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_pair(tmp_path_factory.mktemp("quantised"), CASES[request.param])[0])


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_and_among_31_others(tiny: str, kernels: KernelsName, dtype: Dtype) -> None:
    check_company(tiny, kernels=kernels, dtype=dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_products_of_whole_numbers_among_31_others(quantised: str, kernels: KernelsName) -> None:
    check_company(quantised, kernels=kernels, dtype="bfloat16", **WHOLE_NUMBERS)


def check_company(folder: str, **model: Any) -> None:
    prompts, params = prompts_and_params(32)
    with LLM(folder, prefix_cache=False, **model) as llm:
        together = llm.generate(prompts, params, use_progress_bar=False)
        for index in (0, 1, 13, 30, 31):
            (alone,) = llm.generate([prompts[index]], [params[index]], use_progress_bar=False)
            assert content(alone) == content(together[index]), f"{model}, {index=}"


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_chunks_micro_batches_and_preemptions(
    tiny: str, kernels: KernelsName, dtype: Dtype
) -> None:
    check_cuts(tiny, kernels=kernels, dtype=dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_products_of_whole_numbers_with_any_chunks_micro_batches_and_preemptions(
    quantised: str, kernels: KernelsName
) -> None:
    check_cuts(quantised, kernels=kernels, dtype="bfloat16", **WHOLE_NUMBERS)


def check_cuts(folder: str, **model: Any) -> None:
    prompts, params = prompts_and_params(8)
    with LLM(folder, prefix_cache=False, **model) as llm:
        plain = llm.generate(prompts, params, use_progress_bar=False)
    for budget, micro_batches, pages in ((9, 1, None), (64, 3, None), (64, 2, 11)):
        with LLM(
            folder,
            max_batched_tokens=budget,
            micro_batches=micro_batches,
            num_pages=pages,
            max_model_len=160,
            prefix_cache=False,
            **model,
        ) as llm:
            # With enough pages, half of the requests tell, unless every case runs.
            count = 4 if pages is None and not EVERY_CASE else len(prompts)
            outputs = llm.generate(prompts[:count], params[:count], use_progress_bar=False)
            if pages is not None:
                assert llm.stats().counts.num_preemptions > 0, "the pool was meant to be too small"
        for index, (output, expected) in enumerate(zip(outputs, plain[:count], strict=True)):
            assert content(output) == content(expected), f"{model}, {budget=}, {index=}"


def test_a_seed_gives_its_text_whatever_else_runs(tiny: str) -> None:
    seeded = SamplingParams(max_tokens=20, temperature=1.0, seed=11, ignore_eos=True)
    unseeded = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    with LLM(tiny, prefix_cache=False) as llm:
        (alone,) = llm.generate([[5, 6, 7]], seeded, use_progress_bar=False)
        crowd = llm.generate(
            [[9, 8]] * 5 + [[5, 6, 7]] + [[1]] * 5,
            [unseeded] * 5 + [seeded] + [unseeded] * 5,
            use_progress_bar=False,
        )
        other = SamplingParams(max_tokens=20, temperature=1.0, seed=12, ignore_eos=True)
        (different,) = llm.generate([[5, 6, 7]], other, use_progress_bar=False)
    assert crowd[5].outputs[0].token_ids == alone.outputs[0].token_ids
    assert different.outputs[0].token_ids != alone.outputs[0].token_ids


def test_choices_of_one_seed_differ_and_repeat(tiny: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=4, ignore_eos=True)
    with LLM(tiny, prefix_cache=False) as llm:
        first, second = (
            [o.token_ids for o in llm.generate([[3, 4]], params, use_progress_bar=False)[0].outputs]
            for _ in range(2)
        )
    assert first == second
    assert len(set(first)) == 4
