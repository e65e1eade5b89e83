"""Weights that stay in few bits give the tokens of the dequantised model in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import build_engine
from tests.support.cluster.layouts import Answer, colocated, config, on_ranks, requests, serve
from tests.support.families.quantised_cases import CASES
from tests.support.families.quantised_folder import write_pair
from tests.support.kernels.kernel_sets import KERNEL_SETS

pytestmark = list(KERNEL_SETS[1].marks)  # the native kernels

NAMES = (
    "Mixtral-8x7B-Instruct-v0.1-AWQ",  # asymmetric int4, groups of 128
    "Kimi-K2-Thinking",  # symmetric int4, groups of 32
    "DeepSeek-V3",  # fp8 blocks, latents, shared experts
)
WANTED = requests(5, 300, 2)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Returns a function that writes the pair of a case at its first call."""
    return cache(lambda name: write_pair(tmp_path_factory.mktemp("pair"), CASES[name]))


@pytest.fixture(scope="module", params=NAMES)
def pair(
    request: pytest.FixtureRequest, pair_of: Callable[[str], tuple[Path, Path]]
) -> tuple[Path, Path]:
    return pair_of(request.param)


def of_folder(folder: Path, attention: int, experts: int, **cluster: object) -> EngineConfig:
    return config(attention, experts, folder=folder, dtype="bfloat16", kernels="native", **cluster)


def packed(of: EngineConfig, **model: object) -> EngineConfig:
    both = {"expert_weights": "auto", "linear_weights": "packed"} | model
    return replace(of, model=replace(of.model, **both))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def wanted(pair: tuple[Path, Path]) -> dict[str, Answer]:
    """Returns the answers of the same weights stored in floats."""
    return colocated(of_folder(pair[1], 0, 0), WANTED)


def test_ranks_and_shards(pair: tuple[Path, Path], wanted: dict[str, Answer]) -> None:
    assert on_ranks(packed(of_folder(pair[0], 1, 2)), WANTED) == wanted, "1A2E"
    sharded = packed(of_folder(pair[0], 1, 1, attention_tp=2))
    assert on_ranks(sharded, WANTED) == wanted, "two shards"


def test_expert_memory(pair: tuple[Path, Path], wanted: dict[str, Answer]) -> None:
    """A slot has the size of an expert in few bits."""
    of = packed(of_folder(pair[0], 0, 0))
    few = replace(of, model=replace(of.model, expert_memory_bytes=400_000))
    engine = build_engine(few).engine
    assert serve(engine, WANTED) == wanted
    stats = engine.stats().expert_memory
    assert stats is not None and stats.num_reads > 0, f"{stats}"


@pytest.mark.parametrize("name", NAMES[:2])
def test_products_of_whole_numbers_in_any_layout(
    name: str, pair_of: Callable[[str], tuple[Path, Path]]
) -> None:
    """The tokens may differ from those of floats, but are the same in one process, on ranks and on
    shards."""
    stored, _ = pair_of(name)
    alone = packed(of_folder(stored, 0, 0), low_bit_products="int8")
    answers = colocated(alone, WANTED)
    for layout in ((1, 2, 1), (2, 1, 2)):
        attention, experts, shards = layout
        of = packed(
            of_folder(stored, attention, experts, attention_tp=shards), low_bit_products="int8"
        )
        assert on_ranks(of, WANTED) == answers, f"{layout}"
