"""Service tiers in an engine, on a virtual clock: order, bounds, preemption and promises."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.config.sections import OrderName, SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.engine.request.service_stats import ServiceStats, TierCounts
from moe_serve.engine.request.service_terms import NO_SERVICE, Service, Targets
from moe_serve.errors import ConfigError
from tests.support.engine.timed_engine import (
    FLEX,
    INTERACTIVE,
    TIERS,
    TimedEngine,
    request,
    service_of,
)
from tests.support.sampled_cases import EVERY_CASE

CONFIG = SchedulerConfig(max_num_seqs=4, max_batched_tokens=64, tiers=TIERS)
URGENT, PATIENT = service_of(INTERACTIVE), service_of(FLEX)

ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 0.5),  # seconds after the one before
        st.integers(0, 2),  # tier
        st.integers(2, 200),  # tokens of the prompt
        st.integers(1, 40),  # tokens of the answer
        st.integers(-1, 2),  # priority
        st.integers(0, 2),  # tenant
    ),
    min_size=1,
    max_size=14,
)
Arrivals = list[tuple[float, int, int, int, int, int]]


def made_of(arrivals: Arrivals, *, has_tiers: bool = True) -> list[GenerationRequest]:
    times = itertools.accumulate(each[0] for each in arrivals)
    return [
        request(
            f"r{index}",
            service_of(TIERS[tier], f"t{tenant}") if has_tiers else NO_SERVICE,
            at_s=at_s,
            num_prompt=num_prompt,
            num_answer=num_answer,
            priority=priority,
            token=1 + index,
        )
        for index, (at_s, (_, tier, num_prompt, num_answer, priority, tenant)) in enumerate(
            zip(times, arrivals, strict=True)
        )
    ]


def stats_of(world: TimedEngine) -> ServiceStats:
    service = world.engine.stats().service
    assert service is not None
    return service


def tier_of(world: TimedEngine, name: str) -> TierCounts:
    return next(counts for counts in stats_of(world).tiers if counts.tier == name)


@settings(deadline=None, max_examples=12 if EVERY_CASE else 8)
@given(ARRIVALS)
def test_with_order_priority_tiers_change_no_schedule(arrivals: Arrivals) -> None:
    """Pages and seats are few, so sequences wait and are preempted."""
    config = SchedulerConfig(max_num_seqs=3, max_batched_tokens=64, max_passed_over_s=0.2)
    plain = TimedEngine(config, num_pages=24)
    plain.run(made_of(arrivals, has_tiers=False))
    tiers = TimedEngine(replace(config, tiers=TIERS, order="priority"), num_pages=24)
    tiers.run(made_of(arrivals), checks=True)
    assert tiers.served == plain.served and tiers.clock.now == plain.clock.now
    assert plain.engine.stats().service is None and plain.engine.admission is None


@settings(deadline=None, max_examples=12 if EVERY_CASE else 8)
@given(ARRIVALS)
def test_with_order_fifo_tiers_and_priorities_change_no_schedule(arrivals: Arrivals) -> None:
    config = SchedulerConfig(max_num_seqs=3, max_batched_tokens=64)
    plain = TimedEngine(config, num_pages=24)
    plain.run([replace(each, priority=0) for each in made_of(arrivals, has_tiers=False)])
    tiers = TimedEngine(replace(config, tiers=TIERS, order="fifo"), num_pages=24)
    tiers.run(made_of(arrivals), checks=True)
    assert tiers.served == plain.served and tiers.clock.now == plain.clock.now


@pytest.mark.parametrize("order", ["auto", "fifo", "priority"])
@pytest.mark.parametrize("key", [{"preempt": "deadline"}, {"late": "demote"}])
def test_a_key_that_would_do_nothing_is_refused(key: dict[str, str], order: OrderName) -> None:
    """vLLM #9272: a server that does not order by priority ignores it silently."""
    with pytest.raises(ConfigError, match=f"scheduler.{next(iter(key))} is .* set scheduler.order"):
        TimedEngine(SchedulerConfig(order=order, **key))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "tiers", "is_told"), [("atc", (), True), ("edf", (), True), ("atc", TIERS, False)]
)
def test_an_order_by_deadlines_without_tiers_is_told(
    order: OrderName,
    tiers: tuple[TierConfig, ...],
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    TimedEngine(SchedulerConfig(order=order, tiers=tiers))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == is_told, told
    assert not told or f"scheduler.order is '{order}' without scheduler.tiers" in told[0]


@settings(deadline=None, max_examples=16 if EVERY_CASE else 12)
@given(
    ARRIVALS,
    st.sampled_from(("fifo", "priority", "edf", "atc")),
    st.sampled_from(("keep", "demote")),
    st.sampled_from(("memory", "deadline")),
    st.sampled_from(("fixed", "slack")),
)
def test_every_policy_answers_everything_with_all_its_tokens(
    arrivals: Arrivals, order: OrderName, late: str, preempt: str, budget: str
) -> None:
    if order in ("fifo", "priority"):
        late, preempt = "keep", "memory"
    config = replace(CONFIG, order=order, late=late, preempt=preempt, step_budget=budget)  # type: ignore[arg-type]
    world = TimedEngine(config, num_pages=24)
    made = made_of(arrivals)
    world.run(made, checks=True)
    for each in made:
        assert world.served[each.request_id].num_tokens == each.params.max_tokens
    stats = world.engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages
    assert sum(counts.num_finished for counts in stats_of(world).tiers) == len(made)


@settings(deadline=None, max_examples=16 if EVERY_CASE else 8)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.03), st.integers(2, 60)), min_size=25, max_size=40),
    st.sampled_from(("edf", "atc")),
    st.sampled_from(("keep", "demote")),
)
def test_a_request_starts_within_the_bound_and_the_work_that_is_older(
    urgent: list[tuple[float, int]], order: OrderName, late: str
) -> None:
    """An adversary sends an endless urgent stream. The patient request starts once it has waited
    for `max_wait_s` and the older ones have started: no later arrival starts after the bound and
    before it."""
    bound_s = 0.3
    config = replace(CONFIG, max_num_seqs=1, order=order, late=late, max_wait_s=bound_s)  # type: ignore[arg-type]
    world = TimedEngine(config)
    made, at_s = [request("patient", PATIENT, num_prompt=200, at_s=0.01, token=9)], 0.0
    for index, (gap_s, num_prompt) in enumerate(urgent):
        at_s += gap_s
        name, token = f"u{index}", 100 + index
        made.append(request(name, URGENT, at_s=at_s, num_prompt=num_prompt, token=token))
    world.run(made)
    started_s = world.served["patient"].started_s
    assert started_s is not None
    for served in world.served.values():
        if served.arrived_s > 0.01 and served.started_s is not None:
            is_late = served.started_s > 0.01 + bound_s
            assert not (is_late and served.started_s < started_s), "a later one passed it"


