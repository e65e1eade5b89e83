"""Steps sent out while the one before runs: the same answers, and every page comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.coordinator import Coordinator
from moe_serve.cluster.steps.step_in_flight import RankWork, StepInFlight
from moe_serve.config.sections import CacheConfig, EngineConfig
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.model.step_plan import StepPlan
from tests.support.cluster.fault_drive import FaultDrive, fault_config, undisturbed
from tests.support.cluster.layouts import Answer, colocated, config, serve
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.sampled_cases import EVERY_CASE

VOCAB_SIZE = 4096  # of the demonstration model
NUM_STEPS = 3000  # of anything in here; more is a hang


def wanted_of(count: int, num_tokens: int = 14) -> list[GenerationRequest]:
    """Prompts that begin alike, choices of one prompt, and whatever a sampler can be asked for."""
    rng = np.random.default_rng(count)
    common = rng.integers(1, VOCAB_SIZE, 40).tolist()

    def request(index: int) -> GenerationRequest:
        own = rng.integers(1, VOCAB_SIZE, int(rng.integers(1, 30))).tolist()
        prompt = own if index % 3 == 0 else common[: 20 + index] if index % 3 == 1 else common + own
        return GenerationRequest(
            request_id=f"r{index}",
            prompt_token_ids=tuple(prompt),
            choice=index % 2,
            params=SamplingParams(
                max_tokens=num_tokens + index % 4,
                temperature=(0.0, 0.8, 1.3)[index % 3],
                seed=index,
                ignore_eos=index % 4 != 3,
                logprobs=2 if index % 3 == 0 else None,
                prompt_logprobs=1 if index % 7 == 5 else None,
                repetition_penalty=1.2 if index % 5 == 4 else 1.0,
                presence_penalty=0.4 if index % 5 == 2 else 0.0,
            ),
        )

    return [request(index) for index in range(count)]


def with_stops(
    wanted: Sequence[GenerationRequest], answers: Mapping[str, Answer]
) -> list[GenerationRequest]:
    """Every other request now ends at a token that comes in the middle of its answer."""

    def stopped(index: int, request: GenerationRequest) -> GenerationRequest:
        tokens = answers[request.request_id].token_ids
        if index % 2:
            return request
        stop = frozenset({tokens[len(tokens) // 2]})
        params = replace(request.params, stop_token_ids=type(request.params.stop_token_ids)(stop))
        return replace(request, params=params)

    return [stopped(index, request) for index, request in enumerate(wanted)]


@contextmanager
def counted() -> Iterator[list[StepInFlight]]:
    """The steps that are sent ahead."""
    sent: list[StepInFlight] = []
    launch_after = Coordinator.launch_after

    def noted(
        self: Coordinator, flight: StepInFlight, works: Mapping[str, RankWork]
    ) -> StepInFlight:
        sent.append(launch_after(self, flight, works))
        return sent[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "launch_after", noted)
        yield sent


@contextmanager
def cluster(of: EngineConfig) -> Iterator[ClusterEngine]:
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    assert isinstance(engine, ClusterEngine), "ranks were asked for"
    try:
        yield engine
    finally:
        engine.close()


def assert_all_back(engine: ClusterEngine) -> None:
    for _ in range(NUM_STEPS):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work, "the engine does not come to rest"
    engine.check_integrity()
    stats = engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "every page is free again"


@dataclass(slots=True)
class Client:
    """Adds and aborts at given steps."""

    engine: ClusterEngine
    answers: dict[str, Answer] = field(default_factory=dict)

    def drive(
        self, arrivals: Sequence[tuple[int, GenerationRequest]], aborts: Mapping[str, int]
    ) -> None:
        for step in range(NUM_STEPS):
            for when, request in arrivals:
                if when == step:
                    self.answers[request.request_id] = Answer()
                    self.engine.add(request)
            for name in [name for name, when in aborts.items() if when == step]:
                self.engine.abort(name)
            for delta in self.engine.step():
                self.answers[delta.request_id].take(delta)
            self.engine.check_integrity()
            is_over = all(answer.end is not None for answer in self.answers.values())
            if is_over and len(self.answers) == len(arrivals):
                return
        raise AssertionError(f"no end after {NUM_STEPS} steps")


@pytest.mark.sampled
@pytest.mark.parametrize(("attention", "experts"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_the_same_answers(attention: int, experts: int, micro_batches: int) -> None:
    of = config(attention, experts, micro_batches)
    plain = wanted_of(8)
    wanted = with_stops(plain, colocated(of, plain))
    expected = colocated(of, wanted)
    assert any(a.end is FinishReason.STOP for a in expected.values()), "some end by surprise"
    with counted() as sent, cluster(of) as engine:
        assert serve(engine, wanted) == expected
        assert_all_back(engine)
        assert sent, "no step was sent ahead"
        assert serve(engine, wanted) == expected, "and with what is cached"
        assert_all_back(engine)


def test_switched_off() -> None:
    of = config(1, 1, 2)
    off = replace(of, pipeline=replace(of.pipeline, ahead=False))
    wanted = wanted_of(4)
    with counted() as sent, cluster(off) as engine:
        assert serve(engine, wanted) == colocated(of, wanted)
        assert not sent


SMALL = config(2, 3, 2)
SMALL = replace(SMALL, cache=CacheConfig(num_pages=14))
SMALL = replace(SMALL, model=replace(SMALL.model, max_model_len=120))


@settings(max_examples=12 if EVERY_CASE else 4, deadline=None, derandomize=True)
@given(
    attention=st.integers(1, 2),
    is_small=st.booleans(),
    has_cache=st.booleans(),
    whens=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    aborts=st.dictionaries(st.integers(0, 8), st.integers(0, 50), max_size=3),
)
def test_any_schedule(
    attention: int,
    is_small: bool,
    has_cache: bool,
    whens: list[int],
    aborts: dict[int, int],
) -> None:
    """Arrivals and aborts at any step, and pages that are too few."""
    of = SMALL if is_small else config(2, 3, 2)
    of = replace(
        of,
        cache=replace(of.cache, prefix_cache=has_cache),
        cluster=replace(of.cluster, attention_ranks=attention),
    )
    plain = wanted_of(len(whens), 12)
    wanted = with_stops(plain, colocated(of, plain))
    expected = colocated(of, wanted)
    with cluster(of) as engine:
        client = Client(engine)
        client.drive(list(zip(whens, wanted, strict=True)), {f"r{k}": n for k, n in aborts.items()})
        assert_all_back(engine)
    for name, answer in client.answers.items():
        if answer.end is FinishReason.ABORT:
            count = len(answer.token_ids)
            assert answer.token_ids == expected[name].token_ids[:count], f"{name}, aborted"
        else:
            assert answer == expected[name], name


Change = Callable[[LocalExecutor, StepPlan, Mapping[int, EngineSequence]], StepOutcome | None]


@contextmanager
def executors_that(change: Change) -> Iterator[None]:
    """`change` may give an outcome in place of a rank's own."""
    run = LocalExecutor.run

    def changed(
        self: LocalExecutor, plan: StepPlan, sequences: Mapping[int, EngineSequence]
    ) -> StepOutcome:
        outcome = change(self, plan, sequences)
        return run(self, plan, sequences) if outcome is None else outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalExecutor, "run", changed)
        yield


