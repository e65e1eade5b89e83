"""Answers of a layout, and of one process, to be compared bit for bit."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from experts.placement.plan_file import write_placement
from experts.placement.problem.placement import Placement
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from tests.support.cluster.thread_starter import ThreadStarter


@dataclass(slots=True)
class Answer:
    """What a client of the engine gets."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    end: object = None
    error: str | None = None

    def take(self, delta: TokenDelta) -> None:
        assert self.end is None, f"{delta.request_id} goes on after its end"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.end, self.error = delta.finish_reason, delta.error


def config(
    attention: int,
    experts: int,
    micro_batches: int | str = 2,
    *,
    folder: Path | None = None,
    dtype: str = "auto",
    kernels: str = "auto",
    budget: int = 64,
    **cluster: object,
) -> EngineConfig:
    """Returns a configuration with small steps, so that prompts are read in chunks and requests
    join and leave."""
    return EngineConfig(
        model=ModelConfig(
            path=None if folder is None else str(folder),
            dtype=dtype,  # type: ignore[arg-type]
            kernels=kernels,  # type: ignore[arg-type]
            num_threads=1,
        ),
        cache=CacheConfig(num_pages=256),
        scheduler=SchedulerConfig(max_num_seqs=6, max_batched_tokens=budget, max_held_s=1e6),
        pipeline=PipelineConfig(micro_batches=micro_batches),  # type: ignore[arg-type]
        cluster=ClusterConfig(
            attention_ranks=attention,
            expert_ranks=experts,
            heartbeat_s=10.0,
            **cluster,  # type: ignore[arg-type]
        ),
    )


def requests(count: int, vocab_size: int, num_tokens: int = 8) -> list[GenerationRequest]:
    """Returns prompts of 1 to 90 tokens; every other answer is sampled with a seed."""
    rng = np.random.default_rng(count)
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_token_ids=tuple(rng.integers(1, vocab_size, int(rng.integers(1, 90))).tolist()),
            params=SamplingParams(
                max_tokens=num_tokens + index % 3,
                temperature=float(index % 2),
                seed=index,
                ignore_eos=True,
                logprobs=2 if index % 3 == 0 else None,
                repetition_penalty=1.2 if index % 5 == 4 else 1.0,
            ),
        )
        for index in range(count)
    ]


def serve(engine: DrivenEngine, wanted: Sequence[GenerationRequest]) -> dict[str, Answer]:
    """Returns all answers; half of the requests arrive while the others run."""
    answers = {request.request_id: Answer() for request in wanted}
    late = list(wanted[len(wanted) // 2 :])
    for request in wanted[: len(wanted) // 2]:
        engine.add(request)
    while late or any(answer.end is None for answer in answers.values()):
        if late:
            engine.add(late.pop())
        for delta in engine.step():
            answers[delta.request_id].take(delta)
    engine.check_integrity()
    return answers


_answers: dict[str, dict[str, Answer]] = {}
_MAX_ENGINES = 4
_engines: OrderedDict[str, DrivenEngine] = OrderedDict()  # by their configurations; used last: last


def _engine(of: EngineConfig) -> DrivenEngine:
    """Returns an engine of this process, which may have served others before."""
    key = repr(of)
    if key not in _engines:
        _engines[key] = build_engine(of).engine
    _engines.move_to_end(key)
    while len(_engines) > _MAX_ENGINES:
        _engines.popitem(last=False)
    return _engines[key]


def served_alone(of: EngineConfig, wanted: Sequence[GenerationRequest]) -> dict[str, Answer]:
    """Returns the answers of an engine in this process that has nothing cached for them. Those of a
    configuration and requests that were served before are not computed again."""
    key = repr((of, wanted))
    if key not in _answers:
        salted = [replace(each, cache_salt=f"{len(_answers)} {each.cache_salt}") for each in wanted]
        _answers[key] = serve(_engine(of), salted)
    return deepcopy(_answers[key])


def colocated(
    of: EngineConfig, wanted: Sequence[GenerationRequest], wire_dtype: str = "auto"
) -> dict[str, Answer]:
    """Returns the answers of one process; with `wire_dtype`, rows are rounded as if they had been
    sent."""
    cluster = ClusterConfig(wire_dtype=wire_dtype)  # type: ignore[arg-type]
    alone = replace(of, cluster=cluster, pipeline=PipelineConfig(micro_batches=1))
    return served_alone(alone, wanted)


class _Errors(logging.Handler):
    """Keeps the messages of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def on_ranks(of: EngineConfig, wanted: Sequence[GenerationRequest]) -> dict[str, Answer]:
    """Returns the answers of a cluster of ranks. Asserts that no step failed: one that fails is
    computed again in another way, with the same answers."""
    engine, errors = build_cluster(of, make_starter=ThreadStarter).engine, _Errors()
    logging.getLogger("moe_serve").addHandler(errors)
    try:
        answers = serve(engine, wanted)
    finally:
        logging.getLogger("moe_serve").removeHandler(errors)
        engine.close()
    assert not errors.messages, errors.messages
    return answers


def random_placement(
    path: Path, layers: Sequence[int], num_experts: int, num_ranks: int, seed: int
) -> Path:
    """Returns a placement with some experts on several ranks, and at least one expert on every
    rank."""
    rng = np.random.default_rng(seed)

    def ranks(expert: int) -> tuple[int, ...]:
        first = expert if expert < num_ranks else int(rng.integers(num_ranks))
        copies = rng.choice(num_ranks, size=int(rng.integers(0, num_ranks)), replace=False)
        return tuple(dict.fromkeys([first, *copies.tolist()]))

    ranks_of = {layer: tuple(ranks(e) for e in range(num_experts)) for layer in layers}
    placement = Placement(num_ranks=num_ranks, num_experts=num_experts, ranks_of=ranks_of)
    write_placement(placement, path)
    return path