def test_endless_urgent_stream_does_not_starve_the_patient() -> None:
    """The same over a longer time and above capacity."""
    config = replace(CONFIG, max_num_seqs=1, max_wait_s=2.0)
    world = TimedEngine(config)
    urgent = [
        request(f"u{n}", URGENT, at_s=n * 0.03, token=10 + n, num_answer=6) for n in range(120)
    ]
    world.run([request("patient", PATIENT, at_s=0.001, num_prompt=500, token=1), *urgent])
    waited = world.served["patient"].started_s
    assert waited is not None and 2.0 <= waited <= 2.2


def test_urgent_requests_pass_patient_ones_and_short_prompts_long_ones() -> None:
    world = TimedEngine(replace(CONFIG, max_num_seqs=1))
    world.add(request("first", PATIENT))
    world.step()
    world.run(
        [
            request("patient", PATIENT, at_s=0.001),
            request("long", URGENT, at_s=0.001, num_prompt=120),
            request("short", URGENT, at_s=0.001, num_prompt=20),
        ]
    )
    ends = {name: served.end_s or 0.0 for name, served in world.served.items()}
    assert sorted(ends, key=ends.__getitem__) == ["first", "short", "long", "patient"]


@pytest.mark.parametrize(("num_before", "passes"), [(3, False), (60, True)])
def test_the_order_of_arrival_is_kept_as_long_as_it_keeps_all_deadlines(
    num_before: int, passes: bool
) -> None:
    """A patient request and an urgent one arrive behind others. With few of them both would be in
    time in order of arrival; with many the urgent one would not, and passes all."""
    world = TimedEngine(replace(CONFIG, max_num_seqs=1, patience_s=0.2))
    warm_up = [request(f"w{n}", PATIENT, at_s=0.2 * n, token=200 + n) for n in range(10)]
    world.run(warm_up)
    now = world.clock.now
    before = [request(f"b{n}", PATIENT, at_s=now, token=300 + n) for n in range(num_before)]
    world.run(
        [
            *before,
            request("patient", PATIENT, at_s=now + 0.001, num_prompt=70, token=1),
            request("urgent", URGENT, at_s=now + 0.1, num_prompt=20, token=2),
        ]
    )
    ends = {name: served.end_s or 0.0 for name, served in world.served.items()}
    assert (ends["urgent"] < ends["patient"]) == passes
    assert (ends["urgent"] < ends[f"b{num_before - 1}"]) == passes


