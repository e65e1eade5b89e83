"""The engine over several ranks, driven by a fake coordinator: no processes, no sockets."""

from __future__ import annotations

import pytest

from moe_serve.cache.events.change_record import ChangeRecord, PublishedPage, update
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.step_in_flight import MAX_MOVES, StepCoordinator
from moe_serve.engine.request.request import FinishReason
from tests.support.cluster.fake_coordinator import FakeCoordinator, fake_cluster
from tests.support.engine.fake_engine import request
from tests.support.engine.fake_runner import continuation

PROMPTS = {f"r{index}": [1 + index] * (1 + 7 * index) for index in range(9)}
EXPECTED = {name: continuation(prompt, 12) for name, prompt in PROMPTS.items()}
NUM_STEPS = 4000  # far more than any of these runs takes


def add_all(engine: ClusterEngine) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        engine.add(request(name, prompt, max_tokens=12))
    return {name: [] for name in PROMPTS}


def step(engine: ClusterEngine, found: dict[str, list[int]]) -> None:
    for delta in engine.step():
        assert delta.error is None, delta.error
        found[delta.request_id] += delta.token_ids
    engine.check_integrity()


def finish(engine: ClusterEngine, found: dict[str, list[int]]) -> None:
    for _ in range(NUM_STEPS):
        if not engine.has_work:
            break
        step(engine, found)
    assert found == EXPECTED
    stats = engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "every page is free again"


def test_the_fake_is_a_coordinator() -> None:
    coordinator: StepCoordinator = FakeCoordinator(1)
    assert coordinator.epoch.attention == ("attention-0",)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("num_attention", [1, 2, 3])
def test_tokens_on_any_number_of_ranks(num_attention: int, is_ahead: bool) -> None:
    coordinator = FakeCoordinator(num_attention)
    engine = fake_cluster(coordinator, is_ahead=is_ahead)
    finish(engine, add_all(engine))
    assert (coordinator.num_ahead > 0) == is_ahead
    each = [rank.runner.num_computed_tokens for rank in coordinator.ranks.values()]
    assert min(each) > 0, "every rank had work"


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("num_steps", range(9))
def test_requests_of_a_lost_rank_move_with_their_tokens(num_steps: int, is_back: bool) -> None:
    coordinator = FakeCoordinator(2)
    engine = fake_cluster(coordinator)
    found = add_all(engine)
    for _ in range(num_steps):
        step(engine, found)
    coordinator.lose("attention-0", is_back=is_back)
    finish(engine, found)
    stats = engine.stats()
    assert stats.num_lost_ranks == 1 and stats.last_loss == "attention-0: the test took it"
    assert len(stats.ranks) == (2 if is_back else 1)


@pytest.mark.parametrize("is_back", [False, True])
def test_pages_of_each_rank_are_told_and_those_of_a_lost_one_taken_back(is_back: bool) -> None:
    coordinator = FakeCoordinator(2)
    records = {name: ChangeRecord(lambda: None, lambda: None) for name in coordinator.names}
    engine = fake_cluster(coordinator, listeners=records)
    told: dict[str, dict[bytes, PublishedPage]] = {name: {} for name in records}
    found = add_all(engine)
    for turn in range(NUM_STEPS):
        if turn == 5:
            coordinator.lose("attention-0", is_back=is_back)
        if not engine.has_work:
            break
        step(engine, found)
        for name, record in records.items():
            if (changes := record.take()) is not None:
                assert (turn == 5 and name == "attention-0") == changes.is_cleared or turn == 0
                update(told[name], changes)
            tree = engine._engines[name]._scheduler.cache.tree if name in engine._engines else None
            full = () if tree is None else [p for p in tree if tree.is_full(p)]
            assert set(told[name]) == {tree.key_of(page) for page in full if tree is not None}
    assert found == EXPECTED and told["attention-1"]


def test_requests_wait_while_no_rank_is_there() -> None:
    coordinator = FakeCoordinator(1)
    engine = fake_cluster(coordinator)
    found = add_all(engine)
    for _ in range(3):
        step(engine, found)
    coordinator.lose("attention-0", is_back=False)
    told = {name: list(tokens) for name, tokens in found.items()}
    for _ in range(3):
        assert not engine.step(), "no rank can compute"
        coordinator.has_events = False
    assert engine.num_waiting == len(PROMPTS) and engine.has_work
    engine.abort("r3")
    (aborted,) = engine.step()
    assert (aborted.request_id, aborted.finish_reason) == ("r3", FinishReason.ABORT)
    coordinator.away.clear()
    for _ in range(NUM_STEPS):
        if not engine.has_work:
            break
        step(engine, found)
    assert found == {**EXPECTED, "r3": told["r3"]}


def test_a_request_that_loses_every_rank_is_given_up() -> None:
    """It never gets its first token, as each rank that computes it is lost."""
    coordinator = FakeCoordinator(1)
    engine = fake_cluster(coordinator)
    engine.add(request("poison", [9]))
    coordinator.dies_in_step = "attention-0"
    deltas = [delta for _ in range(3 * MAX_MOVES) for delta in engine.step()]
    (given_up,) = deltas
    assert given_up.finish_reason is FinishReason.ERROR
    assert f"{MAX_MOVES + 1} attention ranks were lost" in (given_up.error or "")
    assert coordinator.membership.num_lost == MAX_MOVES + 1
    coordinator.dies_in_step = None
    finish(engine, add_all(engine))
