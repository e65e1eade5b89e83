"""With cached prefixes, tokens and log probabilities are the same bit for bit as without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from moe_kernels.kernel_choice import KernelsName
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.offline.llm import LLM
from moe_serve.offline.outputs import RequestOutput
from tests.support.engine.fake_runner import PAGE_SIZE
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.sampled_cases import EVERY_CASE

Dtype = Literal["float32", "bfloat16"]
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=2)
SHORT = GREEDY if EVERY_CASE else replace(GREEDY, max_tokens=4)

both = pytest.mark.parametrize("kernels", KERNEL_SETS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def prompt_of(length: int, seed: int = 5) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(1, 298, length).tolist()
    return tokens


def content(output: RequestOutput) -> list[tuple[object, object]]:
    return [(answer.token_ids, answer.logprobs) for answer in output.outputs]


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_progress_bar=False)


@pytest.mark.sampled
@both
@dtypes
def test_every_length(tiny: str, kernels: KernelsName, dtype: Dtype) -> None:
    """Every length modulo 16 is served warm from a longer prompt, then from its own pages."""
    prompts = [prompt_of(80)[:length] for length in range(31, 31 + 17)]
    with LLM(tiny, kernels=kernels, dtype=dtype, prefix_cache=False) as llm:
        cold = generate(llm, prompts, SHORT)
    with LLM(tiny, kernels=kernels, dtype=dtype) as llm:
        generate(llm, [prompt_of(80)], SHORT)
        for stride in (1, 1 if EVERY_CASE else 2):
            for prompt, expected in zip(prompts[::stride], cold[::stride], strict=True):
                (warm,) = generate(llm, [prompt], SHORT)
                most, rest = len(prompt) - 1, (len(prompt) - 1) % PAGE_SIZE
                where = f"{dtype=}, {len(prompt)=}"
                assert warm.num_cached_tokens == (most if rest >= 2 else most - rest), where
                assert content(warm) == content(expected), where


@pytest.mark.sampled
@both
@dtypes
def test_prefixes_that_part_inside_a_page(tiny: str, kernels: KernelsName, dtype: Dtype) -> None:
    """Prefixes differ at every token of the third page; the rest of the copied page is another
    request's."""
    stem = prompt_of(48)
    prompts = [[*stem[: 32 + count], *prompt_of(9, count)] for count in range(17)]
    with LLM(tiny, kernels=kernels, dtype=dtype, prefix_cache=False) as llm:
        cold = generate(llm, prompts, SHORT)
    with LLM(tiny, kernels=kernels, dtype=dtype) as llm:
        generate(llm, [stem], SHORT)
        warm = [generate(llm, [prompt], SHORT)[0] for prompt in prompts]
        again = generate(llm, prompts, SHORT)
    for count, (output, expected) in enumerate(zip(warm, cold, strict=True)):
        # The latest pages are compared: the one before has all but the last token in common.
        assert output.num_cached_tokens >= 32 + (count - 1 if count >= 3 else 0), f"{count=}"
        assert content(output) == content(expected), f"{dtype=}, {count=}"
        assert content(again[count]) == content(expected), f"{dtype=}, {count=}, together"


@pytest.mark.sampled
@both
@dtypes
def test_choices_and_turns(tiny: str, kernels: KernelsName, dtype: Dtype) -> None:
    params = SamplingParams(
        max_tokens=18, temperature=1.0, seed=3, n=4, ignore_eos=True, logprobs=1
    )
    turns: list[list[int]] = [prompt_of(43)]
    outputs = []
    with LLM(tiny, kernels=kernels, dtype=dtype) as llm:
        for turn in range(3):
            (output,) = generate(llm, [turns[-1]], params)
            outputs.append(output)
            answer = output.outputs[turn].token_ids
            turns.append([*turns[-1], *answer, *prompt_of(5, turn)])
        cached = [output.num_cached_tokens for output in outputs]
    assert cached[0] == 0
    for turn in (1, 2):  # what the turn before computed, but for a single token in a page
        assert cached[turn] >= len(turns[turn - 1]) + 17 - 1, f"{turn=}, {cached=}"
    with LLM(tiny, kernels=kernels, dtype=dtype, prefix_cache=False) as llm:
        for prompt, output in zip(turns, outputs, strict=False):
            (expected,) = generate(llm, [prompt], params)
            assert content(output) == content(expected), f"{dtype=}, {len(prompt)=}"
            assert expected.num_cached_tokens == 0


def families_of_prompts() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(11)
    stems = [prompt_of(70, i) for i in range(3)]
    prompts = [
        [*stems[i % 3][: int(rng.integers(1, 71))], *prompt_of(int(rng.integers(1, 20)), 50 + i)]
        for i in range(11)
    ]
    drawn = SamplingParams(max_tokens=14, temperature=1.2, seed=9, ignore_eos=True, logprobs=2)
    return prompts, [GREEDY if i % 2 else drawn for i in range(11)]


@cache
def cold_families(
    tiny: str, kernels: KernelsName, dtype: Dtype
) -> list[list[tuple[object, object]]]:
    """Returns the answers without a prefix cache, which are the same for every budget."""
    with LLM(tiny, kernels=kernels, dtype=dtype, prefix_cache=False) as llm:
        return [content(output) for output in generate(llm, *families_of_prompts())]


