"""Service tiers on several attention ranks: the same tokens under every policy when ranks are lost,
moved requests keep what they have, queues even out, and one budget for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.cluster.control.messages import StepDone
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.step_in_flight import StepInFlight
from moe_serve.config.sections import LateName, OrderName, PreemptName, SchedulerConfig
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.standing import Standing
from tests.support.cluster.fake_coordinator import FakeCoordinator, fake_cluster
from tests.support.engine.fake_engine import request
from tests.support.engine.fake_runner import continuation
from tests.support.engine.timed_engine import TIERS, service_of

PROMPTS = {f"r{index}": [1 + index] * (1 + 7 * index) for index in range(9)}
EXPECTED = {name: continuation(prompt, 12) for name, prompt in PROMPTS.items()}
STEP_S = 0.01
TIGHT = tuple(replace(tier, tpot_s=0.02) for tier in TIERS)
CONFIG = SchedulerConfig(max_num_seqs=2, max_batched_tokens=32, tiers=TIGHT, min_prefill_tokens=8)
POLICIES: list[tuple[OrderName, LateName, PreemptName]] = [
    ("fifo", "keep", "memory"),
    ("priority", "keep", "memory"),
    ("edf", "keep", "deadline"),
    ("edf", "demote", "memory"),
    ("atc", "keep", "memory"),
    ("atc", "demote", "deadline"),
]


class TickingCoordinator(FakeCoordinator):
    """Takes `STEP_S` for each step and `row_s` for each row of any rank, on its own clock."""

    now = row_s = longest_s = 0.0

    def collect(self, flight: StepInFlight) -> dict[str, StepDone | Exception]:
        num_rows = sum(sum(work.rows) for work in flight.works.values())
        taken_s = STEP_S + self.row_s * num_rows
        self.longest_s = max(self.longest_s, taken_s)
        self.now += taken_s
        return super().collect(flight)


class Ranks:
    """A cluster of fake ranks on the coordinator's clock."""

    def __init__(self, num_attention: int, scheduler: SchedulerConfig = CONFIG) -> None:
        self.coordinator = TickingCoordinator(num_attention)
        self.engine: ClusterEngine = fake_cluster(
            self.coordinator, scheduler=scheduler, clock=lambda: self.coordinator.now
        )
        self.found: dict[str, list[int]] = {}

    def add(self, made: GenerationRequest, tier: int, tenant: str = "") -> None:
        service = service_of(TIGHT[tier], tenant)
        self.engine.add(replace(made, arrival_time=self.coordinator.now, service=service))
        self.found[made.request_id] = []

    def add_all(self) -> None:
        for index, (name, prompt) in enumerate(PROMPTS.items()):
            self.add(request(name, prompt, max_tokens=12), index % 3, f"t{index % 2}")

    def step(self) -> None:
        deltas = self.engine.step()
        for delta in deltas:
            assert delta.error is None, delta.error
            self.found[delta.request_id] += delta.token_ids
        self.engine.check_integrity()

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.found == EXPECTED
        stats = self.engine.stats()
        assert stats.load.num_free_pages == stats.load.num_pages
        assert stats.service is not None
        assert sum(counts.num_finished for counts in stats.service.tiers) == len(EXPECTED)
        assert not self.state.shares._places, "every tenant has left"

    @property
    def state(self):  # type: ignore[no-untyped-def]
        service = self.engine._service
        assert service is not None
        return service.state

    def sequences(self) -> dict[str, Sequence]:
        engines = self.engine._engines.values()
        return {name: s for engine in engines for name, s in engine._sequences.items()}


@pytest.mark.parametrize("policy", POLICIES, ids="-".join)
@pytest.mark.parametrize(("num_steps", "is_back"), [(0, True), (1, False), (3, True), (6, False)])
def test_every_policy_survives_a_lost_rank(
    policy: tuple[OrderName, LateName, PreemptName], num_steps: int, is_back: bool
) -> None:
    order, late, preempt = policy
    ranks = Ranks(2, replace(CONFIG, order=order, late=late, preempt=preempt))
    ranks.add_all()
    for _ in range(num_steps):
        ranks.step()
    ranks.coordinator.lose("attention-0", is_back=is_back)
    ranks.finish()


@pytest.mark.parametrize("policy", POLICIES, ids="-".join)
def test_every_policy_waits_while_no_rank_is_there(
    policy: tuple[OrderName, LateName, PreemptName],
) -> None:
    order, late, preempt = policy
    ranks = Ranks(1, replace(CONFIG, order=order, late=late, preempt=preempt))
    ranks.add_all()
    for _ in range(3):
        ranks.step()
    ranks.coordinator.lose("attention-0", is_back=False)
    for _ in range(3):
        assert not ranks.engine.step()
    ranks.engine.abort("r8")
    (aborted,) = ranks.engine.step()
    assert aborted.finish_reason is FinishReason.ABORT
    ranks.coordinator.away.clear()
    ranks.coordinator.has_events = True
    while ranks.engine.has_work:
        ranks.step()
    assert all(ranks.found[name] == EXPECTED[name] for name in PROMPTS if name != "r8")
    assert not ranks.state.shares._places


