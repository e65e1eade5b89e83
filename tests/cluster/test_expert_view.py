"""What is seen of the experts at work is the same in one process and on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.watch.expert_load import ExpertCounts, ExpertLoad
from moe_serve.http.dashboard.facts import dashboard_facts
from tests.support.cluster.layouts import config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS, TOP_K = 4096, 6, 32, 4


def build(of: EngineConfig) -> BuiltEngine:
    is_split = of.cluster.is_disaggregated
    return build_cluster(of, make_starter=ThreadStarter) if is_split else build_engine(of)


def counted(attention: int, experts: int, wanted: Sequence[GenerationRequest]) -> ExpertCounts:
    """Every step of some requests is counted."""
    of = config(attention, experts, 2)
    built = build(replace(of, cache=replace(of.cache, prefix_cache=False)))
    load = ExpertLoad(range(NUM_LAYERS), NUM_EXPERTS, TOP_K, interval_s=0.0, stride=1)
    built.routes.add(load)
    try:
        serve(built.engine, wanted)
    finally:
        built.engine.close()
    assert load.total.num_steps <= built.engine.stats().num_steps
    return load.total


@pytest.fixture(scope="module")
def alone() -> ExpertCounts:
    return counted(0, 0, requests(6, VOCAB_SIZE))


def test_every_row_is_counted_once(alone: ExpertCounts) -> None:
    wanted = requests(6, VOCAB_SIZE)
    num_rows = sum(len(r.prompt_token_ids) + (r.params.max_tokens or 0) - 1 for r in wanted)
    assert alone.num_tokens == num_rows
    assert alone.rows_LE.sum(axis=1).tolist() == [TOP_K * num_rows] * NUM_LAYERS
    mean_L = alone.activated_mean
    assert mean_L is not None and (mean_L >= TOP_K).all() and (mean_L <= NUM_EXPERTS).all()


@pytest.mark.parametrize(("attention", "experts"), [(1, 1), (2, 1)])
def test_ranks_count_the_same_rows(alone: ExpertCounts, attention: int, experts: int) -> None:
    """Two attention ranks make one step of the server: what both activate is joined."""
    found = counted(attention, experts, requests(6, VOCAB_SIZE))
    assert np.array_equal(found.rows_LE, alone.rows_LE)
    assert found.num_tokens == alone.num_tokens


def test_ranks_tell_how_they_are_and_what_the_last_step_was() -> None:
    of = config(1, 2, 2)
    built = build(of)
    facts = dashboard_facts(built, of)
    try:
        assert facts.layout == "1 attention rank, 2 expert ranks"
        assert facts.last_step is not None and facts.last_step() is None
        serve(built.engine, requests(6, VOCAB_SIZE, 60))
        stats, step = built.engine.stats(), facts.last_step()
    finally:
        built.engine.close()
    assert [(m.name, m.pool, m.phase, m.num_restarts) for m in stats.members] == [
        ("attention-0", "attention", "serving", 0),
        ("expert-0", "expert", "serving", 0),
        ("expert-1", "expert", "serving", 0),
    ]
    assert all(m.busy_ratio is not None and 0 < m.busy_ratio <= 1 for m in stats.members)
    assert step is not None and step.number % 16 == 0 and step.duration_ms > 0
    assert [track.name for track in step.tracks] == ["attention-0", "expert-0", "expert-1"]
    assert {"attention", "dispatch", "combine"} <= {s.kind for s in step.tracks[0].spans}
    assert {"experts", "wait"} <= {span.kind for span in step.tracks[1].spans}
    assert {span.layer for span in step.tracks[1].spans} <= {None, *range(NUM_LAYERS)}


def test_one_process_tells_of_its_steps_too() -> None:
    of = config(0, 0, 1)
    built = build(of)
    facts = dashboard_facts(built, of)
    serve(built.engine, requests(3, VOCAB_SIZE, 20))
    assert (facts.layout, built.engine.stats().members) == ("one process", ())
    assert facts.last_step is not None
    step = facts.last_step()
    assert step is not None and step.number == 16
    (track,) = step.tracks
    assert {"attention", "experts", "combine", "logits"} <= {span.kind for span in track.spans}
    assert facts.experts is not None and facts.experts.total.num_tokens > 0
