"""Attention ranks of several processes: the same tokens as one process, and their end together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_serve.cluster.build import build_cluster
from moe_serve.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
)
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request import GenerationRequest
from moe_serve.engine.sampling_params import SamplingParams
from thread_starter import ThreadStarter

Tokens = dict[str, list[tuple[int, float]]]


def config_of(folder: Path | None, cluster: ClusterConfig, m: int = 1) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=None if folder is None else str(folder), num_threads=1),
        cache=CacheConfig(num_pages=64),
        scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=48),
        pipeline=PipelineConfig(micro_batches=m),
        cluster=cluster,
    )


def cluster_of(ranks: str, tp: int) -> ClusterConfig:
    """`2A1E`."""
    return ClusterConfig(
        attention_ranks=int(ranks[0]),
        expert_ranks=int(ranks[2]),
        attention_tp=tp,
        heartbeat_s=5.0,
        timeout_s=20.0,
        start_timeout_s=60.0,
    )


@contextmanager
def started(config: EngineConfig) -> Iterator[tuple[BuiltEngine, ThreadStarter]]:
    starters: list[ThreadStarter] = []

    def make(*arguments: object) -> ThreadStarter:
        starters.append(ThreadStarter(*arguments))  # type: ignore[arg-type]
        return starters[-1]

    built = build_cluster(config, make_starter=make)
    try:
        yield built, starters[0]
    finally:
        built.engine.close()


def requests(num: int = 5) -> list[GenerationRequest]:
    """Of odd lengths, two of them sampled."""
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple((7 * i + j * (i + 3)) % 250 + 1 for j in range(11 * i + 1)),
            params=SamplingParams(
                max_tokens=9 + i,
                temperature=0.8 if i % 2 else 0.0,
                seed=i,
                ignore_eos=True,
                logprobs=1,
            ),
        )
        for i in range(num)
    ]


def run(engine: DrivenEngine, num: int = 5) -> Tokens:
    for request in requests(num):
        engine.add(request)
    found: Tokens = {}
    while engine.has_work and sum(map(len, found.values())) < sum(9 + i for i in range(num)):
        for delta in engine.step():
            assert delta.error is None, f"{delta.request_id}: {delta.error}"
            assert delta.logprobs is not None, "asked for"
            pairs = zip(delta.token_ids, delta.logprobs, strict=True)
            found.setdefault(delta.request_id, []).extend((t, p.logprob) for t, p in pairs)
    engine.check_integrity()
    return found


@pytest.fixture(scope="module")
def expected() -> Tokens:
    return run(build_engine(config_of(None, ClusterConfig())).engine)


@pytest.mark.parametrize(("ranks", "tp", "m"), [("1A1E", 2, 1), ("1A2E", 2, 2), ("2A2E", 2, 2)])
def test_the_tokens_do_not_change(expected: Tokens, ranks: str, tp: int, m: int) -> None:
    with started(config_of(None, cluster_of(ranks, tp), m)) as (built, _):
        assert run(built.engine) == expected, f"{ranks}, {tp} shards, {m} micro-batches"
