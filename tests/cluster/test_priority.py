"""Urgent requests on ranks: each attention rank serves its own in order, with the same tokens."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.config.sections import BatchPolicyName
from tests.support.cluster.layouts import Answer, colocated, config, requests
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE = 4096  # of the demonstration model


@pytest.mark.parametrize(("attention", "policy"), [(1, "fifo"), (2, "fifo"), (2, "expert-aware")])
def test_each_rank_serves_the_most_urgent_first(attention: int, policy: BatchPolicyName) -> None:
    of, now = config(attention, 1, 2), time.monotonic()
    wanted = [
        replace(request, priority=(2, -1, 0, -1)[index % 4], arrival_time=now + index / 1000)
        for index, request in enumerate(requests(10, VOCAB_SIZE))
    ]
    one_seat = replace(of.scheduler, max_num_seqs=1, max_passed_over_s=3600.0, batch_policy=policy)
    engine = build_cluster(replace(of, scheduler=one_seat), make_starter=ThreadStarter).engine
    assert isinstance(engine, ClusterEngine)
    answers = {request.request_id: Answer() for request in wanted}
    started: dict[str, list[tuple[int, float]]] = {}  # by rank: (priority, arrival)
    try:
        for request in wanted:
            engine.add(request)
        while any(answer.end is None for answer in answers.values()):
            for delta in engine.step():
                answers[delta.request_id].take(delta)
            for name, own in engine._engines.items():
                order = started.setdefault(name, [])
                for sequence in own._scheduler.running:
                    key = (sequence.request.priority, sequence.request.arrival_time)
                    if key not in order:
                        order.append(key)
        engine.check_integrity()
    finally:
        engine.close()
    assert len(started) == attention and all(len(order) > 1 for order in started.values())
    assert all(order == sorted(order) for order in started.values()), started
    assert answers == colocated(of, wanted)