def test_short_prompts_are_not_held_up_by_a_long_one_that_is_being_read() -> None:
    """LAPS: a prompt of 3000 tokens takes 47 steps; the short one gets its token in two."""
    world = TimedEngine(CONFIG)
    world.add(request("long", PATIENT, num_prompt=3000))
    for _ in range(3):
        world.step()
    begun_s = world.clock.now
    world.run([request("short", URGENT, at_s=begun_s, num_prompt=20)])
    short, long = world.served["short"], world.served["long"]
    assert short.first_s is not None and short.first_s - begun_s < 0.02
    assert long.first_s is not None and long.first_s > short.first_s


# -- failures of other engines, section by section in docs/internals/deadlines.md


def full_of_patient(preempt: str, **changes: object) -> TimedEngine:
    """Returns an engine whose seats are all taken by patient requests with 400 tokens to go."""
    config = replace(CONFIG, preempt=preempt, **changes)  # type: ignore[arg-type]
    world = TimedEngine(config)
    world.run([request(f"w{n}", PATIENT, num_answer=60, token=50 + n) for n in range(8)])
    for number in range(config.max_num_seqs):
        at_s = world.clock.now
        world.add(request(f"p{number}", PATIENT, at_s=at_s, num_answer=400, token=60 + number))
    for _ in range(2 * config.max_num_seqs):
        world.step()
    assert world.engine.num_running == config.max_num_seqs
    return world


@pytest.mark.parametrize("preempt", ["memory", "deadline"])
def test_urgent_arrival_at_full_seats(preempt: str) -> None:
    """vLLM #40004: a high priority waits while low ones hold all seats."""
    world = full_of_patient(preempt)
    at_s = world.clock.now
    world.run([request("urgent", URGENT, at_s=at_s, num_answer=4)], checks=True)
    urgent = world.served["urgent"]
    assert urgent.first_s is not None
    num_preempted = tier_of(world, "flex").num_urgent_preemptions
    if preempt == "deadline":
        assert urgent.first_s - at_s < 0.1 and num_preempted == 1
        assert sum(served.num_preemptions for served in world.served.values()) == 1
    else:
        assert urgent.first_s - at_s > 1.0 and num_preempted == 0
    assert all(s.num_tokens == 400 for n, s in world.served.items() if n.startswith("p"))


def test_two_preemptions_cost_at_most_two_recomputations_and_keep_their_place() -> None:
    """vLLM #41951, #56843: a preempted request is overtaken and computed again and again."""
    world = full_of_patient("deadline", max_num_seqs=1)
    begun_s = world.clock.now
    urgent = [request(f"u{n}", URGENT, at_s=begun_s + n * 0.2, num_answer=2) for n in range(12)]
    later = request("later", PATIENT, at_s=begun_s, num_answer=2)
    world.run([*urgent, later], checks=True)
    victim = world.served["p0"]
    assert victim.num_preemptions <= 2 and victim.num_tokens == 400
    assert victim.end_s is not None and world.served["later"].started_s is not None
    assert world.served["later"].started_s >= victim.end_s, "no equal passes the victim"


def test_scheduled_then_preempted_in_the_same_step() -> None:
    """vLLM #23347: the victim is already in the step when another sequence needs its pages."""
    config = replace(CONFIG, max_num_seqs=6, max_batched_tokens=256)
    world = TimedEngine(config, num_pages=20)
    made = [
        request(f"r{n}", service_of(TIERS[n % 3]), num_prompt=30, num_answer=60, token=1 + n)
        for n in range(6)
    ]
    world.run(made, checks=True)
    assert world.engine.stats().counts.num_preemptions > 0
    assert all(served.num_tokens == 60 for served in world.served.values())


