"""Steps that give runs of several tokens: answers, ends, usage and routes equal those of one token
per step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from moe_serve import LLM, Constraint, RequestOutput, SamplingParams
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor, StepExecutor
from moe_serve.engine.execute.step_outcome import RowFailure, StepOutcome
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.sampling.sampler import Sampled, Sampler
from moe_serve.model.step_plan import StepPlan
from tests.support.engine.fake_runner import FakeRunner, continuation
from tests.support.engine.runs import RunExecutor, give_runs

EOS = 7


def make_engine(runner: FakeRunner, num_pages: int = 64) -> Engine:
    return engine_of(LocalExecutor(runner, Sampler(frozenset([EOS]))), num_pages)


def engine_of(executor: StepExecutor, num_pages: int = 64) -> Engine:
    return Engine(
        executor,
        scheduler=SchedulerConfig(max_num_seqs=6, max_batched_tokens=64),
        num_pages=num_pages,
        micro_batches=2,
        max_model_len=160,
        eos_token_ids=frozenset([EOS]),
    )


def request(name: str, prompt: list[int], **params: Any) -> GenerationRequest:
    wishes = SamplingParams(**({"temperature": 0.0, "max_tokens": 10} | params))
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=wishes)


@dataclass
class Answer:
    """Everything that an engine reported about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: object = None
    end: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None


def run(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Answer]:
    for one in requests:
        engine.add(one)
    answers = {one.request_id: Answer() for one in requests}
    while engine.has_work:
        for delta in engine.step():
            note(answers[delta.request_id], delta)
        engine.check_integrity()
    stats = engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "all pages are free when nothing runs"
    assert stats.counts.num_generated_tokens == sum(len(a.token_ids) for a in answers.values())
    assert (
        stats.counts.step_tokens.num_tokens
        == stats.counts.num_prompt_tokens + stats.counts.num_generated_tokens
    )
    return answers


def note(answer: Answer, delta: TokenDelta) -> None:
    assert answer.end is None, "nothing comes behind the end"
    answer.token_ids += delta.token_ids
    if delta.logprobs is not None:
        assert len(delta.logprobs) == len(delta.token_ids)
        answer.logprobs += delta.logprobs
    answer.prompt_logprobs = answer.prompt_logprobs or delta.prompt_logprobs
    answer.end, answer.stop_token_id = delta.finish_reason, delta.stop_token_id
    answer.error = delta.error


