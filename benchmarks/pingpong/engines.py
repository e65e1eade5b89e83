"""Whole engines on one model: 1A1E with each m and with `auto`, beside one process of two threads.

Both are loaded at once and take turns: in each the same prompts are read and a few tokens of each
generated; who waits sleeps. The pair is one, whatever its cut, so that nothing else differs. A
round has a turn of everyone, in an order of its own: what ran just before makes a turn slower.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_serve.cluster.build import build_cluster
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members.rank_starter import LocalStarter
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from pingpong.behind import Behind, Rounds, behind_best, seconds_of
from pingpong.switched_chooser import SwitchedChooser

COLOCATED = "colocated"
CUTS = (1, 2, 3, 4, "auto")
STEPS_PER_TURN = 8  # that count; the prompts' step and the one after do not


def num_new_tokens() -> int:
    """Tokens of each sequence in a turn."""
    return 2 + STEPS_PER_TURN


@dataclass(frozen=True, slots=True)
class LoadedEngines:
    colocated: DrivenEngine
    pair: DrivenEngine
    chooser: SwitchedChooser  # of the pair


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Usual seconds of a decode step, by engine: "colocated", "1" .. "4", "auto"."""

    batch: int
    context: int
    seconds: dict[str, float]
    auto_behind: Behind
    auto_cuts: dict[int, int]  # micro-batches -> steps of `auto` that had them
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
    model: Path, max_batch: int, num_prompt: int, cores: Sequence[int] | None
) -> Iterator[LoadedEngines]:
    """The colocated engine and a 1A1E cluster."""
    context, chooser = num_prompt + num_new_tokens(), SwitchedChooser()
    colocated = build_engine(_config(model, max_batch, context, is_pair=False)).engine
    built = build_cluster(
        _config(model, max_batch, context, is_pair=True),
        make_starter=lambda host, port, secret, threads: PinnedStarter(
            host, port, secret, threads, cores
        ),
        watch_for=chooser.watch,
    )
    try:
        yield LoadedEngines(colocated, built.engine, chooser)
    finally:
        built.engine.close()


def time_engines(
    engines: LoadedEngines, batch: int, num_prompt: int, num_warm: int, num_steps: int
) -> EngineTimes:
    """`num_warm` steps, in which `auto` looks for its m, and at least `num_steps` that count."""
    turns = _Turns(engines, batch, num_prompt)
    for cut in CUTS[:-1]:
        turns.run(str(cut))
    for _ in range(-(-num_warm // STEPS_PER_TURN)):
        turns.run("auto")
    engines.chooser.chosen.clear()
    names, order = [COLOCATED, *map(str, CUTS)], random.Random(batch)
    rounds: Rounds = []
    for _ in range(-(-num_steps // STEPS_PER_TURN)):
        order.shuffle(names)
        rounds.append({name: turns.run(name) for name in names})
    return EngineTimes(
        batch=batch,
        context=num_prompt + num_new_tokens(),
        seconds={name: seconds_of(rounds, name) for name in (COLOCATED, *map(str, CUTS))},
        auto_behind=behind_best(rounds, "auto", [str(cut) for cut in CUTS[:-1]]),
        auto_cuts=dict(sorted(Counter(engines.chooser.chosen).items())),
        has_equal_tokens=all(each == turns.tokens[COLOCATED] for each in turns.tokens.values()),
    )


class _Turns:
    """Runs the same batch repeatedly on the engine whose turn it is."""

    def __init__(self, engines: LoadedEngines, batch: int, num_prompt: int) -> None:
        self._engines, self._batch, self._num_prompt = engines, batch, num_prompt
        self.tokens: dict[str, dict[str, list[int]]] = {}

    def run(self, name: str) -> list[float]:
        """Prompts, one step that does not count, and the seconds of those that do."""
        engine, chooser = self._engines.pair, self._engines.chooser
        if name == COLOCATED:
            engine = self._engines.colocated
        else:
            chooser.cuts = None if name == "auto" else int(name)
        tokens: dict[str, list[int]] = {}
        _add(engine, self._batch, self._num_prompt)
        _step(engine, tokens)
        assert len(tokens) == self._batch, f"{name} has read {len(tokens)} prompts"
        taken_s = [_step(engine, tokens) for _ in range(1 + STEPS_PER_TURN)]
        assert not engine.num_running, f"{name}: {engine.num_running} sequences go on"
        self.tokens[name] = tokens
        return taken_s[1:]


def _config(model: Path, max_batch: int, context: int, *, is_pair: bool) -> EngineConfig:
    """Colocated with two threads, ranks with one each."""
    pages = max_batch * (-(-context // 16) + 1) + 1
    return EngineConfig(
        model=ModelConfig(path=str(model), num_threads=1 if is_pair else 2, max_model_len=context),
        cache=CacheConfig(num_pages=pages, prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_seqs=max_batch,
            max_batched_tokens=max_batch * context,  # all prompts in one step
            max_queued_requests=max_batch,
        ),
        cluster=ClusterConfig(attention_ranks=1, expert_ranks=1) if is_pair else ClusterConfig(),
    )


def _add(engine: DrivenEngine, batch: int, num_prompt: int) -> None:
    params = SamplingParams(max_tokens=num_new_tokens(), temperature=0.0, ignore_eos=True)
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