def test_pages_come_from_the_one_whose_delay_costs_least() -> None:
    """The last one to start is interactive, with a target for its tokens; without tiers it would
    give up its pages."""
    strict = TierConfig(name="interactive", weight=50.0, ttft_s=1.0, tpot_s=0.005)
    tiers = (strict, TierConfig(name="flex"))
    config = replace(CONFIG, tiers=tiers, step_budget="fixed", max_batched_tokens=256)
    world = TimedEngine(config, num_pages=12)
    patient, urgent = service_of(tiers[1]), service_of(tiers[0])
    made = [request(f"p{n}", patient, num_prompt=30, num_answer=60, token=1 + n) for n in range(2)]
    made.append(request("u", urgent, num_prompt=30, num_answer=60, at_s=0.02, token=9))
    world.run(made, checks=True)
    assert world.served["u"].num_preemptions == 0
    assert world.engine.stats().counts.num_preemptions > 0


def test_after_a_pause_of_the_process_not_everything_is_late() -> None:
    """A process that is stopped for 7 s would otherwise treat every request as late."""
    strict = service_of(TIERS[1], strict=True)  # 5 s
    world = TimedEngine(replace(CONFIG, max_num_seqs=1, late="demote"))
    for number in range(20):
        world.add(request(f"r{number}", strict, num_answer=4, token=1 + number))
    for _ in range(6):
        world.step()
    world.clock.now += 7.0
    world.run()
    assert all(served.error_code is None for served in world.served.values())
    counts = tier_of(world, "normal")
    assert counts.num_relegated == 0 and counts.num_expired == 0
    assert counts.num_ttft_met < 20, "the report says what clients saw"


def test_strict_requests_end_when_their_deadline_has_passed() -> None:
    world = TimedEngine(replace(CONFIG, max_num_seqs=1))
    made = [request("first", URGENT, num_answer=400)]
    strict = service_of(INTERACTIVE, strict=True)
    made += [request(f"s{n}", strict, at_s=0.01, token=2 + n, num_answer=4) for n in range(3)]
    made.append(request("relaxed", URGENT, at_s=0.01, token=9, num_answer=4))
    world.run(made, checks=True)
    for number in range(3):
        served = world.served[f"s{number}"]
        assert served.reason is FinishReason.ERROR and served.error_code == "deadline_exceeded"
        assert served.end_s is not None and 1.01 <= served.end_s <= 1.05
        assert served.num_tokens == 0
    assert world.served["relaxed"].num_tokens == 4
    counts = tier_of(world, "interactive")
    assert counts.num_expired == 3 and counts.num_promises_broken == 3
    stats = world.engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages


def test_a_running_strict_answer_ends_with_its_own_deadline() -> None:
    targets = Targets(e2e_s=0.5, is_strict=True)
    service = Service(tier="normal", weight=1.0, targets=targets)
    world = TimedEngine(CONFIG)
    world.run([request("long", service, num_answer=1000)], checks=True)
    served = world.served["long"]
    assert served.error_code == "deadline_exceeded" and 0 < served.num_tokens < 1000
    assert served.end_s is not None and 0.5 <= served.end_s < 0.55


def test_the_slack_of_those_that_decode_bounds_the_prompts() -> None:
    """A step of 1024 prompt tokens takes 26 ms; the target of 15 ms leaves room for about 380."""
    tiers = (replace(INTERACTIVE, tpot_s=0.015), FLEX)
    world = TimedEngine(replace(CONFIG, tiers=tiers, max_batched_tokens=1024))
    decoding = service_of(tiers[0])
    world.run([request("warm", decoding, num_prompt=900, num_answer=20, token=7)])
    world.add(request("d", decoding, at_s=world.clock.now, num_answer=300, token=8))
    for _ in range(20):
        world.step()
    world.add(request("long", PATIENT, at_s=world.clock.now, num_prompt=9000, token=9))
    longest = 0.0
    for _ in range(20):
        begun_s = world.clock.now
        world.step()
        longest = max(longest, world.clock.now - begun_s)
    assert 0.012 < longest <= 0.015
    world.run()
    counts = tier_of(world, "interactive")
    assert counts.num_tpot_met == counts.num_with_tpot == 2


