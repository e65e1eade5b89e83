"""Compares whole engines on one model: 1A1E with each m and with `auto`, and one process of two
threads.

All are loaded at once and take turns. In each turn an engine reads the same prompts and generates a
few tokens of each; the waiting engines sleep. There is a single pair of ranks for all values of m,
so nothing else differs. Each round has a turn of every engine in an order of its own, because a
turn is slower after some engines than after others.
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

from moe_serve.cluster.control.epoch import sparse_layers
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.members.rank_starter import LocalStarter
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.pipeline.costs.micro_batch_choice import (
    MAX_MICRO_BATCHES,
    MicroBatchChoice,
    MicroBatchChooser,
)
from moe_serve.pipeline.costs.online_costs import OnlineCosts
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepTiming
from moe_serve.planning.measure import usual

COLOCATED = "colocated"
CUTS = (1, 2, 3, 4, "auto")
STEPS_PER_TURN = 8  # that count; the prompts' step and the one after do not


def num_new_tokens() -> int:
    """Returns the number of tokens that each sequence generates in a turn."""
    return 2 + STEPS_PER_TURN


@dataclass(frozen=True, slots=True)
class LoadedEngines:
    colocated: DrivenEngine
    pair: DrivenEngine
    chooser: SwitchedChooser  # of the pair


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Usual seconds of a decode step by engine: "colocated", "1" to "4", "auto"."""

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
    """Binds each rank to a core of its own as soon as its process exists."""

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
    """Yields the colocated engine and a 1A1E cluster."""
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
    """Runs `num_warm` steps, in which `auto` looks for its m, and at least `num_steps` that
    count.
    """
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
        """Runs the prompts and one step that does not count; returns the seconds of the
        following steps.
        """
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
    """Returns the configuration: colocated with two threads, or ranks with one each."""
    pages = max_batch * (-(-context // 16) + 1) + 1
    return EngineConfig(
        speculation=SpeculationConfig(method="off"),
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


Rounds = list[dict[str, list[float]]]  # of each round the seconds of steps, by engine
_NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The relative difference between an engine's steps and those of the best of the others.

    0.05 means 5% slower. `low` and `high` contain 95% of bootstrap samples of rounds.
    """

    share: float
    low: float
    high: float


def seconds_of(rounds: Rounds, name: str) -> float:
    """Returns the lower quartile of the seconds of an engine's steps."""
    return usual([seconds for each in rounds for seconds in each[name]])


def behind_best(rounds: Rounds, name: str, others: Sequence[str]) -> Behind:
    """Compares an engine's steps with the best of others that took turns with it.

    The best of several equal engines looks better than it is. It is therefore chosen in one half of
    the rounds and compared in the other half, which needs two rounds. The interval is for the
    engine that is best over all rounds together.
    """
    halves = (rounds[::2], rounds[1::2])
    assert all(halves), f"{len(rounds)} rounds cannot be halved"
    shares = [
        seconds_of(judged, name) / seconds_of(judged, _best(searched, others)) - 1
        for searched, judged in (halves, halves[::-1])
    ]
    best, draw = _best(rounds, others), random.Random(0)
    samples = []
    for _ in range(_NUM_RESAMPLES):
        sample = draw.choices(rounds, k=len(rounds))
        samples.append(seconds_of(sample, name) / seconds_of(sample, best) - 1)
    samples.sort()
    low, high = samples[_NUM_RESAMPLES * 25 // 1000], samples[_NUM_RESAMPLES * 975 // 1000 - 1]
    return Behind(share=sum(shares) / 2, low=low, high=high)


def _best(rounds: Rounds, names: Sequence[str]) -> str:
    return min(names, key=lambda name: seconds_of(rounds, name))


class SwitchedChooser:
    """A chooser that the benchmark switches between fixed values of m and `auto`, within one
    engine.

    `cuts` is the number of micro-batches of the coming steps; None is `auto`, which learns only
    from its own steps.
    """

    def __init__(self) -> None:
        self._auto: MicroBatchChooser | None = None
        self._fixed = [
            MicroBatchChoice(m, (), "predicted best") for m in range(1, MAX_MICRO_BATCHES + 1)
        ]
        self.cuts: int | None = None
        self.chosen: list[int] = []  # by `auto`

    def choose(self, loads: Sequence[BatchLoad]) -> MicroBatchChoice:
        if self.cuts is None:
            assert self._auto is not None, "no cluster was built with this chooser"
            choice = self._auto.choose(loads)
            self.chosen.append(choice.num_micro_batches)
            return choice
        most = max(load.num_sequences for load in loads)
        return self._fixed[min(self.cuts, most) - 1]

    def observe(
        self, loads: Sequence[BatchLoad], choice: MicroBatchChoice, timing: StepTiming
    ) -> None:
        if self._auto is not None and all(choice is not each for each in self._fixed):
            self._auto.observe(loads, choice, timing)

    def watch(self, config: EngineConfig, model: ClusterModel) -> PoolWatch:
        """Starts to learn anew, for `build_cluster`."""
        ranks = Ranks(num_attention=1, num_experts=1)
        self._auto = MicroBatchChooser(OnlineCosts(len(sparse_layers(model.spec))), ranks)
        return PoolWatch(self, MAX_MICRO_BATCHES, None)
