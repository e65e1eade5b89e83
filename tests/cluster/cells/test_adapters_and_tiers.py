"""Adapters and service tiers on several cells of ranks: the answers are those of one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.adapters.adapter import Adapter
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.ranks.rank_adapters import RankAdapters
from moe_serve.cluster.started_cells import build_cells
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import EngineConfig, ModelConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.errors import CheckpointError
from tests.support.adapters.adapter_folders import EXPERTS, write_esft, write_lora
from tests.support.cluster.cells_drive import (
    cells_config,
    check_nothing_is_held,
    one_process,
    thread_starters,
    wait_until_whole,
)
from tests.support.cluster.layouts import Answer, requests, serve
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint

VOCAB_SIZE = 300
NAMES = (None, "esft", "lora", "experts")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cells") / "base", CASES["qwen2_moe"])


@pytest.fixture(scope="module")
def of(base: Path) -> EngineConfig:
    root = base.parent
    folders = {
        "esft": write_esft(root / "esft", base, {0: [0, 1, 3], 1: [2], 2: [0, 2]}),
        "lora": write_lora(root / "lora", base),
        "experts": write_lora(root / "experts", base, seed=3, pattern=EXPERTS),
    }
    modules = tuple(f"{name}={folder}" for name, folder in folders.items())
    return replace(
        cells_config(),
        model=ModelConfig(path=str(base), dtype="bfloat16", kernels="native", num_threads=1),
        adapters=AdapterConfig(is_enabled=True, modules=modules, root=str(root)),
    )


def mixed(registry: AdapterRegistry | None) -> list[GenerationRequest]:
    """The same prompts for the base model and for each adapter."""
    assert registry is not None
    held = [None if name is None else registry.acquire(name) for name in NAMES]
    wanted = requests(8, VOCAB_SIZE, num_tokens=12)
    return [
        replace(each, request_id=f"{each.request_id} {number}", adapter=adapter)
        for each in wanted[4:]
        for number, adapter in enumerate(held)
    ]


@pytest.fixture(scope="module")
def expected(of: EngineConfig) -> dict[str, Answer]:
    alone = build_engine(one_process(of))
    return serve(alone.engine, mixed(alone.adapters))


@pytest.fixture
def built(of: EngineConfig) -> Iterator[BuiltEngine]:
    found = build_cells(of, starter_of=thread_starters)
    yield found
    found.engine.close()


def engine_of(built: BuiltEngine) -> CellsEngine:
    assert isinstance(built.engine, CellsEngine), "cells were asked for"
    return built.engine


def held_numbers(engine: CellsEngine) -> set[int]:
    adapters = engine.cells[0].engine._coordinator.membership.adapters
    assert adapters is not None
    return set(adapters._shared.orders.by_number)


def test_adapters_in_cells(
    built: BuiltEngine,
    expected: dict[str, Answer],
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, registry = engine_of(built), built.adapters
    assert registry is not None
    assert serve(engine, mixed(registry)) == expected
    assert serve(engine, mixed(registry)) == expected, "with warm prefixes"
    moves = engine.stats().moves
    assert moves is not None and moves.ended.get(("hand_over", "done"), 0) >= 8, f"{moves}"
    assert moves.num_failed_parcels == moves.num_recomputed_tokens == 0, f"{moves}"

    for index in (1, 0):  # a rank that starts again has the adapters of all cells
        engine.cells[index].engine._coordinator.membership._starter.kill(RankName("expert", 0))
        assert serve(engine, mixed(registry)) == expected
        wait_until_whole(engine)
    assert serve(engine, mixed(registry)) == expected

    built_by_rank = RankAdapters._built

    def fails_once(rank: RankAdapters, order: object) -> object:
        monkeypatch.setattr(RankAdapters, "_built", built_by_rank)
        raise CheckpointError("its disk is broken.")

    monkeypatch.setattr(RankAdapters, "_built", fails_once)
    again = write_lora(tmp_path / "again", base, seed=9)
    with pytest.raises(CheckpointError, match=r"^cell-\d/\w+-0 cannot load it: its disk is broken"):
        registry.load("lora", again)
    wait_for_numbers(engine, 3)
    assert serve(engine, mixed(registry)) == expected, "the version before"

    before: Adapter = registry.acquire("lora")
    registry.load("lora", again)
    wanted = mixed(registry)
    old = [replace(each, adapter=before) for each in wanted if each.request_id.endswith("2")]
    found = serve(engine, old)
    assert found == {key: expected[key] for key in found}, "requests that hold the old version"
    new = {key: answer for key, answer in serve(engine, wanted).items() if key.endswith("2")}
    assert all(answer != expected[key] for key, answer in new.items())
    registry.unload("lora")
    del before, old, wanted
    caplog.clear()  # errors in the records keep frames, and these keep requests
    gc.collect()
    wait_for_numbers(engine, 2)
    wait_until_whole(engine)
    check_nothing_is_held(engine)


def wait_for_numbers(engine: CellsEngine, count: int) -> None:
    """Waits until the ranks of all cells were told to drop all but some adapters."""
    deadline = time.monotonic() + 60
    while len(held_numbers(engine)) != count:
        assert time.monotonic() < deadline, held_numbers(engine)
        time.sleep(0.01)
