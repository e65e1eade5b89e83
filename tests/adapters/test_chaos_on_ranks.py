"""Adapters come and go at random while requests run, are cancelled, and ranks are lost: every
answer is that of the content that its name stood for, and none finds pages of another content.

A short version of the benchmark `adapter_soak`."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.cluster.control.rank_name import all_ranks
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.engine.build import build_engine
from soak.adapter_chaos import Chaos, Expected, Plan, answers_of
from tests.support.adapters.adapter_folders import EXPERTS, write_esft, write_lora
from tests.support.cluster.layouts import config
from tests.support.cluster.thread_starter import ThreadStarter

PLAN = Plan(num_requests=60, num_names=5, load_share=0.3, unload_share=0.1, cancel_share=0.1)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("chaos")
    return [
        write_lora(root / "attention", base),
        write_lora(root / "experts", base, seed=3, pattern=EXPERTS),
        write_lora(root / "others", base, seed=4, pattern=EXPERTS),
        write_esft(root / "esft", base, {0: [0, 1, 3], 1: [2]}),
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(1, 300) for _ in range(36)] for _ in range(3)]


@pytest.fixture(scope="module")
def expected(base: Path, folders: list[Path], prompts: list[list[int]]) -> tuple[Expected, int]:
    """The answers of one process, and the bytes of the largest adapter."""
    of = config(0, 0, micro_batches=1, folder=base, dtype="bfloat16")
    built = build_engine(replace(of, adapters=AdapterConfig(is_enabled=True)))
    registry = built.adapters
    assert registry is not None
    for number, folder in enumerate(folders):
        registry.load(f"c{number}", folder)
    held = [registry.acquire(f"c{number}") for number in range(len(folders))]
    answers = answers_of(built.engine, [None, *held], prompts)
    built.engine.close()
    assert len(set(map(str, answers.values()))) == len(answers), "contents have equal answers"
    return answers, max(each.weights.num_bytes for each in held)


def test_answers_while_adapters_change_and_ranks_are_lost(
    base: Path, folders: list[Path], prompts: list[list[int]], expected: tuple[Expected, int]
) -> None:
    answers, most_bytes = expected
    of = config(2, 2, folder=base, dtype="bfloat16")
    adapters = AdapterConfig(is_enabled=True, memory_bytes=3 * most_bytes)
    starters: list[ThreadStarter] = []

    def start(host: str, port: int, secret: ClusterSecret, threads: int) -> ThreadStarter:
        starters.append(ThreadStarter(host, port, secret, threads))
        return starters[-1]

    def strike(number: int) -> None:
        names = {str(each): each for each in all_ranks(2, 2)}
        if number in (20, 40):
            starters[0].kill(names["expert-1" if number == 20 else "attention-0"])

    built = build_cluster(replace(of, adapters=adapters), make_starter=start)
    try:
        assert built.adapters is not None
        chaos = Chaos(built.engine, built.adapters, folders, prompts, answers, PLAN, strike)
        tally = chaos.run()
    finally:
        built.engine.close()
    assert not tally.problems, tally.problems
    counts = tally.counts
    assert counts["answers"] > 20 and counts["loads"] > 3, counts
