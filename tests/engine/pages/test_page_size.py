"""The page size changes no token, with shared pages, recomputed pages, and pages on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_kernels.kernel_choice import KernelsName, native_refusal
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.keys import check_engine_config
from moe_serve.config.sections import CacheConfig, EngineConfig, PageSize
from moe_serve.engine.build import build_engine
from moe_serve.errors import ConfigError
from tests.support.cluster.layouts import Answer, config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.engine.fake_engine import make_engine, request, run, tokens
from tests.support.engine.fake_runner import FakeRunner, continuation
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.sampled_cases import EVERY_CASE

NUM_TOKENS = 256  # in the cache of the fake model, whatever its pages
NATIVE_REFUSAL = native_refusal(torch.device("cpu"), torch.float32)
needs_native = pytest.mark.skipif(NATIVE_REFUSAL is not None, reason=str(NATIVE_REFUSAL))


@pytest.mark.parametrize("page_size", [1, 8, 16, 32])
def test_sharing_and_preemption_by_pages_of_any_size(page_size: int) -> None:
    runner = FakeRunner(page_size)
    engine = make_engine(runner, num_pages=NUM_TOKENS // page_size, budget=40)
    prompts = {f"r{i}": [9] * (30 + 4 * (i % 3)) + [1 + i] * (3 + i) for i in range(10)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=50))
    result = run(engine)
    for name, prompt in prompts.items():
        assert tokens(result[name]) == continuation(prompt, 50), name
    stats = engine.stats()
    assert stats.counts.num_preemptions > 0 and stats.counts.num_hit_tokens > 0
    longest = max(len(piece.page_table) for plan in runner.plans for piece in plan.slices)
    most_tokens = max(map(len, prompts.values())) + 50 - 1  # the last one is not computed
    assert longest == -(-most_tokens // page_size), "as many pages as its tokens fill"


def of_size(of: EngineConfig, page_size: PageSize) -> EngineConfig:
    """Returns a configuration with few pages, so that sequences are preempted; one may fill the
    cache."""
    model = replace(of.model, max_model_len=128)
    cache = replace(of.cache, page_size=page_size, num_pages=512 // page_size)
    return replace(of, model=model, cache=cache)


def answers(of: EngineConfig) -> dict[str, Answer]:
    """Returns the answers to requests, and to a prompt whose pages are in the cache."""
    engine, wanted = build_engine(of).engine, requests(9, 300, num_tokens=7)
    found = serve(engine, wanted)
    return found | serve(engine, [replace(wanted[-1], request_id="again")])


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_logprobs_of_a_model(tiny: str, kernels: KernelsName, dtype: str) -> None:
    of = config(0, 0, 2, folder=Path(tiny), dtype=dtype, kernels=kernels)
    expected = answers(of_size(of, 16))
    sizes: tuple[PageSize, ...] = (8, 128) if kernels == "torch" else (32, 128)
    if EVERY_CASE and kernels == "torch":
        sizes = (8, 32, 128)
    for page_size in sizes:
        assert answers(of_size(of, page_size)) == expected, f"{page_size=}"


@pytest.mark.parametrize(
    ("attention", "experts", "cluster"),
    [
        (1, 2, {}),
        (2, 1, {"router": "experts"}),
        pytest.param(1, 1, {"attention_tp": 2}, marks=needs_native),
    ],
    ids=str,
)
def test_tokens_on_ranks(tiny: str, attention: int, experts: int, cluster: dict[str, Any]) -> None:
    wanted = requests(6, 300)
    alone = config(0, 0, 2, folder=Path(tiny))
    expected = serve(build_engine(of_size(alone, 16)).engine, wanted)
    of = of_size(config(attention, experts, 2, folder=Path(tiny), **cluster), 32)
    built = build_cluster(of, make_starter=ThreadStarter)
    try:
        assert built.layout.page_size == 32
        assert serve(built.engine, wanted) == expected
    finally:
        built.engine.close()


@needs_native
def test_native_kernels_refuse_short_pages(tiny: str) -> None:
    sentence = (
        r"^cache.page_size is 8, but the kernels \(native C\+\+ .*\) read pages of at least 16 "
        r"tokens: set it to 16 or more, or set model.kernels to 'torch'\.$"
    )
    with pytest.raises(ConfigError, match=sentence):
        build_engine(of_size(config(0, 0, folder=Path(tiny), kernels="native"), 8))
    of = of_size(config(1, 1, folder=Path(tiny), kernels="native"), 8)
    with pytest.raises(ConfigError, match=r"attention-0 cannot serve: cache\.page_size is 8"):
        build_cluster(of, make_starter=ThreadStarter)


def test_other_sizes_are_refused() -> None:
    of = EngineConfig(cache=CacheConfig(page_size=12))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"page_size cannot be 12 .* one of 8, 16, 32, 64, 128"):
        check_engine_config(of)
