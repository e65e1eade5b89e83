"""Measures how soon the requests of a killed attention rank go on, with and without copies.

    python benchmarks/run.py lost_rank --tokens 1500 --rounds 3

Eight requests run on 2A2E with the demonstration model. Once all of them generate, one attention
rank is killed. The time counts from there until each request that it computed has its next token.
With the memory tier they begin with copies of their pages; without it they read their prompts
again.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from pathlib import Path

import numpy as np

from harness.environment import write_report
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SpeculationConfig,
)
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams

_VICTIM = "attention-1"
_SETTLE_S = 0.5  # of generating, before the kill


Answers = dict[str, list[int]]


def requests(num_tokens: int, seed: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [
        GenerationRequest(
            request_id=f"{seed}-{index}",
            prompt_token_ids=tuple(rng.integers(10, 4000, num_tokens).tolist()),
            params=SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True),
        )
        for index in range(8)
    ]


def recovery(num_tokens: int, tier_bytes: int | None, seed: int) -> tuple[float, Answers]:
    """Returns the seconds from the kill to the last next token, and the answers."""
    config = EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(num_threads=1),
        cache=CacheConfig(memory_tier_bytes=tier_bytes, checkpoint_after_s=0.2),
        cluster=ClusterConfig(attention_ranks=2, expert_ranks=2),
    )
    engine = build_cluster(config).engine
    assert isinstance(engine, ClusterEngine), "ranks were asked for"
    try:
        wanted = requests(num_tokens, seed)
        answers: Answers = {each.request_id: [] for each in wanted}
        for each in wanted:
            engine.add(each)

        def step() -> set[str]:
            told = set()
            for delta in engine.step():
                answers[delta.request_id] += delta.token_ids
                told.add(delta.request_id)
            return told

        while not all(answers.values()):
            step()
        end = time.monotonic() + _SETTLE_S
        while time.monotonic() < end:
            step()
        roster = engine._coordinator.membership.roster
        link = roster[_VICTIM].link
        assert link is not None and link.hello is not None, f"{_VICTIM} is there"
        lost = set(engine._engines[_VICTIM]._sequences)
        begin = time.monotonic()
        os.kill(link.hello.pid, signal.SIGKILL)
        while lost:
            told = step()
            lost -= told if engine.stats().num_lost_ranks else set()
        seconds = time.monotonic() - begin
        while engine.has_work and any(len(answer) < 400 for answer in answers.values()):
            step()
        return seconds, answers
    finally:
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"replayed": [], "copied": []}
    for seed in range(arguments.rounds):
        seconds, replayed = recovery(arguments.tokens, None, seed)
        times["replayed"].append(seconds)
        seconds, copied = recovery(arguments.tokens, 256 * 2**20, seed)
        times["copied"].append(seconds)
        assert replayed == copied, "a token changed"
    ratios = [b / a for a, b in zip(times["replayed"], times["copied"], strict=True)]
    for name, values in times.items():
        print(f"{name}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    print(f"copied / replayed: {statistics.median(ratios):.2f}, tokens equal")
    write_report(arguments.json, {"times_s": times})
    return 0