def test_an_idle_tenant_does_not_flood_and_a_heavy_one_does_not_crowd_out() -> None:
    """Tenant `heavy` has 60 requests in the queue when `light` comes with 6: these are served in
    turns, not after the 60."""
    config = replace(CONFIG, max_num_seqs=1, tiers=(FLEX,), max_wait_s=60.0)
    world = TimedEngine(config)
    heavy = [
        request(f"h{n}", service_of(FLEX, "heavy"), num_prompt=128, num_answer=20, token=1 + n)
        for n in range(60)
    ]
    light = [
        request(
            f"l{n}",
            service_of(FLEX, "light"),
            at_s=1.0,
            num_prompt=128,
            num_answer=20,
            token=100 + n,
        )
        for n in range(6)
    ]
    world.run([*heavy, *light])
    last_light = max(world.served[f"l{n}"].end_s or 0.0 for n in range(6))
    num_heavy_before = sum((world.served[f"h{n}"].end_s or 0.0) < last_light for n in range(60))
    assert num_heavy_before < 25, "about 7 before they came, and 6 between them"
    tenants = {counts.tenant: counts for counts in stats_of(world).tenants}
    assert tenants["heavy"].service_s == pytest.approx(10 * tenants["light"].service_s, rel=0.1)


@settings(deadline=None, max_examples=10 if EVERY_CASE else 6)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(2, 150), st.integers(1, 40)),
        min_size=30,
        max_size=60,
    )
)
def test_counters_of_waiting_tenants_stay_within_the_proven_bound(
    jobs: list[tuple[int, int, int]],
) -> None:
    """In a real engine, at every step: two tenants that have waited since the same time differ by
    at most Delta and the work that one of them has in the seats (docs/internals/deadlines.md). All
    requests of the first tenant are in front of the others."""
    config = replace(CONFIG, tiers=(FLEX,), max_wait_s=60.0, max_batched_tokens=64)
    world = TimedEngine(config)
    world.run([request("warm", service_of(FLEX, "warm"), num_answer=20, num_prompt=100)])
    for number, (tenant, num_prompt, num_answer) in enumerate(sorted(jobs)):
        made = request(
            f"r{number}",
            service_of(FLEX, f"t{tenant}"),
            at_s=world.clock.now,
            num_prompt=num_prompt,
            num_answer=num_answer,
            token=1 + number,
        )
        world.add(made)
    shares, state = world.state.shares, world.state
    in_seats_s = delta_s = 0.0
    while world.engine.num_waiting:
        world.step()
        work = state.work
        delta_s = max(delta_s, state.delta_s)
        job_s = work.prompt_token * 150 + work.decode_row * 40
        in_seats_s = max(in_seats_s, config.max_num_seqs * job_s)
        waiting = {s.request.service.tenant for s in world.engine._scheduler.waiting}
        places = [shares._places[0, tenant] for tenant in waiting]
        counters = [shares.counter_s(place) for place in places]
        if len(counters) > 1:
            assert max(counters) - min(counters) <= delta_s + in_seats_s
    world.run()


def test_kept_and_broken_promises_and_goodput_are_counted() -> None:
    world = TimedEngine(replace(CONFIG, max_num_seqs=1))
    strict = service_of(TIERS[2])  # sheddable, with a target of 60 s
    short = replace(strict, targets=Targets(ttft_s=0.05))
    made = [request(f"k{n}", strict, token=1 + n, num_answer=30) for n in range(3)]
    made += [request(f"b{n}", short, token=9 + n, num_answer=30) for n in range(3)]
    world.run(made)
    counts = tier_of(world, "flex")
    assert counts.num_promises_kept + counts.num_promises_broken == 6
    assert counts.num_promises_kept == counts.num_ttft_met == counts.num_good < 6
    assert counts.num_goodput_tokens == 30 * counts.num_good
    assert counts.tardiness_s == pytest.approx(
        sum(max(0.0, (world.served[f"b{n}"].first_s or 0.0) - 0.05) for n in range(3))
    )


def test_a_request_that_leaves_is_forgotten_everywhere() -> None:
    world = TimedEngine(replace(CONFIG, max_num_seqs=1))
    for number in range(6):
        world.add(request(f"r{number}", service_of(FLEX, f"t{number}"), token=1 + number))
    world.step()
    for number in (0, 3, 5):
        world.engine.abort(f"r{number}")
    world.engine.check_integrity()
    world.run(checks=True)
    assert not world.state.shares._places and tier_of(world, "flex").num_finished == 3