def crowd(rng: random.Random) -> list[GenerationRequest]:
    def one(i: int) -> GenerationRequest:
        return request(
            f"r{i}",
            [rng.randrange(1, 48) for _ in range(rng.choice([1, 5, 15, 16, 30, 70]))],
            max_tokens=rng.choice([1, 2, 3, 4, 9, 40, 90]),
            min_tokens=rng.choice([0, 0, 1]),
            temperature=rng.choice([0.0, 1.5]),
            seed=i,
            stop_token_ids=rng.choice([(), (8, 30), (1, 2, 3)]),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice([None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
        )

    return [one(i) for i in range(rng.randint(1, 12))]


@pytest.mark.parametrize("seed", range(25))
def test_random_requests(seed: int) -> None:
    """Pages are few, so sequences are preempted, and a context becomes full."""
    requests, num_pages = crowd(random.Random(seed)), random.Random(seed).choice([10, 16, 64])
    expected = run(make_engine(FakeRunner(), num_pages), requests)
    engine = make_engine(FakeRunner(), num_pages)
    executor = give_runs(engine, most=4, seed=seed)
    assert run(engine, requests) == expected
    assert executor.lengths


class PoisonedRunner(FakeRunner):
    """One token makes every later row of its sequence NaN."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self.nan_after_token = poison


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(8))
def test_a_run_ends_before_a_row_that_is_not_finite(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(1, 48) for _ in range(9)]
    poison = continuation(prompt, 7)[rng.randrange(6)]
    requests = [request("bad", prompt, ignore_eos=True), request("good", [1, 2, 3], max_tokens=20)]
    expected = run(make_engine(PoisonedRunner(poison)), requests)
    engine = make_engine(PoisonedRunner(poison))
    give_runs(engine, most=4, seed=seed)
    assert run(engine, requests) == expected
    assert expected["bad"].end is FinishReason.ERROR and "NaN" in str(expected["bad"].error)


class FailingSampler(Sampler):
    """Fails to sample one position of one request."""

    def sample(self, logits_SV: Tensor, points: Any, masks: Any = None) -> list[Sampled]:
        if any(p.params.seed == 99 and p.num_output_tokens == 5 for p in points):
            raise RuntimeError("no token for this one")
        return super().sample(logits_SV, points, masks)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
def test_a_sampler_that_raises_within_a_run_fails_one_request(seed: int) -> None:
    engine = engine_of(LocalExecutor(FakeRunner(), FailingSampler(frozenset([EOS]))))
    give_runs(engine, most=4, seed=seed)
    answers = run(
        engine,
        [
            request("bad", [1, 2], seed=99, ignore_eos=True),
            request("good", [4, 5], ignore_eos=True),
        ],
    )
    assert answers["bad"].token_ids == continuation([1, 2], 5)
    assert answers["bad"].end is FinishReason.ERROR and answers["bad"].error is not None
    assert answers["good"].token_ids == continuation([4, 5], 10)


class Scripted:
    """An executor that gives the outcomes of a script, one for each step."""

    expert_memory = None

    def __init__(self, *outcomes: StepOutcome) -> None:
        self._outcomes = list(outcomes)

    def run(self, plan: StepPlan, sequences: object) -> StepOutcome:
        return self._outcomes.pop(0)

    def forget(self, sequence_ids: list[int]) -> None: ...

    def clear_pages(self, pages: list[int]) -> None: ...

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None: ...

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return [True] * len(pages)


def tokens(*ids: int) -> tuple[Sampled, ...]:
    return tuple(Sampled(token, True, None) for token in ids)


def scripted(*outcomes: StepOutcome) -> list[TokenDelta]:
    engine = engine_of(Scripted(*outcomes))
    engine.add(request("a", [1, 2], max_tokens=6, min_tokens=2, stop_token_ids=(30,)))
    deltas = []
    for _ in outcomes:
        deltas += engine.step()
        engine.check_integrity()
    assert not engine.has_work
    return deltas


@pytest.mark.parametrize(
    ("run_ids", "told", "reason", "stop"),
    [
        ([3, 4, 5, 6, 8, 9, 10, 11], [3, 4, 5, 6, 8, 9], FinishReason.LENGTH, None),
        ([3, 4, 5, 6, 8, EOS], [3, 4, 5, 6, 8, EOS], FinishReason.STOP, EOS),
        ([3, 4, EOS, 6], [3, 4, EOS], FinishReason.STOP, EOS),
        ([EOS, 4, 30, EOS], [EOS, 4, 30], FinishReason.STOP, 30),
        ([EOS, EOS, 4], [EOS, EOS], FinishReason.STOP, EOS),
    ],
)
def test_a_run_is_cut_at_the_first_end(
    run_ids: list[int], told: list[int], reason: FinishReason, stop: int | None
) -> None:
    failed = RowFailure("behind the end")
    (delta,) = scripted(StepOutcome(sampled={0: tokens(*run_ids)}, failures={0: failed}))
    assert list(delta.token_ids) == told
    assert (delta.finish_reason, delta.stop_token_id, delta.error) == (reason, stop, None)


def test_what_came_before_a_failure_is_told() -> None:
    first, last = scripted(
        StepOutcome(sampled={0: tokens(3, 4, 5)}, failures={0: RowFailure("no row 3")})
    )
    assert (first.token_ids, first.finish_reason) == ((3, 4, 5), None)
    assert (last.token_ids, last.finish_reason, last.error) == ((), FinishReason.ERROR, "no row 3")
    invalid = (*tokens(3), Sampled(0, False, None), *tokens(5))
    first, last = scripted(StepOutcome(sampled={0: invalid}))
    assert first.token_ids == (3,) and "NaN" in str(last.error)


@pytest.mark.parametrize("outcome", [StepOutcome(), StepOutcome(sampled={0: ()})])
def test_no_token_for_a_sequence_that_caught_up(outcome: StepOutcome) -> None:
    (delta,) = scripted(outcome)
    assert delta.error == "the step returned no token for this request"


def test_the_next_step_computes_the_last_token_of_a_run() -> None:
    engine = engine_of(Scripted(StepOutcome(sampled={0: tokens(3, 4, 5)})))
    engine.add(request("a", [1, 2]))
    engine.step()
    (sequence,) = engine._scheduler.running
    assert sequence.token_ids == [1, 2, 3, 4, 5] and sequence.num_computed_tokens == 4
    (piece,) = engine.begin_step().slices  # type: ignore[union-attr]
    assert (piece.start, piece.token_ids.tolist()) == (4, [5])


PROMPT = "Once upon a time"
JSON = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
LEAD = 'start: thought @answer\nthought[suffix="e"]: /(?s:.*)/\n'
ENGINE_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 3, "top_p": 0.9},
    "n": {"temperature": 1, "seed": 4, "n": 2},
    "stop strings": {"temperature": 0, "stop": ["the", " and", "a s"]},
    "included stop": {"temperature": 0, "stop": [" was"], "include_stop_str_in_output": True},
    "late stop": {"temperature": 0, "stop": ["a"], "min_tokens": 9},
    "penalties": {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "repetition": {"temperature": 1, "seed": 5, "repetition_penalty": 1.3, "logprobs": 3},
    "bad words": {"temperature": 0, "bad_words": ["little", "there was", "the"]},
    "json": {"temperature": 1, "seed": 6, "constraint": Constraint("json_schema", JSON)},
    "regex": {"temperature": 0, "constraint": Constraint("regex", "[a-c]{3}-[0-9]{1,12}")},
    "led": {"temperature": 1, "seed": 7, "constraint": Constraint("regex", "[0-9]{4}", LEAD)},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "one token": {"temperature": 0, "max_tokens": 1},
    "three tokens": {"temperature": 0, "max_tokens": 3},
    "thinking": {
        "temperature": 1,
        "seed": 8,
        "thinking_token_budget": 5,
        "thinking_markers": ThinkingMarkers(
            end=(45, 46), closings=((45, 46),), openings=((47,),), blanks=(), is_open=True
        ),
    },
}


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM, RunExecutor]]:
    with LLM(speculation="off") as alone, LLM(speculation="off") as other:
        yield alone, other, give_runs(other._engine, most=4, seed=1)


def told(output: RequestOutput) -> list[object]:
    return [output.prompt_logprobs, output.outputs]


def test_answers_of_the_demonstration_model(llms: tuple[LLM, LLM, RunExecutor]) -> None:
    """Each kind of request runs alone, then all run in one batch."""
    alone, other, executor = llms
    params = {k: SamplingParams(**({"max_tokens": 16} | p)) for k, p in ENGINE_PARAMS.items()}
    prompts = [f"{PROMPT} {i}" for i in range(len(params))]
    wishes = list(params.values())
    expected = alone.generate(prompts, wishes, use_progress_bar=False)
    together = other.generate(prompts, wishes, use_progress_bar=False)
    for kind, one, two in zip(params, expected, together, strict=True):
        assert told(one) == told(two), kind
    single = [
        other.generate([prompt], wish, use_progress_bar=False)[0]
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    for kind, one, two in zip(params, expected, single, strict=True):
        assert told(one)[1] == told(two)[1], kind
    assert max(executor.lengths) == 4 and sum(executor.lengths) / len(executor.lengths) > 1.5


class Recorder:
    """A listener that keeps the experts of every token."""

    has_weights = False

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], tuple[int, bytes]] = {}

    def wants(self, step: int, sequences: Any) -> list[int]:
        return list(sequences)

    def take(self, records: Any) -> None:
        for record in records:
            for i, token in enumerate(record.token_ids_N.tolist()):
                place = (record.request_id, record.start + i)
                assert place not in self.rows, "each row is told once"
                self.rows[place] = (token, record.expert_ids_NLK[i].tobytes())


def test_routes_of_runs(llms: tuple[LLM, LLM, RunExecutor]) -> None:
    """Listeners get each computed token once, with the experts that led to it."""
    heard, experts = [], []
    for llm in llms[:2]:
        engine, recorder = llm._engine, Recorder()
        assert isinstance(engine, Engine)
        routes: RouteListeners = engine._routes
        routes.add(recorder)
        for name, prompt, count in (("x", [5, 6, 7], 30), ("y", [9] * 20, 17)):
            wishes = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            engine.add(
                GenerationRequest(
                    request_id=name,
                    prompt_token_ids=tuple(prompt),
                    params=wishes,
                    wants_routed_experts=True,
                    cache_salt="routes",
                )
            )
        found: dict[str, list[list[list[int]]]] = {"x": [], "y": []}
        while engine.has_work:
            for delta in engine.step():
                assert len(delta.routed_experts or ()) == len(delta.token_ids)
                found[delta.request_id] += [e.lists() for e in delta.routed_experts or ()]
        routes.remove(recorder)
        heard.append(recorder.rows)
        experts.append(found)
    assert heard[0] == heard[1] and len(heard[0]) == 3 + 29 + 20 + 16
    assert experts[0] == experts[1] and all(experts[0]["x"])
