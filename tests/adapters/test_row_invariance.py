"""The tokens and log probabilities of a request with an adapter are its own, whatever runs beside
it, however its prompt is cut, after a preemption, and with cached pages. No page is shared between
adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_kernels.kernel_choice import KernelsName
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.offline.llm import LLM
from tests.support.adapters.adapter_folders import write_esft, write_lora
from tests.support.adapters.answers import adapters_of, content
from tests.support.kernels.kernel_sets import KERNEL_SETS

PARAMS = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=2)
LONGER = replace(PARAMS, max_tokens=30)
NAMES = [None, "lora", "esft", "other"]


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("both")
    return adapters_of(
        lora=write_lora(root / "lora", base),
        other=write_lora(root / "other", base, seed=7, rank=2),
        esft=write_esft(root / "esft", base, {0: [0, 1, 2], 1: [3]}),
    )


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(1, 300, int(n)).tolist() for n in rng.integers(1, 60, 12)]


def run(
    llm: LLM,
    which: Sequence[int],
    names: Sequence[str | None],
    params: SamplingParams = PARAMS,
) -> list[object]:
    chosen, all_prompts = [names[i] for i in which], prompts()
    outputs = llm.generate(
        [all_prompts[i] for i in which], params, adapter=chosen, use_progress_bar=False
    )
    return content(outputs)


def names_of(count: int) -> list[str | None]:
    return [NAMES[i % len(NAMES)] for i in range(count)]


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_and_together(
    base: Path, adapters: dict[str, str], kernels: KernelsName, dtype: Any
) -> None:
    settings: dict[str, Any] = {"kernels": kernels, "dtype": dtype, "prefix_cache": False}
    names = names_of(12)
    with LLM(str(base), adapters=adapters, **settings) as llm:
        together = run(llm, range(12), names)
        for index in (1, 2, 3, 4):
            assert run(llm, [index], names) == [together[index]], f"{names[index]}, {index=}"
    with LLM(str(base), **settings) as llm:
        plain = run(llm, range(0, 12, 4), [None] * 12)
    assert plain == together[::4]  # rows without an adapter: those of a server without adapters


def test_cut_preempted_and_warm(base: Path, adapters: dict[str, str]) -> None:
    names = names_of(12)
    settings: dict[str, Any] = {"dtype": "bfloat16", "adapters": adapters}
    with LLM(str(base), **settings) as llm:
        wanted = run(llm, range(12), names, LONGER)
        assert run(llm, range(12), names, LONGER) == wanted  # warm
    few: dict[str, Any] = {"max_model_len": 96, "num_pages": 14, "max_batched_tokens": 16}
    with LLM(str(base), **few, **settings) as llm:
        assert run(llm, range(12), names, LONGER) == wanted
        assert llm.stats().counts.num_preemptions > 0
    with LLM(str(base), speculation="suffix", **settings) as llm:
        assert run(llm, range(12), names, LONGER) == wanted
        assert run(llm, range(12), names, LONGER) == wanted


def test_no_page_is_shared_between_adapters(base: Path, adapters: dict[str, str]) -> None:
    prompt = list(range(1, 65))
    with LLM(str(base), adapters=adapters) as llm:
        for name in NAMES:
            for hits in (0, 48):
                (output,) = llm.generate([prompt], PARAMS, adapter=name, use_progress_bar=False)
                assert (output.num_cached_tokens >= 48) == (hits == 48), f"{name}: {output}"
