"""Attention ranks of several processes: the same tokens as one process, and one common end."""

from __future__ import annotations

import contextlib
import itertools
import signal
from functools import cache
from pathlib import Path

import psutil
import pytest

from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.keys import check_engine_config
from moe_serve.config.sections import ClusterConfig, EngineConfig, PipelineConfig
from moe_serve.engine.request.request import TokenDelta
from moe_serve.errors import ConfigError
from tests.support.cluster.layouts import Answer, colocated, config, on_ranks, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint

VOCAB_SIZE = 4096  # of the demonstration model
NUM_REQUESTS, NUM_TOKENS = 5, 5


@cache
def expected() -> dict[str, Answer]:
    return colocated(config(0, 0), requests(NUM_REQUESTS, VOCAB_SIZE, NUM_TOKENS))


@pytest.mark.sampled
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("attention", "experts"), [(1, 1), (2, 2)])
def test_the_tokens_do_not_change(
    attention: int, experts: int, count: int, micro_batches: int
) -> None:
    of = config(attention, experts, micro_batches, attention_tp=count)
    answers = on_ranks(of, requests(NUM_REQUESTS, VOCAB_SIZE, NUM_TOKENS))
    assert answers == expected(), f"{attention}A{experts}E, {count} shards, m = {micro_batches}"


def test_experts_may_choose() -> None:
    of = config(1, 2, 2, attention_tp=2, router="experts")
    assert on_ranks(of, requests(NUM_REQUESTS, VOCAB_SIZE, NUM_TOKENS)) == expected()


@pytest.mark.parametrize(
    ("name", "attention", "experts", "count", "micro_batches"),
    [
        ("gpt_oss", 1, 1, 2, 2),  # sinks and windows
        ("gpt_oss", 2, 2, 4, 1),  # two key heads on four shards
        ("deepseek_v3-groups", 2, 2, 2, 2),  # latents, shared experts
        ("deepseek_v2-lite", 1, 1, 4, 1),  # a dense layer first
        ("qwen3_moe-dense-layers", 2, 1, 2, 2),
        ("minimax_m2", 1, 2, 2, 1),  # norms over all heads
    ],
)
def test_families(
    tmp_path: Path, name: str, attention: int, experts: int, count: int, micro_batches: int
) -> None:
    folder = write_checkpoint(tmp_path / name, CASES[name])
    of = config(attention, experts, micro_batches, folder=folder, attention_tp=count)
    wanted = requests(NUM_REQUESTS, 300, NUM_TOKENS)
    assert on_ranks(of, wanted) == colocated(of, wanted)


def test_an_expert_rank_that_is_lost_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards leave the step with their leader, and repeat it with it."""
    of = config(1, 2, 2, attention_tp=2)
    starters: list[ThreadStarter] = []

    def make(host: str, port: int, secret: ClusterSecret, num_threads: int) -> ThreadStarter:
        starters.append(ThreadStarter(host, port, secret, num_threads))
        return starters[-1]

    engine = build_cluster(of, make_starter=make).engine
    num_steps = itertools.count()

    step = engine.step

    def disturbed() -> list[TokenDelta]:
        if next(num_steps) in (3, 8):
            starters[0].kill(RankName("expert", 1))
        return step()

    monkeypatch.setattr(engine, "step", disturbed)
    try:
        answers = serve(engine, requests(NUM_REQUESTS, VOCAB_SIZE, NUM_TOKENS))
    finally:
        engine.close()
    assert answers == expected()


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_tp \(3\) does not divide the model's \d+ q"):
        build_cluster(config(1, 1, attention_tp=3), make_starter=ThreadStarter)


def test_kernels_that_sum_by_shape_are_refused() -> None:
    why = (
        r"attention-0 cannot serve: cluster\.attention_tp is 2, which needs the native .*"
        "kernels here are torch"
    )
    with pytest.raises(ConfigError, match=why):
        build_cluster(config(1, 1, kernels="torch", attention_tp=2), make_starter=ThreadStarter)


def test_without_attention_ranks_there_is_nothing_to_split() -> None:
    with pytest.raises(ConfigError, match=r"attention_tp is 2, but there are no attention ranks"):
        check_engine_config(EngineConfig(cluster=ClusterConfig(attention_tp=2)))
    with pytest.raises(ConfigError, match=r"placement is plan\.json, but one process has all exp"):
        check_engine_config(EngineConfig(cluster=ClusterConfig(placement="plan.json")))
    with pytest.raises(ConfigError, match=r"timeline is run\.json, but there are no ranks to rec"):
        check_engine_config(EngineConfig(pipeline=PipelineConfig(timeline="run.json")))


def test_processes_die_and_come_back_together() -> None:
    """A shard is killed: its rank is lost with all shards, its requests are computed again."""
    of = config(1, 1, 1, attention_tp=2)
    engine = build_cluster(of).engine
    try:
        before = _shards()
        assert len(before) == 1, f"{before}: the first shard is the rank's own process"
        for request in requests(NUM_REQUESTS, VOCAB_SIZE, NUM_TOKENS):
            engine.add(request)
        answers = {f"r{i}": Answer() for i in range(NUM_REQUESTS)}
        num_steps = 0
        while any(answer.end is None for answer in answers.values()):
            num_steps += 1
            if num_steps == 3:
                before[0].send_signal(signal.SIGKILL)
            for delta in engine.step():
                answers[delta.request_id].take(delta)
        after = _shards()
        assert len(after) == 1 and after[0].pid != before[0].pid, f"{before}, {after}"
    finally:
        engine.close()
    assert answers == expected()
    assert not _shards(), "they end with the engine"


def _shards() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    found = []
    for child in children:
        with contextlib.suppress(psutil.Error):
            if "moe_serve.cluster.ranks.attention_shard" in child.cmdline():
                found.append(child)
    return found
