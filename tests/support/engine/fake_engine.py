"""An engine on a fake model, its requests, and a run until it is idle."""

from __future__ import annotations

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule.policy.arrival_order import FIFO
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from tests.support.engine.fake_runner import FakeRunner


def make_engine(
    runner: FakeRunner,
    *,
    num_pages: int = 64,
    max_num_seqs: int = 8,
    budget: int = 64,
    micro_batches: int = 1,
    eos: frozenset[int] = frozenset(),
    policy: BatchPolicy = FIFO,
    max_wait_s: float = 5.0,
    clock: Clock = REAL_CLOCK,
) -> Engine:
    return Engine(
        LocalExecutor(runner, Sampler(eos)),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_batched_tokens=budget, max_passed_over_s=max_wait_s
        ),
        num_pages=num_pages,
        page_size=runner.page_size,
        micro_batches=micro_batches,
        max_model_len=160,
        eos_token_ids=eos,
        policy=policy,
        clock=clock,
    )


def request(name: str, prompt: list[int], **params: object) -> GenerationRequest:
    fields = {"temperature": 0.0, "max_tokens": 10} | params
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**fields),  # type: ignore[arg-type]
    )


def run(engine: Engine) -> dict[str, list[TokenDelta]]:
    """Steps until idle, checking integrity after every step."""
    result: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step():
            result.setdefault(delta.request_id, []).append(delta)
        engine.check_integrity()
    stats = engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "all pages are free when nothing runs"
    return result


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
