"""Adapters and service tiers on several cells of ranks: the answers are those of one process."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.adapters.adapter import Adapter
from moe_serve.adapters.bitdelta.make import make_bitdelta
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.ranks.rank_adapters import RankAdapters
from moe_serve.cluster.started_cells import build_cells
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import EngineConfig, ModelConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.service_terms import Service
from moe_serve.errors import CheckpointError
from tests.support.adapters.adapter_folders import EXPERTS, write_esft, write_lora
from tests.support.adapters.bitdelta_folders import write_fine_tune
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
NAMES = (None, "esft", "lora", "experts", "bits")
CHAT = TierConfig(name="chat", weight=4.0, ttft_s=3000.0, tpot_s=0.001)  # small budgets of steps
FLEX = TierConfig(name="flex", e2e_s=9000.0, is_sheddable=True)
TIERS = (CHAT, FLEX)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cells") / "base", CASES["qwen2_moe"])


@pytest.fixture(scope="module")
def of(base: Path) -> EngineConfig:
    root = base.parent
    make_bitdelta(base, write_fine_tune(root / "tuned", base, has_routers=False), root / "bits")
    folders = {
        "bits": root / "bits",
        "esft": write_esft(root / "esft", base, {0: [0, 1, 3], 1: [2], 2: [0, 2]}),
        "lora": write_lora(root / "lora", base),
        "experts": write_lora(root / "experts", base, seed=3, pattern=EXPERTS),
    }
    modules = tuple(f"{name}={folder}" for name, folder in folders.items())
    made = cells_config()
    return replace(
        made,
        scheduler=replace(made.scheduler, tiers=TIERS),
        model=ModelConfig(path=str(base), dtype="bfloat16", kernels="native", num_threads=1),
        adapters=AdapterConfig(is_enabled=True, modules=modules, root=str(root)),
    )


def mixed(registry: AdapterRegistry | None) -> list[GenerationRequest]:
    """The same prompts for the base model and for each adapter."""
    assert registry is not None
    held = [None if name is None else registry.acquire(name) for name in NAMES]
    wanted = requests(8, VOCAB_SIZE, num_tokens=6)
    return [
        replace(each, request_id=f"{each.request_id} {number}", adapter=adapter)
        for each in wanted[:5:2]
        for number, adapter in enumerate(held)
    ]


@pytest.fixture(scope="module")
def expected(of: EngineConfig) -> dict[str, Answer]:
    alone = build_engine(one_process(of))
    return serve(alone.engine, mixed(alone.adapters))


@pytest.fixture(scope="module")
def built(of: EngineConfig) -> Iterator[BuiltEngine]:
    found = build_cells(of, starter_of=thread_starters)
    yield found
    found.engine.close()


def test_tiers_in_cells(built: BuiltEngine, of: EngineConfig) -> None:
    """All cells keep one account of tiers and tenants, and their forecasts refuse what would be
    late."""
    engine = engine_of(built)
    wanted = [
        replace(each, service=Service.of_tier(TIERS[index % 2], f"tenant {index % 3}"))
        for index, each in enumerate(requests(10, VOCAB_SIZE, num_tokens=8))
    ]
    wanted = [replace(each, arrival_time=time.monotonic()) for each in wanted]
    expected = serve(build_engine(one_process(of)).engine, wanted)
    assert serve(engine, wanted) == expected
    assert serve(engine, wanted) == expected, "with warm prefixes"
    service, moves = engine.stats().service, engine.stats().moves
    assert moves is not None and moves.ended.get(("hand_over", "done"), 0) > 0, f"{moves}"
    assert service is not None and service.num_tenants == 6
    assert [(each.num_finished, each.num_e2e_met) for each in service.tiers] == [(10, 0), (10, 10)]
    assert engine.admission is not None and engine.admission.num_snapshots == 2
    forecast = engine.admission.forecast(wanted[0].service, 80)
    assert forecast is not None and 0.0 < forecast.predicted_s < forecast.p90_s
    hasty = replace(FLEX, e2e_s=1e-6)
    assert engine.admission.check(Service.of_tier(hasty), 80) is not None
    assert engine.admission.check(wanted[1].service, 80) is None
    service = engine.stats().service
    assert service is not None and [each.num_refused for each in service.tiers] == [0, 1]
    engine.check_integrity()


def test_a_cell_that_comes_later_has_all_of_it(
    built: BuiltEngine, expected: dict[str, Answer]
) -> None:
    engine, placements = engine_of(built), built.cell_placements
    assert placements is not None and list(placements.by_cell) == [0, 1]
    index = engine.add_cell("1A1E")
    deadline = time.monotonic() + 60
    while len(engine.cells) < 3:
        assert time.monotonic() < deadline, engine.stats().cells
        engine.step()
        time.sleep(0.01)
    assert list(placements.by_cell) == [0, 1, index]
    for number in (0, 1):
        engine.drain(number, is_draining=True)
    served = engine.stats().service
    assert serve(engine, mixed(built.adapters)) == expected
    after = engine.stats().service
    assert served is not None and after is not None
    assert after.tiers[0].num_finished == served.tiers[0].num_finished + len(expected)
    assert engine.admission is not None and engine.admission.num_snapshots == 1, "the others drain"
    for number in (0, 1):
        engine.drain(number, is_draining=False)
    engine.remove_cell(index)
    while index in placements.by_cell:
        assert time.monotonic() < deadline, engine.stats().cells
        engine.step()
        time.sleep(0.01)
    assert engine.admission.num_snapshots == 2
    assert serve(engine, mixed(built.adapters)) == expected


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
    assert moves is not None and moves.ended.get(("hand_over", "done"), 0) > 0, f"{moves}"
    assert moves.num_failed_parcels == moves.num_recomputed_tokens == 0, f"{moves}"

    for index in (1, 0):  # a rank that starts again has the adapters of all cells
        engine.cells[index].engine._coordinator.membership._starter.kill(RankName("expert", 0))
        assert serve(engine, mixed(registry)) == expected
        wait_until_whole(engine)
    assert serve(engine, mixed(registry)) == expected

    gone = write_esft(tmp_path / "gone", base, {0: [5], 1: [1]}, seed=5)
    registry.load("gone", gone)
    alone = [
        replace(each, adapter=registry.acquire("gone")) for each in mixed(registry)[:: len(NAMES)]
    ]
    before = serve(engine, alone)
    shutil.rmtree(gone)
    engine.cells[1].engine._coordinator.membership._starter.kill(RankName("expert", 0))
    adapter, deadline = registry.in_memory("gone"), time.monotonic() + 60
    assert adapter is not None, "a cell has it"
    while not engine.cells[1].lacks(adapter.weights.number):
        assert time.monotonic() < deadline, engine.stats().members
        engine.step()
        time.sleep(0.01)
    wait_until_whole(engine)
    assert not engine.cells[0].lacks(adapter.weights.number)
    assert registry.in_memory("gone") is not None
    assert serve(engine, alone) == before, "in the cell that has it"
    assert serve(engine, mixed(registry)) == expected
    registry.unload("gone")
    del alone, adapter

    built_by_rank = RankAdapters._built

    def fails_once(rank: RankAdapters, order: object) -> object:
        monkeypatch.setattr(RankAdapters, "_built", built_by_rank)
        raise CheckpointError("its disk is broken.")

    monkeypatch.setattr(RankAdapters, "_built", fails_once)
    again = write_lora(tmp_path / "again", base, seed=9)
    with pytest.raises(CheckpointError, match=r"^cell-\d/\w+-0 cannot load it: its disk is broken"):
        registry.load("lora", again)
    serve(engine, mixed(registry)[:1])
    caplog.clear()
    gc.collect()
    wait_for_numbers(engine, len(NAMES) - 1)
    assert serve(engine, mixed(registry)) == expected, "the version before"

    held: Adapter | None = registry.acquire("lora")
    registry.load("lora", again)
    wanted = mixed(registry)
    old = [replace(each, adapter=held) for each in wanted if each.request_id.endswith("2")]
    found = serve(engine, old)
    assert found == {key: expected[key] for key in found}, "requests that hold the old version"
    new = {key: answer for key, answer in serve(engine, wanted).items() if key.endswith("2")}
    assert all(answer != expected[key] for key, answer in new.items())
    registry.unload("lora")
    serve(engine, wanted[:1])
    del held, old, wanted
    caplog.clear()  # errors in the records keep frames, and these keep requests
    gc.collect()
    wait_for_numbers(engine, len(NAMES) - 2)
    wait_until_whole(engine)
    check_nothing_is_held(engine)


def wait_for_numbers(engine: CellsEngine, count: int) -> None:
    """Waits until the ranks of all cells were told to drop all but some adapters. A cell holds the
    requests of its last step until its next one, so all cells get others meanwhile."""
    deadline = time.monotonic() + 60
    while len(held_numbers(engine)) != count:
        assert time.monotonic() < deadline, held_numbers(engine)
        others = requests(6, VOCAB_SIZE, num_tokens=4)
        # with drafts from the time before they would end in the cells that read their prompts
        serve(engine, [replace(each, may_draft=False) for each in others])
