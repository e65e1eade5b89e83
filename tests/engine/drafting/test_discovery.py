"""Repeated requests are found within some steps, in batches too. Time is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from moe_serve.config.sections import SpeculationConfig
from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.drafting_maker import drafting_maker
from moe_serve.engine.drafting.prediction import Predictions
from moe_serve.engine.drafting.shadows import Shadows
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import DraftResult
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.model.step_plan import StepPlan
from tests.engine.test_runs import EOS, engine_of, request
from tests.support.engine.fake_runner import FakeRunner, continuation

NUM_TOKENS = 96
STEP_S, ROW_S = 0.002, 0.0001


class VirtualTime(FakeRunner):
    """A runner whose steps take simulated time; the first ones with drafts take much longer."""

    def __init__(self, num_slow: int = 0, drafted_row_s: float = ROW_S, noise: float = 0.0) -> None:
        """`noise` is the deviation of the logarithm of a step's time."""
        super().__init__()
        self.now, self.num_slow = 0.0, num_slow
        self.drafted_row_s, self.noise, self.random = drafted_row_s, noise, random.Random(5)
        self.noiseless_s = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> Tensor:
        num_drafted = sum(piece.num_drafted for piece in plan.slices)
        seconds = STEP_S + ROW_S * plan.num_tokens + (self.drafted_row_s - ROW_S) * num_drafted
        if self.num_slow and num_drafted:
            self.num_slow -= 1
            seconds += STEP_S
        self.noiseless_s += seconds
        self.now += seconds * self.random.lognormvariate(0.0, self.noise)
        return super().run(plan)


def engine_with_drafts(num_slow: int) -> tuple[Engine, Drafting]:
    return engine_on(VirtualTime(num_slow))


def engine_on(time: VirtualTime) -> tuple[Engine, Drafting]:
    engine = engine_of(LocalExecutor(time, Sampler(frozenset([EOS]))), num_pages=128)
    config = SpeculationConfig(method="auto")
    drafting = drafting_maker(config, 50, engine.stop_rule, time)()
    assert drafting is not None
    engine.drafts.use(drafting, time)
    return engine, drafting


def answer(engine: Engine, prompts: list[list[int]]) -> tuple[int, list[DraftResult]]:
    """Answers the prompts together. Returns the number of steps, and the drafts."""
    found = {f"r{number}": list[int]() for number in range(len(prompts))}
    for name, prompt in zip(found, prompts, strict=True):
        engine.add(request(name, prompt, max_tokens=NUM_TOKENS, ignore_eos=True))
    num_steps, drafts = 0, list[DraftResult]()
    while engine.has_work:
        num_steps += 1
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
            drafts += [delta.drafted] if delta.drafted is not None else []
    for name, prompt in zip(found, prompts, strict=True):
        assert found[name] == continuation(prompt, NUM_TOKENS), "drafts change no token"
    return num_steps, drafts


def prompts_of(first: int, batch: int) -> list[list[int]]:
    return [[(first + 7 * i + j) % 47 + 1 for j in range(12)] for i in range(batch)]


@pytest.mark.parametrize("num_slow", [0, 4])
@pytest.mark.parametrize("batch", [1, 4, 6])
def test_repeated_requests_are_found_at_once(batch: int, num_slow: int) -> None:
    """Also if the first steps with drafts were slow, as they often are."""
    engine, _ = engine_with_drafts(num_slow)
    prompts = prompts_of(1, batch)
    plain, _ = answer(engine, prompts)
    assert plain >= NUM_TOKENS
    repeated, drafts = answer(engine, prompts)
    assert repeated < NUM_TOKENS / 4 and len(drafts) >= batch


def test_requests_that_repeat_again_are_found_behind_others_that_do_not() -> None:
    engine, _ = engine_with_drafts(0)
    prompts = prompts_of(1, 4)
    answer(engine, prompts)
    for number in range(4):
        num_steps, drafts = answer(engine, prompts_of(10 * number + 3, 4))
        wrong = sum(draft.num_drafted - draft.num_accepted for draft in drafts)
        assert num_steps <= NUM_TOKENS + 1 and wrong < NUM_TOKENS / 4
    repeated, _ = answer(engine, prompts)
    assert repeated < NUM_TOKENS / 3


