"""Answers that become much longer than those of their tier, in an engine on a virtual clock."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import replace

import pytest

from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.errors import ConfigError
from tests.support.engine.timed_engine import TimedEngine, request, service_of

CHAT = TierConfig(name="chat", weight=2.0, ttft_s=1.0, predicted_output_limit=2.0)
FLEX = TierConfig(name="flex", ttft_s=60.0)
NUM_KNOWN, USUAL, LONG = 80, 10, 300  # answers before the limit is known; tokens


def asked(name: str, at_s: float, num_answer: int, tier: TierConfig = CHAT) -> GenerationRequest:
    """Makes a request whose answer only the client's limit ends."""
    token = 1 + zlib.crc32(name.encode()) % 40_000
    return request(
        name, service_of(tier), at_s=at_s, num_prompt=16, num_answer=num_answer, token=token
    )


def served_by(
    chat: TierConfig,
    *later: GenerationRequest,
    num_seqs: int = 1,
    num_pages: int = 64,
    max_wait_s: float = 90.0,
) -> TimedEngine:
    """Runs requests that name the tier `chat` or `flex` in an engine that knows usual answers."""
    config = SchedulerConfig(
        max_num_seqs=num_seqs, max_batched_tokens=64, tiers=(chat, FLEX), max_wait_s=max_wait_s
    )
    world = TimedEngine(config, num_pages=num_pages)
    for _ in range(NUM_KNOWN):
        world.state.policy.limits.note(0, USUAL, is_complete=True)
    world.run([asked("first", 0.0, 5), *later], checks=True)
    return world


def num_runaways(world: TimedEngine) -> dict[str, int]:
    stats = world.engine.stats().service
    assert stats is not None
    return {counts.tier: counts.num_runaways for counts in stats.tiers}


def test_a_tier_may_end_them_at_the_predicted_limit() -> None:
    """The limit is learnt from answers that end by themselves, or where their clients want."""
    config = SchedulerConfig(tiers=(replace(CHAT, runaways="end"), FLEX))
    world = TimedEngine(config, num_pages=1024)
    usual = asked("usual", 0.0, LONG)
    params = replace(usual.params, min_tokens=USUAL, stop_token_ids=(0,))
    known = [asked(f"wanted-{i}", 0.0, USUAL) for i in range(NUM_KNOWN // 2)]
    known += [replace(usual, request_id=f"own-{i}", params=params) for i in range(NUM_KNOWN // 2)]
    least = asked("least", 1.0, LONG)
    world.run([*known, asked("early", 0.0, LONG)])
    world.run(
        [
            asked("runaway", 1.0, LONG),
            asked("short", 1.0, 15),
            replace(least, params=replace(least.params, min_tokens=40)),
            asked("other", 1.0, LONG, FLEX),
        ],
        checks=True,
    )
    found = {name: (each.num_tokens, each.reason) for name, each in world.served.items()}
    assert found["runaway"] == (2 * USUAL, FinishReason.LENGTH)
    assert found["early"][0] == LONG, "it began before anything was known"
    assert found["short"][0] == 15, "the client's own limit is lower"
    assert found["least"][0] == 40, "min_tokens holds"
    assert found["other"][0] == LONG, "its tier has no such limit"
    assert num_runaways(world) == {"chat": 2, "flex": 0}


@pytest.mark.parametrize("tier", [CHAT, FLEX], ids=["same-tier", "other-tier"])
def test_they_give_their_seat_to_those_that_wait_and_lose_no_token(tier: TierConfig) -> None:
    later = asked("runaway", 1.0, LONG), asked("waiting", 1.5, USUAL, tier)
    world = served_by(CHAT, *later)
    runaway, waiting = world.served["runaway"], world.served["waiting"]
    assert waiting.first_s is not None and waiting.first_s < 1.6
    assert runaway.num_tokens == LONG and runaway.num_preemptions == 1
    assert num_runaways(world) == {"chat": 1, "flex": 0}
    plain = served_by(replace(CHAT, predicted_output_limit=None), *later).served
    first_s, end_s = plain["waiting"].first_s, plain["runaway"].end_s
    assert first_s is not None and end_s is not None and first_s > end_s


def test_they_wait_behind_their_tier_and_are_put_back_twice_at_most() -> None:
    """Three bursts come while it runs; it lets all of the first two pass."""
    bursts = [[asked(f"{at}-{i}", at, USUAL) for i in range(20)] for at in (1.3, 3.0, 4.7)]
    world = served_by(CHAT, asked("runaway", 1.0, LONG), *itertools.chain(*bursts))
    runaway = world.served["runaway"]
    assert runaway.num_preemptions == 2 and runaway.num_tokens == LONG
    is_before = [
        [world.served[each.request_id].end_s < runaway.end_s for each in burst]  # type: ignore[operator]
        for burst in bursts
    ]
    assert [all(is_before[0]), all(is_before[1]), any(is_before[2])] == [True, True, False]


def test_it_ends_although_pages_are_always_short() -> None:
    """A runaway is the first to give its pages back, twice; then others do, and the age bound lets
    it start again."""
    stream = [asked(f"s{i}", 1.2 + 0.012 * i, 2 * USUAL - 1) for i in range(150)]
    made = asked("runaway", 1.0, LONG), *stream
    world = served_by(CHAT, *made, num_seqs=8, num_pages=21, max_wait_s=0.1)
    runaway, last = world.served["runaway"], world.served["s149"]
    assert runaway.num_tokens == LONG and runaway.num_preemptions > 2
    assert runaway.end_s is not None and last.end_s is not None and runaway.end_s < last.end_s


def test_a_limit_that_no_answer_reaches_changes_no_schedule() -> None:
    later = [asked(f"r{i}", 1 + 0.01 * i, 5 + 7 * i % 60, (CHAT, FLEX)[i % 2]) for i in range(24)]
    without = served_by(replace(CHAT, predicted_output_limit=None), *later, num_seqs=2)
    world = served_by(replace(CHAT, predicted_output_limit=1000.0), *later, num_seqs=2)
    assert world.served == without.served and world.clock.now == without.clock.now


@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_demoting_needs_an_order_by_deadlines(order: str) -> None:
    config = SchedulerConfig(tiers=(CHAT,), order=order)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tiers\.chat demotes .* set scheduler\.order to 'atc'"):
        TimedEngine(config)
    TimedEngine(replace(config, tiers=(replace(CHAT, runaways="end"),)))
