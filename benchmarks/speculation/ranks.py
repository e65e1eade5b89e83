"""Compares the gain of drafts with separate ranks and in one process.

Each layout has an engine without drafts and one with, in the same run. Their turns alternate, and
their answers must be equal. Requests repeat in every turn, or are natural text that is new in each.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from moe_serve.cluster.started_cells import build_any_engine
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
)
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer

from .workloads import natural

_METHODS: tuple[SpeculationMethod, ...] = ("off", "auto")
_BATCHES = (1, 4, 8)
_LAYOUTS = {"one process": (0, 0), "1A1E": (1, 1)}


def gains_by_layout(rounds: int, num_threads: int) -> Iterator[str]:
    """Yields a line for each batch and layout: the gain, its range and the tokens of a step."""
    with contextlib.ExitStack() as opened:
        pairs = {}
        for name, (attention, experts) in _LAYOUTS.items():
            pairs[name] = [_engine(attention, experts, num_threads, m) for m in _METHODS]
            for engine in pairs[name]:
                opened.callback(engine.close)
        tokenizer = Tokenizer.load(demo_model_folder())
        for kind, batch in itertools.product(("repeated", "natural text"), _BATCHES):
            asked = functools.partial(_asked, tokenizer, kind, batch)
            for name, (off, on) in pairs.items():
                yield f"{kind}, batch {batch}, {name}: {_gain(off, on, asked, rounds)}"


def _asked(tokenizer: Tokenizer, kind: str, batch: int, number: int) -> list[GenerationRequest]:
    """Returns the requests of a turn: the same in each, or ever other ones at T = 0.7."""
    if kind == "repeated":
        return natural(tokenizer, batch, 160, 0.0)
    return natural(tokenizer, batch, 160, 0.7, first=(2 + number) * batch)


def _gain(
    off: DrivenEngine,
    on: DrivenEngine,
    asked: Callable[[int], list[GenerationRequest]],
    rounds: int,
) -> str:
    for engine in (off, on):
        _turn(engine, asked(-1), -1)  # the answers that are drafted later
    gains, num_tokens = list[float](), 0
    before = on.stats().counts.drafts.total.num_accepted
    for number in range(rounds):
        requests = asked(number)
        order = (off, on) if number % 2 else (on, off)
        turns = {engine is on: _turn(engine, requests, number) for engine in order}
        assert turns[False][1] == turns[True][1], "drafts changed a token"
        gains.append(turns[False][0] / turns[True][0])
        num_tokens += sum(map(len, turns[True][1].values()))
    accepted = on.stats().counts.drafts.total.num_accepted - before
    return (
        f"{statistics.median(gains):.2f}x ({min(gains):.2f} to {max(gains):.2f}), "
        f"{num_tokens / (num_tokens - accepted):.2f} tokens a step"
    )


def _turn(
    engine: DrivenEngine, asked: Sequence[GenerationRequest], number: int
) -> tuple[float, dict[str, list[int]]]:
    """Returns the seconds and the answers of a turn, by the requests' own ids."""
    answers = {each.request_id: list[int]() for each in asked}
    clock = time.perf_counter()
    for each in asked:
        engine.add(replace(each, request_id=f"{number}-{each.request_id}"))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, f"{delta.request_id}: {delta.error}"
            answers[delta.request_id.rpartition("-")[2]] += delta.token_ids
    return time.perf_counter() - clock, answers


def _engine(
    attention: int, experts: int, num_threads: int, method: SpeculationMethod
) -> DrivenEngine:
    config = EngineConfig(
        model=ModelConfig(num_threads=num_threads, max_model_len=1024),
        cache=CacheConfig(num_pages=512),
        scheduler=SchedulerConfig(max_num_seqs=8),
        cluster=ClusterConfig(attention_ranks=attention, expert_ranks=experts),
        speculation=SpeculationConfig(method=method),
    )
    return build_any_engine(config).engine