@pytest.mark.sampled
@both
@dtypes
@pytest.mark.parametrize(
    ("budget", "micro_batches", "num_pages"), [(9, 1, 14), (64, 2, 24), (1024, 2, None)]
)
def test_families_of_prompts(
    tiny: str,
    kernels: KernelsName,
    dtype: Dtype,
    budget: int,
    micro_batches: int,
    num_pages: int | None,
) -> None:
    """Chunks, micro-batches, eviction and preemption, greedy and drawn tokens, each twice."""
    prompts, params = families_of_prompts()
    cold = cold_families(tiny, kernels, dtype)
    with LLM(
        tiny,
        kernels=kernels,
        dtype=dtype,
        max_batched_tokens=budget,
        micro_batches=micro_batches,
        num_pages=num_pages,
        max_model_len=160,
    ) as llm:
        for turn in range(2):
            for index, output in enumerate(generate(llm, prompts, params)):
                where = f"{dtype=}, {budget=}, {turn=}, {index=}"
                assert content(output) == cold[index], where
        stats = llm.stats()
    assert stats.counts.num_hit_tokens > 300, stats
    if num_pages is not None:
        assert stats.counts.num_evicted_pages > 0 and stats.counts.num_preemptions > 0, stats


def test_prompt_logprobs_are_computed(tiny: str) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, ignore_eos=True)
    with LLM(tiny) as llm:
        outputs = [generate(llm, [prompt_of(50)], params)[0] for _ in range(2)]
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs is not None
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


def test_a_salt_shares_with_itself_only(tiny: str) -> None:
    with LLM(tiny) as llm:
        for salt, num_cached in (("", 0), ("a", 0), ("b", 0), ("a", 51), ("", 51)):
            (output,) = llm.generate(
                [prompt_of(52)], GREEDY, cache_salt=salt, use_progress_bar=False
            )
            assert output.num_cached_tokens == num_cached, salt


POISON = 299
BAD = [*prompt_of(40), POISON, *prompt_of(30, 1)]
GOOD = {f"good{i}": [*prompt_of(32), *prompt_of(20 + i, 2 + i)] for i in range(4)}


def serve(engine: Engine, requests: dict[str, list[int]]) -> dict[str, list[TokenDelta]]:
    """Serves greedy requests that arrive together and returns their deltas."""
    for name, prompt in requests.items():
        ids = tuple(prompt)
        engine.add(GenerationRequest(request_id=name, prompt_token_ids=ids, params=GREEDY))
    result: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step():
            result.setdefault(delta.request_id, []).append(delta)
        engine.check_integrity()
    return result


def poisoned(llm: LLM) -> tuple[Engine, Callable[[], None]]:
    """Yields an engine whose token 299 is embedded as NaN, and a call that makes it a number
    again."""
    runner: Any = llm._engine._executor.runner
    row = runner._stage._base._embedding[POISON]
    saved = row.clone()
    row.fill_(float("nan"))
    return llm._engine, lambda: row.copy_(saved)


@cache
def cold_beside_the_bad_one(
    tiny: str, kernels: KernelsName, dtype: Dtype
) -> dict[str, list[tuple[object, object]]]:
    with LLM(tiny, kernels=kernels, dtype=dtype, prefix_cache=False) as llm:
        return {n: tokens_of(d) for n, d in serve(llm._engine, GOOD | {"bad": BAD}).items()}


@pytest.mark.sampled
@both
@dtypes
@pytest.mark.parametrize("budget", [1024, 24])
def test_nan_stays_with_its_request(
    tiny: str, kernels: KernelsName, dtype: Dtype, budget: int
) -> None:
    cold = cold_beside_the_bad_one(tiny, kernels, dtype)
    with LLM(tiny, kernels=kernels, dtype=dtype, max_batched_tokens=budget) as llm:
        engine, heal = poisoned(llm)
        for _ in range(2):  # beside the bad one, then on the pages that it left
            result = serve(engine, {"bad": BAD} | GOOD)
            assert result["bad"][-1].finish_reason is FinishReason.ERROR
            for name in GOOD:
                assert tokens_of(result[name]) == cold[name], f"{dtype=}, {name}"
        assert_cache_is_finite(engine)
        heal()
        (healed,) = serve(engine, {"bad": BAD}).values()
        assert healed[0].num_cached_tokens <= 34, "no page of it was kept: 32 are the others'"
        assert tokens_of(healed) == cold["bad"]


def test_nan_out_of_the_windows_sight_does_not_enter(checkpoints: dict[str, Path]) -> None:
    """Three layers with a window of 24 (and kernels that read keys in blocks of 64 or 128) reach
    back less than 395 tokens: token 5 of 400 leaves no trace in the logits, only in its pages."""
    prompt = prompt_of(400)
    prompt[5] = POISON
    others = {f"other{i}": prompt_of(150, i) for i in range(3)}
    with LLM(str(checkpoints["mixtral-window"]), num_pages=40) as llm:
        cold = serve(llm._engine, others)
    with LLM(str(checkpoints["mixtral-window"]), num_pages=40) as llm:
        engine, _ = poisoned(llm)
        (deltas,) = serve(engine, {"bad": prompt}).values()
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert engine.stats().load.num_cached_pages == 0
        assert {n: tokens_of(d) for n, d in serve(engine, others).items()} == {
            n: tokens_of(d) for n, d in cold.items()
        }
        assert_cache_is_finite(engine)


def tokens_of(deltas: list[TokenDelta]) -> list[tuple[object, object]]:
    """Returns each token with its log probabilities, in whatever runs they came."""
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [each for delta in deltas for each in delta.logprobs or ()]
    return list(zip(tokens, logprobs, strict=True))


def assert_cache_is_finite(engine: Engine) -> None:
    runner: Any = engine._executor.runner
    pages = list(engine._scheduler.cache.tree)
    assert pages, "something was cached"
    for layer in runner._cache.layers:
        assert torch.isfinite(layer.keys[pages]).all() and torch.isfinite(layer.values[pages]).all()