def test_a_request_that_repeats_beside_others_delays_none() -> None:
    engine, _ = engine_with_drafts(0)
    same, *others = prompts_of(1, 4)
    answer(engine, [same])
    for number in range(3):
        changed = [[token % 47 + 1 + number for token in prompt] for prompt in others]
        num_steps, _ = answer(engine, [same, *changed])
        assert num_steps <= NUM_TOKENS + 1


@pytest.mark.parametrize("batch", [1, 4, 6])
def test_right_drafts_that_make_nothing_faster_cost_little(batch: int) -> None:
    """A drafted token takes longer than the step that it saves, and step times vary by a third."""
    step_s = STEP_S + batch * ROW_S
    time = VirtualTime(drafted_row_s=1.3 * step_s / batch, noise=0.3)
    engine, drafting = engine_on(time)
    num_rounds, drafted_s = 12, 0.0
    engine.drafts.use(None)
    time.noiseless_s = 0.0
    answer(engine, prompts_of(1, batch))
    plain_s = time.noiseless_s  # of each round
    engine.drafts.use(drafting, time)
    for _ in range(num_rounds):
        time.noiseless_s = 0.0
        answer(engine, prompts_of(1, batch))
        drafted_s += time.noiseless_s
    assert drafted_s < 1.03 * num_rounds * plain_s


def relative_times_with_predictions(edits_of: Callable[[int], int], num_requests: int) -> float:
    """Answers requests with predictions one after the other, where a drafted token takes half a
    step. `edits_of`: for each token of the prediction what is added to it. Returns the time over
    that without drafts."""
    time = VirtualTime(drafted_row_s=(STEP_S + ROW_S) / 2)
    engine, drafting = engine_on(time)
    drafting._search.drafters = (Predictions(),)  # the answers repeat themselves
    num_tokens = 0
    for number in range(num_requests):
        prompt = prompts_of(number, 1)[0]
        tokens = continuation(prompt, NUM_TOKENS)
        predicted = tuple((token + edits_of(i)) % 50 for i, token in enumerate(tokens))
        asked = request(f"r{number}", prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.add(replace(asked, prediction=predicted))
        found = list[int]()
        while engine.has_work:
            for delta in engine.step():
                found += delta.token_ids
        assert found == tokens, "drafts change no token"
        num_tokens += len(found)
    return time.noiseless_s / (num_tokens * (STEP_S + ROW_S))


def test_a_prediction_is_followed_behind_its_wrong_tokens() -> None:
    """A wrong draft costs as much as eight plain steps, but eleven right tokens follow."""
    edits = [1 if i % 12 == 11 else 0 for i in range(NUM_TOKENS)]
    assert relative_times_with_predictions(edits.__getitem__, 24) < 0.75


def test_predictions_that_are_never_right_cost_little() -> None:
    assert relative_times_with_predictions(lambda _: 7, 24) < 1.03


def test_a_draft_that_was_not_verified_is_compared_with_what_came() -> None:
    shadows = Shadows()
    sequence = Sequence(4, request("a", [1, 2, 3]))
    draft = Draft((10, 11, 12, 13, 14, 15), DraftSource.SUFFIX, 8)
    shadows.keep(sequence, draft)
    for token in (10, 11, 12):
        assert shadows.take(sequence) is None
        sequence.append(token)
    shadows.keep(sequence, Draft((99,), DraftSource.SUFFIX, 8))  # the first one waits
    sequence.append(13)
    found = shadows.take(sequence)
    assert found is not None and (found.draft, found.num_right) == (draft.cut(4), 4)
    assert shadows.take(sequence) is None, "a draft is judged once"


def test_a_wrong_token_decides_about_an_unverified_draft() -> None:
    shadows = Shadows()
    sequence = Sequence(4, request("a", [1, 2, 3]))
    shadows.keep(sequence, Draft((10, 11, 12, 13, 14), DraftSource.NGRAM, 3))
    sequence.append(10)
    sequence.append(40)
    found = shadows.take(sequence)
    assert found is not None and (len(found.draft.token_ids), found.num_right) == (2, 1)
    shadows.keep(sequence, Draft((10,), DraftSource.NGRAM, 3))
    shadows.forget([4])
    sequence.append(10)
    assert shadows.take(sequence) is None
