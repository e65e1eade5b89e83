"""The start times of sequences and the tokens of steps, as /metrics shows them."""

from __future__ import annotations

import time

from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from tests.support.engine.fake_runner import FakeRunner


def make_engine(num_pages: int, max_num_seqs: int) -> Engine:
    return Engine(
        LocalExecutor(FakeRunner(), Sampler(frozenset())),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_batched_tokens=64),
        num_pages=num_pages,
        micro_batches=1,
        max_model_len=num_pages * 16,
        eos_token_ids=frozenset(),
    )


def request(name: str, num_prompt: int, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(1 + i % 7 for i in range(num_prompt)),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )


def starts(engine: Engine) -> dict[str, set[float | None]]:
    """Returns the start times of each request, from its deltas."""
    found: dict[str, set[float | None]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, set()).add(delta.started_at)
    return found


def test_every_delta_says_when_its_sequence_started() -> None:
    engine = make_engine(num_pages=8, max_num_seqs=1)
    before = time.monotonic()
    engine.add(request("a", 3, 4))
    engine.add(request("b", 3, 4))
    found = starts(engine)
    (first,), (second,) = found["a"], found["b"]
    assert first is not None and second is not None
    assert before <= first < second <= time.monotonic(), "b had to wait for a's seat"


def test_a_preempted_sequence_keeps_its_start() -> None:
    engine = make_engine(num_pages=4, max_num_seqs=2)
    engine.add(request("a", 20, 30))
    engine.add(request("b", 20, 30))
    found = starts(engine)
    assert engine.stats().counts.num_preemptions > 0
    assert all(len(times) == 1 for times in found.values())


def test_the_tokens_of_steps_are_counted() -> None:
    engine = make_engine(num_pages=8, max_num_seqs=2)
    engine.add(request("a", 5, 3))
    starts(engine)
    counted = engine.stats().counts.step_tokens
    assert counted.num_tokens == 5 + 3, "the prompt, and what was generated, as vLLM counts"
    assert counted.num_steps[:2] == (2, 1) and sum(counted.num_steps) == 3


def test_the_tokens_of_steps_add_up_to_those_of_the_counters() -> None:
    """After preemptions, recomputed tokens count again in both."""
    engine = make_engine(num_pages=4, max_num_seqs=2)
    engine.add(request("a", 20, 30))
    engine.add(request("b", 20, 30))
    starts(engine)
    counts = engine.stats().counts
    assert counts.num_preemptions > 0
    assert counts.step_tokens.num_tokens == counts.num_prompt_tokens + counts.num_generated_tokens