@pytest.mark.parametrize(("attention", "experts"), [(1, 1), (2, 3)])
def test_a_row_that_fails(attention: int, experts: int) -> None:
    """It is computed once more by then; nobody else sees anything of it."""
    of, wanted = config(attention, experts, 2), wanted_of(6)
    expected = colocated(of, wanted)
    prompt = wanted[2].prompt_token_ids
    run, lengths = LocalExecutor.run, list[int]()

    def fail(
        executor: LocalExecutor, plan: StepPlan, sequences: Mapping[int, EngineSequence]
    ) -> StepOutcome | None:
        def is_it(key: int) -> bool:
            sequence = sequences[key]
            return (
                sequence.num_output_tokens >= 10
                and tuple(sequence.token_ids[: sequence.num_prompt_tokens]) == prompt
            )

        found = [p.sequence_id for p in plan.slices if is_it(p.sequence_id)]
        if not found:
            return None
        lengths.extend(sequences[key].num_output_tokens for key in found)
        outcome = run(executor, plan, sequences)
        bad = dict.fromkeys(found, (Sampled(0, False, None),))
        return replace(outcome, sampled={**outcome.sampled, **bad})

    with cluster(of) as engine, executors_that(fail):
        answers = serve(engine, wanted)
        assert_all_back(engine)
    failed, whole = answers.pop("r2"), expected.pop("r2")
    assert failed.end is FinishReason.ERROR and "NaN" in str(failed.error)
    assert failed.token_ids == whole.token_ids[:10]
    assert lengths == [10, 11], "it was not in the step ahead"
    assert answers == expected


@pytest.mark.parametrize(("attention", "experts"), [(1, 1), (2, 3)])
def test_steps_that_fail_as_a_whole(attention: int, experts: int) -> None:
    """What was sent ahead of them is void, on their rank alone; each sequence then runs alone."""
    of, wanted = config(attention, experts, 2), wanted_of(6)
    expected = colocated(of, wanted)
    seen, raised = [0], [0]

    def fail(
        executor: LocalExecutor, plan: StepPlan, sequences: Mapping[int, EngineSequence]
    ) -> StepOutcome | None:
        seen[0] += 1
        if seen[0] % 9 == 8 and len(plan.slices) > 1:
            raised[0] += 1
            raise RuntimeError("this step fails")
        return None

    with counted() as sent, cluster(of) as engine, executors_that(fail):
        assert serve(engine, wanted) == expected
        assert_all_back(engine)
    assert raised[0] >= 2, "no step failed"
    assert any(not flight.is_sound for flight in sent), "nothing was void"


@pytest.mark.sampled
@pytest.mark.parametrize("victim", ["expert-1", "attention-1", "attention-0"])
@pytest.mark.parametrize("after_steps", [8, 14])
def test_a_rank_is_killed_while_a_step_is_ahead(victim: str, after_steps: int) -> None:
    of = fault_config(2, 3)
    wanted = wanted_of(8, 20)
    expected = undisturbed(of, wanted)
    with counted() as sent, FaultDrive(of, ThreadStarter) as drive:

        def kill() -> None:
            begun = drive.engine._begun
            is_ahead.append(begun is not None and begun.flight in sent)
            name = drive.state(victim).name
            starter = drive.membership._starter
            assert starter is not None, "the cluster has started"
            starter.kill(name)

        is_ahead: list[bool] = []
        assert drive.serve(wanted, kill, after_steps) == expected, "a token changed"
        assert victim in drive.hurt.detected
        assert is_ahead == [True], "no step was ahead"
        drive.wait_until_complete()
        assert drive.serve(wanted) == expected
        assert_all_back(drive.engine)
