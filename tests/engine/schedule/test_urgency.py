"""`Urgency` decides as the old rule in three places did; the old rule is a model here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.leaving import LeavingSequences
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.arrival_order import FIFO
from moe_serve.engine.schedule.scheduler import Scheduler
from moe_serve.engine.schedule.urgency import Urgency
from tests.support.engine.fake_engine import make_engine, request
from tests.support.engine.fake_runner import FakeRunner
from tests.support.sampled_cases import EVERY_CASE

STEP_S = 5.0


class OldRule(Urgency):
    """The old rule: the order of the waiting queue's groups, the choice of a victim, and the order
    in which a step served running sequences."""

    def __init__(self, step_s: float) -> None:
        super().__init__(step_s)
        self.step_s = step_s

    def groups(
        self, line: Items[Sequence], levels: Collection[int], now: float
    ) -> Iterator[Items[Sequence]]:
        if len({s.request.priority for s in line}) < 2 or self.step_s == 0:
            yield line
            return
        groups: dict[int, list[Sequence]] = {}
        for sequence in line:
            num_steps = int((now - sequence.waits_since) / self.step_s)
            groups.setdefault(sequence.request.priority - num_steps, []).append(sequence)
        for urgency in sorted(groups):
            yield groups[urgency]

    def in_step(self, running: Items[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        decoding = [s for s in running if s.num_pending_tokens == 1]
        reading = [s for s in running if s.num_pending_tokens > 1]
        return decoding, reading

    def victim(self, running: Items[Sequence]) -> Sequence:
        return max(reversed(running), key=lambda s: s.request.priority)


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    made = []
    for key in range(draw(st.integers(1, 12))):
        given_request = GenerationRequest(
            request_id=f"r{key}",
            prompt_token_ids=(1,) * draw(st.integers(1, 5)),
            params=SamplingParams(),
            priority=draw(st.integers(-3, 3)),
            arrival_time=draw(st.floats(0.0, 40.0)),
        )
        sequence = Sequence(key, given_request)
        sequence.num_computed_tokens = draw(st.integers(0, sequence.num_tokens - 1))
        made.append(sequence)
    return made


def ids(groups: Iterator[Items[Sequence]]) -> list[list[int]]:
    return [[sequence.id for sequence in group] for group in groups]


@settings(deadline=None)
@given(sequences(), st.floats(0.0, 80.0), st.sampled_from((0.0, 0.5, STEP_S)))
def test_groups_order_and_victim_are_those_of_the_old_rule(
    line: list[Sequence], now: float, step_s: float
) -> None:
    new, old = Urgency(step_s), OldRule(step_s)
    levels = {new.level(sequence) for sequence in line}
    assert ids(new.groups(line, levels, now)) == ids(old.groups(line, levels, now))
    assert new.victim(line) is old.victim(line)
    assert new.in_step(line) == old.in_step(line)


@settings(deadline=None)
@given(sequences(), st.floats(0.0, 80.0))
def test_groups_follow_the_key(line: list[Sequence], now: float) -> None:
    urgency = Urgency(STEP_S)
    levels = {urgency.level(sequence) for sequence in line}
    groups = list(urgency.groups(line, levels, now))
    if len(levels) > 1:
        keys = [{urgency.key(sequence, now) for sequence in group} for group in groups]
        assert all(len(key) == 1 for key in keys) and keys == sorted(keys, key=min)
    assert sorted(s.id for group in groups for s in group) == [s.id for s in line]


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 30),  # the step before which it arrives
        st.integers(-2, 4),  # priority
        st.integers(1, 50),  # tokens of the prompt
        st.integers(1, 40),  # tokens of the answer
    ),
    min_size=2,
    max_size=14,
)


def schedules(
    arrivals: list[tuple[int, int, int, int]], pace_s: float, *, is_old: bool
) -> list[list[tuple[int, int, int]]]:
    """Returns (sequence, start, tokens) of every step, on a clock of `pace_s` a step."""
    now = [0.0]
    runner = FakeRunner()
    engine = make_engine(
        runner, num_pages=12, max_num_seqs=3, budget=40, max_wait_s=STEP_S, clock=lambda: now[0]
    )
    if is_old:
        use_old_rule(engine)
    number, left = 0, sorted(enumerate(arrivals), key=lambda item: item[1][0])
    while left or engine.has_work:
        while left and left[0][1][0] <= number:
            index, (_, priority, num_prompt, num_answer) = left.pop(0)
            made = request(f"r{index}", [1 + index] * num_prompt, max_tokens=num_answer)
            engine.add(replace(made, priority=priority, arrival_time=now[0]))
        engine.step()
        number += 1
        now[0] += pace_s
    return [[(s.sequence_id, s.start, len(s.token_ids)) for s in p.slices] for p in runner.plans]


def use_old_rule(engine: Engine) -> None:
    now = engine._scheduler
    config = SchedulerConfig(max_num_seqs=3, max_batched_tokens=40, max_passed_over_s=STEP_S)
    engine._scheduler = Scheduler(
        config, now.cache, now.sharing, FIFO, now._clock, urgency=OldRule(STEP_S)
    )
    engine._leaving = LeavingSequences(engine._scheduler, engine.drafts, engine._executor)


@settings(deadline=None, max_examples=40 if EVERY_CASE else 16)
@given(ARRIVALS, st.sampled_from((0.0, 0.3, 2.0)))
def test_every_schedule_is_that_of_the_old_rule(
    arrivals: list[tuple[int, int, int, int]], pace_s: float
) -> None:
    """Pages are few, so sequences are put back; seats are few, so they wait and age."""
    assert schedules(arrivals, pace_s, is_old=False) == schedules(arrivals, pace_s, is_old=True)
