"""The same tokens and log probabilities in every layout, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.coordinator import Coordinator
from moe_serve.engine.build import build_engine
from moe_serve.engine.request.request import TokenLogprob
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from tests.support.cluster.layouts import (
    colocated,
    config,
    on_ranks,
    random_placement,
    requests,
    serve,
)
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.sampled_cases import EVERY_CASE

VOCAB_SIZE = 4096  # of the demonstration model
NUM_LAYERS, NUM_EXPERTS = 6, 32
LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 3), (3, 2))


@pytest.mark.sampled
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
@pytest.mark.parametrize(("attention", "experts"), LAYOUTS)
def test_layouts(attention: int, experts: int, micro_batches: int) -> None:
    wanted = requests(7, VOCAB_SIZE, num_tokens=5)
    of = config(attention, experts, micro_batches)
    assert on_ranks(of, wanted) == colocated(of, wanted), f"{attention}A{experts}E"


def test_logprobs_of_given_tokens() -> None:
    """They travel from the attention ranks as the likeliest ones do."""
    wanted = [
        replace(r, params=replace(r.params, logprobs=0, logprob_token_ids=(9, 4095, index)))
        for index, r in enumerate(requests(4, VOCAB_SIZE))
    ]
    of = config(2, 1)
    answers = on_ranks(of, wanted)
    assert answers == colocated(of, wanted)
    for index, answer in enumerate(answers.values()):
        for entry in answer.logprobs:
            assert isinstance(entry, TokenLogprob) and entry.top[0][0] == entry.token_id
            assert {token for token, _ in entry.top} == {entry.token_id, 9, 4095, index}


@settings(
    max_examples=12 if EVERY_CASE else 4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    attention=st.integers(1, 3),
    experts=st.integers(1, 4),
    micro_batches=st.sampled_from([1, 2, 3, 4, "auto"]),
    routing=st.sampled_from(
        [
            ("experts", "round-robin"),
            ("attention", "round-robin"),
            ("attention", "fewest-activated"),
            ("attention", "least-tokens"),
            ("attention", "lp"),
            ("attention", "auto"),
        ]
    ),
    budget=st.integers(3, 80),
    count=st.integers(1, 7),
    seed=st.integers(0, 2**31),
)
@example(
    attention=2,
    experts=4,
    micro_batches=2,
    routing=("attention", "lp"),
    budget=40,
    count=8,
    seed=7,
)
def test_any_layout(
    tmp_path: Path,
    attention: int,
    experts: int,
    micro_batches: int | str,
    routing: tuple[str, str],
    budget: int,
    count: int,
    seed: int,
) -> None:
    """Random placements with replicas, chosen by any policy, routers on either side (where copies
    take turns), chunks of any size."""
    router, replica_choice = routing
    file = tmp_path / f"{seed}.json"
    random_placement(file, range(NUM_LAYERS), NUM_EXPERTS, experts, seed)
    of = config(
        attention,
        experts,
        micro_batches,
        budget=budget,
        placement=str(file),
        router=router,
        replica_choice=replica_choice,
    )
    wanted = requests(count, VOCAB_SIZE, num_tokens=4)
    assert on_ranks(of, wanted) == colocated(of, wanted)


def test_ranks_are_used_again() -> None:
    """Requests of a second round find the first one's prefixes, on the rank that has them."""
    of = config(2, 2, 2)
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    alone = build_engine(of).engine
    try:
        for count in (4, 1, 7):
            wanted = requests(count, VOCAB_SIZE, num_tokens=4)
            assert serve(engine, wanted) == serve(alone, wanted), f"{count} requests"
        stats = engine.stats()
        assert stats.load.num_running == stats.load.num_waiting == 0
        assert stats.pools is not None and sum(s.num_steps for s in stats.pools.steps) > 0
    finally:
        engine.close()


def test_an_aborted_request_leaves_the_ranks_in_step() -> None:
    of = config(2, 2, 2)
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    try:
        for request in requests(5, VOCAB_SIZE, num_tokens=40):
            engine.add(request)
        for _ in range(3):
            engine.step()
        engine.abort("r1")
        engine.abort("r4")
        ends = [d for d in engine.step() if d.finish_reason is not None]
        assert {d.request_id for d in ends} == {"r1", "r4"}
        while engine.num_running or engine.num_waiting:
            engine.step()
        engine.check_integrity()
        stats = engine.stats()
        assert stats.load.num_free_pages == stats.load.num_pages, "every page is free again"
    finally:
        engine.close()


def test_a_dispatch_that_fails_half_way_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three expert ranks does not get its frame: the step is walked to its end."""
    send, calls = GroupTransport._begin_send, itertools.count()

    def failing(transport: GroupTransport, *arguments: Any) -> None:
        if next(calls) == 61:
            raise ValueError("no memory")
        send(transport, *arguments)

    monkeypatch.setattr(GroupTransport, "_begin_send", failing)
    of = config(1, 3, 2)
    wanted = requests(4, VOCAB_SIZE)
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    assert isinstance(engine, ClusterEngine)
    try:
        assert serve(engine, wanted) == colocated(of, wanted)
        assert next(calls) > 62, "it failed"
        assert isinstance(engine._coordinator, Coordinator)
        assert engine._coordinator.num_repeats == 0, "and no epoch broke"
    finally:
        engine.close()
