"""A network is asked for guesses only while they are worth their time. Time is simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from moe_serve.engine.drafting.confidence import ConfidenceRates
from moe_serve.engine.drafting.draft import Draft, DraftProposal, DraftSource
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.guessing import Guessing
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_drafter import StepDrafter
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.verify import Verified
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.model.step_plan import StepPlan
from tests.engine.test_runs import EOS, engine_of, request
from tests.support.engine.fake_runner import FakeRunner, continuation

PROMPT = [1, 2, 3]
STEP_S, ROW_S = 0.7, 0.3  # a step, and each of its rows


@dataclass
class Time:
    """The simulated time."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(FakeRunner):
    """Steps take their time."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time

    def run(self, plan: StepPlan) -> Tensor:
        self._time.now += STEP_S + ROW_S * plan.num_tokens
        return super().run(plan)


@dataclass
class Network:
    """Implements GuessingNetwork. Its guesses are right unless `is_wrong`, and take `cost` each."""

    time: Time
    cost: float
    is_wrong: bool = False
    num_rounds: int = 0
    steps: list[int] = field(default_factory=list)  # that guessed

    def follow(self, plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]) -> None:
        """See GuessingNetwork."""
        self.sequences = sequences
        self.num_rounds += 1

    def guess(self, plan: StepPlan, found: Verified) -> dict[int, DraftProposal]:
        """See GuessingNetwork."""
        self.time.now += self.cost * plan.num_guesses
        self.steps.append(self.num_rounds)
        proposals = {}
        for key, run in found.sampled.items():
            tokens = [*self.sequences[key].token_ids, *(s.token_id for s in run)]
            guessed = continuation(tokens, plan.num_guesses)
            if self.is_wrong:
                guessed = [token % 48 + 1 for token in guessed]
            proposals[key] = DraftProposal("head", tuple(guessed), (60,) * len(guessed))
        return proposals


def seconds_per_token(network: Network | None, time: Time, num_requests: int = 8) -> float:
    """Answers one request after the other, and returns the simulated time for each token."""
    executor = LocalExecutor(TimedRunner(time), Sampler(frozenset([EOS])))
    engine: Engine = engine_of(executor)
    if network is not None:
        executor.drafter = StepDrafter(None, network)
        executor.drafter.clock = time
        guessing = Guessing(DraftSource.HEAD, 4)
        engine.drafts.use(drafting_of(engine, time, guessing=guessing), time)
    begun, num_tokens = time.now, 0
    for number in range(num_requests):
        answer = list[int]()
        engine.add(request(f"r{number}", PROMPT, max_tokens=150, ignore_eos=True))
        while engine.has_work:
            answer += [token for delta in engine.step() for token in delta.token_ids]
        assert answer == continuation(PROMPT, 150), "guesses change no token"
        num_tokens += len(answer)
    return (time.now - begun) / num_tokens


@cache
def plain_seconds_per_token() -> float:
    return seconds_per_token(None, Time())


def drafting_of(engine: Engine, time: Time, *drafters: Oracle, **kwargs: Any) -> Drafting:
    stop = engine.stop_rule
    return Drafting(drafters, stop, vocab_size=50, max_tokens=4, clock=time, **kwargs)


@pytest.mark.parametrize("cost", [0.15, 1.0])
def test_wrong_guesses_cost_next_to_nothing(cost: float) -> None:
    time = Time()
    off, on = plain_seconds_per_token(), seconds_per_token(Network(time, cost, True), time)
    assert off / on > 0.97


def test_right_guesses_that_cost_more_than_they_gain_are_not_made() -> None:
    """Five tokens take (0.7 + 5 x 0.3) + 4 x 1 seconds, and as many steps would take 5."""
    time = Time()
    network = Network(time, 1.0)
    off, on = plain_seconds_per_token(), seconds_per_token(network, time)
    assert off / on > 0.97
    assert len(network.steps) < 20


def test_right_guesses_that_gain_are_made_in_every_step() -> None:
    """Five tokens take 2.2 + 4 x 0.05 seconds in place of 5."""
    time = Time()
    network = Network(time, 0.05)
    off, on = plain_seconds_per_token(), seconds_per_token(network, time)
    assert off / on > 0.9 * 5 / 2.4
    assert len(network.steps) > 0.9 * network.num_rounds


def test_guessing_begins_again_when_it_gains_again() -> None:
    guessing, now_right = Guessing(DraftSource.HEAD, 4), False
    asked = list[int]()
    for step in range(6000):
        now_right = step >= 3000
        if guessing.ask(1, lambda rows: STEP_S + ROW_S * rows):
            asked.append(step)
            guessing.note_time(1, 0.2)
            guessing.note_round(1, 5.0 if now_right else 1.0, 2.2 if now_right else 1.0)
        else:
            guessing.rested(1)
    before, after = [s for s in asked if s < 3000], [s for s in asked if s >= 5000]
    assert len(before) < 60 and len(after) > 900


def test_batch_sizes_are_judged_apart() -> None:
    guessing = Guessing(DraftSource.HEAD, 4)
    for _ in range(50):
        for size, tokens in ((1, 3.0), (16, 1.05)):
            guessing.note_time(size, 0.1)
            guessing.note_round(size, tokens, 1.5)
    assert guessing.ask(1, lambda rows: 1.0) == 4 and guessing.ask(16, lambda rows: 1.0) == 0
    assert not guessing.is_due(16, lambda rows: 1.0)
    guessing.rested(16, 200)
    assert guessing.is_due(16, lambda rows: 1.0) and guessing.ask(16, lambda rows: 1.0) == 4


def test_a_cost_model_decides_until_guesses_were_measured() -> None:
    relative = lambda rows: 1.0 + 0.2 * (rows - 1)  # noqa: E731
    assert Guessing(DraftSource.HEAD, 4).ask(1, relative) == 4
    assert Guessing(DraftSource.SELF, 5).ask(1, relative) == 0, "each guess is most of a step"
    assert Guessing(DraftSource.SELF, 5, is_adaptive=False).ask(1, relative) == 5


def test_confidences_are_corrected_by_what_is_accepted() -> None:
    rates = ConfidenceRates()
    assert rates.survivals((90, 90), 1.0) == pytest.approx([0.95, 0.95**2])
    for _ in range(300):
        rates.note((95, 35), 1)  # the sure guess is right, the other is not
    sure, unsure = rates.survivals((92, 30), 1.0)
    assert sure > 0.95 and unsure < 0.05
    assert rates.survivals((92,), 0.5)[0] == pytest.approx(0.5 * sure, rel=0.05)


def test_a_draft_is_cut_with_its_confidences() -> None:
    draft = Draft((1, 2, 3), DraftSource.HEAD, 0, (90, 80, 70)).cut(2)
    assert (draft.token_ids, draft.confidences) == ((1, 2), (90, 80))


@pytest.mark.parametrize("batch", [1, 5])
def test_wrong_drafts_of_a_lookup_are_asked_for_rarely(batch: int) -> None:
    """Most steps ask for nothing at all, and a new sequence ends such a pause."""
    time, num_chosen = Time(), 0
    engine = engine_of(LocalExecutor(TimedRunner(time), Sampler(frozenset([EOS]))))
    oracle = Oracle({}, 0.0, vocab_size=50)
    drafting = drafting_of(engine, time, oracle)
    choose = drafting.choose

    def counted(*args: Any) -> dict[int, Draft]:
        nonlocal num_chosen
        num_chosen += 1
        return choose(*args)

    drafting.choose = counted  # type: ignore[method-assign]
    engine.drafts.use(drafting, time)
    for number in range(batch):
        engine.add(request(f"r{number}", PROMPT, max_tokens=150, ignore_eos=True))
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
        if num_steps == 100:
            engine.add(request("new", PROMPT, max_tokens=2, ignore_eos=True))
            before = num_chosen
        if num_steps == 102:
            assert num_chosen > before, "a new sequence is looked up"
    assert num_chosen < num_steps / 3