def test_a_moved_request_keeps_deadline_tier_age_and_charges() -> None:
    ranks = Ranks(2)
    ranks.add_all()
    for _ in range(4):
        ranks.step()
    lost = ranks.engine._engines["attention-0"]._sequences
    before = {name: _kept(sequence.standing) for name, sequence in lost.items()}
    charged = [ranks.state.shares.counter_s(place) for place in range(2)]
    assert len(before) > 2 and any(charged)
    ranks.coordinator.lose("attention-0", is_back=False)
    ranks.step()
    after = {name: _kept(ranks.sequences()[name].standing) for name in before}
    assert after == before
    for place, seconds in enumerate(charged):
        assert ranks.state.shares.counter_s(place) >= seconds
    ranks.finish()


def _kept(standing: Standing | None) -> tuple[float, ...]:
    assert standing is not None
    fields = (standing.queued_s, standing.deadline_s, standing.tier, standing.tenant)
    return *fields, standing.first_token_at or 0.0


def test_waiting_requests_go_to_a_rank_with_free_seats() -> None:
    """Both ranks get four requests; those of the second end at once."""
    ranks = Ranks(2)
    ranks.step()
    first, second = ranks.engine._engines.values()
    for index in range(4):
        ranks.add(request(f"long{index}", [3 + index] * 20, max_tokens=60), 0)
    for sequence in ranks.engine._homeless:
        first.adopt(sequence)
    ranks.engine._homeless = []
    assert (first.num_waiting, second.num_waiting) == (4, 0)
    ranks.step()
    ranks.step()
    assert (first.num_running, first.num_waiting) == (2, 0)
    assert (second.num_running, second.num_waiting) == (2, 0)
    while ranks.engine.has_work:
        ranks.step()
    assert ranks.found == {f"long{index}": continuation([3 + index] * 20, 60) for index in range(4)}


def test_a_request_goes_where_its_first_token_comes_first() -> None:
    """The first rank has more tokens to compute, but they are less urgent than the newcomer."""
    ranks = Ranks(2, replace(CONFIG, max_num_seqs=1))
    ranks.add(request("warm", [2] * 20, max_tokens=3), 0)
    for _ in range(6):
        ranks.step()
    first, second = ranks.engine._engines.values()
    ranks.add(request("urgent", [4] * 10, max_tokens=30), 0)
    for _ in range(2):
        ranks.add(request(f"u{len(ranks.found)}", [4] * 10, max_tokens=30), 0)
        second.adopt(ranks.engine._homeless.pop())
    for _ in range(5):
        ranks.add(request(f"flex{len(ranks.found)}", [5] * 50, max_tokens=30), 2)
        first.adopt(ranks.engine._homeless.pop())
    (newcomer,) = ranks.engine._homeless
    assert first.num_pending_tokens > second.num_pending_tokens
    assert ranks.engine._home_of(newcomer) is first


def test_the_budget_of_a_step_is_that_of_all_ranks() -> None:
    """A step of r rows takes 10 ms + 0.1 ms x r. Below a target of 20 ms there is room for about 80
    prompt tokens, on both ranks together: each alone would take its 64."""
    ranks = Ranks(2, replace(CONFIG, max_batched_tokens=64))
    ranks.coordinator.row_s = 1e-4
    ranks.add(request("w", [9] * 60, max_tokens=2), 0)
    ranks.add(request("a", [3] * 20, max_tokens=120), 0)
    ranks.add(request("b", [4] * 20, max_tokens=120), 0)
    for _ in range(8):
        ranks.step()
    ranks.coordinator.longest_s = 0.0
    ranks.add(request("c", [5] * 130, max_tokens=2), 0)
    ranks.add(request("d", [6] * 130, max_tokens=2), 0)
    engines = list(ranks.engine._engines.values())
    sums: list[int] = []
    for _ in range(4):
        ranks.step()
        limits = [e.service.queue.prompt_limit for e in engines if e.service is not None]
        sums.append(sum(limit for limit in limits if limit is not None))
    assert max(sums) > 48 and max(sums) <= 96
    assert ranks.coordinator.longest_s <= 0.02
    while ranks.engine.has_work:
        ranks.step()


def test_steps_are_measured_over_all_ranks() -> None:
    ranks = Ranks(3)
    ranks.add_all()
    ranks.finish()
    model = ranks.state.model
    assert model.is_measured and ranks.state.step_s == pytest.approx(STEP_S, rel=0.3)
