"""Whole engines on one model: 1A1E with each m and with `auto`, beside one process of two threads.

All are loaded at once and take turns, step by step; those that wait sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_serve.cluster.build import build_cluster
from moe_serve.cluster.rank_name import RankName
from moe_serve.cluster.rank_starter import LocalStarter
from moe_serve.cluster.secret import ClusterSecret
from moe_serve.cluster.stopwatch import usual
from moe_serve.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request import GenerationRequest
from moe_serve.engine.sampling_params import SamplingParams

COLOCATED = "colocated"
Cuts = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Usual seconds of a decode step, by engine: "colocated", "1" .. "4", "auto"."""

    batch: int
    context: int
    seconds: dict[str, float]
    has_equal_tokens: bool

    def best_fixed(self) -> tuple[str, float]:
        fixed = {name: s for name, s in self.seconds.items() if name.isdigit()}
        return min(fixed.items(), key=lambda item: item[1])


class PinnedStarter(LocalStarter):
    """Binds each rank to a core of its own as soon as its process is there."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: ClusterSecret,
        num_threads: int,
        cores: Sequence[int] | None,
    ) -> None:
        super().__init__(host, port, secret, num_threads)
        self._cores = cores

    def start(self, rank: RankName) -> None:
        super().start(rank)
        pid = self.pid(rank)
        if self._cores is not None and pid is not None:
            place = 0 if rank.role == "attention" else 1
            os.sched_setaffinity(pid, {self._cores[place]})  # its threads will inherit it


@contextmanager
def loaded_engines(
    model: Path, cuts: Sequence[Cuts], max_batch: int, context: int, cores: Sequence[int] | None
) -> Iterator[dict[str, DrivenEngine]]:
    """The colocated engine and one 1A1E cluster for each of `cuts`, by name."""
    with ExitStack() as stack:
        engines: dict[str, DrivenEngine] = {}
        config = _config(model, max_batch, context)
        engines[COLOCATED] = build_engine(config).engine
        for cut in cuts:
            config = _config(model, max_batch, context, cut)
            built = build_cluster(
                config,
                make_starter=lambda host, port, secret, threads: PinnedStarter(
                    host, port, secret, threads, cores
                ),
            )
            stack.callback(built.engine.close)
            engines[str(cut)] = built.engine
        yield engines


def time_engines(
    engines: dict[str, DrivenEngine], batch: int, num_prompt: int, num_warm: int, num_steps: int
) -> EngineTimes:
    """Prompts are read first; then `num_warm` steps, and `num_steps` that count, in turn."""
    num_output = 2 + num_warm + num_steps
    for engine in engines.values():
        _add(engine, batch, num_prompt, num_output)
    tokens: dict[str, dict[str, list[int]]] = {}
    for name, engine in engines.items():
        tokens[name] = {}
        _step(engine, tokens[name])
        assert len(tokens[name]) == batch, f"{name} has read {len(tokens[name])} prompts"
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(num_warm + num_steps):
        for name, engine in engines.items():
            taken_s = _step(engine, tokens[name])
            if index >= num_warm:
                seconds[name].append(taken_s)
    for name, engine in engines.items():
        while engine.num_running or engine.num_waiting:
            _step(engine, tokens[name])
    return EngineTimes(
        batch=batch,
        context=num_prompt + num_output,
        seconds={name: usual(each) for name, each in seconds.items()},
        has_equal_tokens=all(each == tokens[COLOCATED] for each in tokens.values()),
    )


def _config(model: Path, max_batch: int, context: int, cuts: Cuts | None = None) -> EngineConfig:
    """Without `cuts`: colocated, two threads. Ranks have one thread each."""
    is_pair = cuts is not None
    pages = max_batch * (-(-context // 16) + 1) + 1
    return EngineConfig(
        model=ModelConfig(path=str(model), num_threads=1 if is_pair else 2, max_model_len=context),
        cache=CacheConfig(num_pages=pages, prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_seqs=max_batch,
            max_batched_tokens=max_batch * context,  # all prompts in one step
            max_queued_requests=max_batch,
        ),
        # Engines take turns step by step: one that works ahead would do so in another one's turn.
        pipeline=PipelineConfig(micro_batches=1 if cuts is None else cuts, ahead=False),
        cluster=ClusterConfig(attention_ranks=1, expert_ranks=1) if is_pair else ClusterConfig(),
    )


def _add(engine: DrivenEngine, batch: int, num_prompt: int, num_output: int) -> None:
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = tuple(5 + (31 * index + 7 * place) % 997 for place in range(num_prompt))
        engine.add(
            GenerationRequest(request_id=f"{batch}-{index}", prompt_token_ids=prompt, params=params)
        )


def _step(engine: DrivenEngine, tokens: dict[str, list[int]]) -> float:
    start = time.perf_counter()
    deltas = engine.step()
    taken_s = time.perf_counter() - start
    for delta in deltas:
        assert delta.error is None, f"{delta.request_id}: {delta.error}"
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return taken_s
