"""Ranks that share copies of pages: the same answers, and less to compute after a loss."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import CacheConfig, ClusterConfig, EngineConfig
from moe_serve.engine.build_tiers import check_tiers
from moe_serve.errors import ConfigError
from tests.support.cluster.fault_drive import FaultDrive, fault_config, undisturbed
from tests.support.cluster.layouts import colocated, config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE = 4096  # of the demonstration model
TIER = CacheConfig(num_pages=256, memory_tier_bytes=16 * 2**20, checkpoint_after_s=0.0)


@pytest.mark.parametrize("shards", [1, 2])
def test_pages_return_that_a_small_cache_evicted(shards: int) -> None:
    made = config(1, 1, attention_tp=shards)
    model = replace(made.model, max_model_len=256)
    of = replace(made, model=model, cache=replace(TIER, num_pages=42))
    wanted = requests(9, VOCAB_SIZE)
    expected = colocated(replace(of, cache=CacheConfig(num_pages=256)), wanted)
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    try:
        assert serve(engine, wanted) == expected
        others = [replace(r, cache_salt="-") for r in requests(12, VOCAB_SIZE, num_tokens=1)]
        serve(engine, others)  # they evict the first ones' pages
        engine.check_integrity()
        assert serve(engine, wanted) == expected
        engine.check_integrity()
        tier = engine.stats().tier
    finally:
        engine.close()
    assert tier is not None and tier.hit_tokens > 0 and tier.num_pages > 0


def test_requests_of_a_killed_rank_go_on_from_the_copies() -> None:
    of = replace(fault_config(2, 1), cache=TIER)
    wanted = requests(8, VOCAB_SIZE, num_tokens=40)
    expected = undisturbed(replace(of, cache=CacheConfig(num_pages=256)), wanted)
    with FaultDrive(of) as drive:
        pid = drive.pid("attention-1")
        kill = lambda: os.kill(pid, signal.SIGKILL)  # noqa: E731
        assert drive.serve(wanted, kill, after_steps=30) == expected, "a token changed"
        tier = drive.engine.stats().tier
        assert tier is not None and tier.hit_tokens > 0, "nothing came from the copies"
        drive.wait_until_complete()
        assert drive.serve(wanted) == expected, "and after the rank is back"


def test_one_process_has_no_use_for_it() -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory_tier_bytes is set, but .* one process"):
        check_tiers(EngineConfig(cache=TIER))
    ranks = ClusterConfig(attention_ranks=1, expert_ranks=1)
    check_tiers(EngineConfig(cache=TIER, cluster=ranks))
    with pytest.raises(ConfigError, match=r"cache\.prefix_cache is false"):
        check_tiers(EngineConfig(cache=replace(TIER, prefix_cache=False), cluster=ranks))


def test_memory_that_holds_no_page_is_refused() -> None:
    of = replace(config(1, 1), cache=replace(TIER, memory_tier_bytes=1000))
    with pytest.raises(ConfigError, match=r"cache\.memory_tier_bytes is 1000, but a page takes"):
        build_cluster(of, make_starter=ThreadStarter)
