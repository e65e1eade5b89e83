"""Serves requests on cells of ranks that are threads, and checks what is left afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moe_serve.cluster.cell_start import NewCell, StarterOfCell
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.members.roster import RankPhase
from moe_serve.cluster.started_cells import build_cells
from moe_serve.config.cells import CellsConfig
from moe_serve.config.sections import ClusterConfig, EngineConfig, PipelineConfig
from moe_serve.engine.request.request import GenerationRequest
from tests.support.cluster.layouts import Answer, config, served_alone
from tests.support.cluster.thread_starter import ThreadStarter

PREFILL_DECODE = "1x(1A1E prefill) 1x(1A1E decode)"
_LONGEST_S = 100.0


def cells_config(layout: str = PREFILL_DECODE, **cells: Any) -> EngineConfig:
    """Returns a configuration in which every prompt of two pages and more is handed over."""
    fields = {"hand_over": "always", "min_tokens": 32, "memory_bytes": 8 * 2**20} | cells
    return replace(config(0, 0), cells=CellsConfig(layout=layout, **fields))


def thread_starters(cell: NewCell) -> type[ThreadStarter]:
    return ThreadStarter


def one_process(of: EngineConfig) -> EngineConfig:
    """Returns the configuration of one process."""
    return replace(
        of,
        cells=CellsConfig(),
        cluster=ClusterConfig(),
        pipeline=PipelineConfig(micro_batches=1),
    )


def in_one_process(of: EngineConfig, wanted: Sequence[GenerationRequest]) -> dict[str, Answer]:
    """Returns the answers of one process."""
    return served_alone(one_process(of), wanted)


@contextmanager
def serving_cells(
    of: EngineConfig, starters: StarterOfCell = thread_starters
) -> Iterator[CellsEngine]:
    engine = build_cells(of, starter_of=starters).engine
    assert isinstance(engine, CellsEngine), "cells were asked for"
    try:
        yield engine
    finally:
        engine.close()


def wait_until_whole(engine: CellsEngine) -> None:
    """Steps until every rank serves and nothing is under way."""
    end = time.monotonic() + _LONGEST_S
    while engine.has_work or not _is_whole(engine):
        assert time.monotonic() < end, (
            f"not whole: {engine.stats().members}, {engine.stats().moves}"
        )
        engine.step()
        time.sleep(0.001)


def _is_whole(engine: CellsEngine) -> bool:
    return all(
        state.phase is RankPhase.SERVING
        for cell in engine.cells
        for state in cell.engine._coordinator.membership.roster.all()
    )


def check_nothing_is_held(engine: CellsEngine) -> None:
    """Asserts that all pages are free and no move is open."""
    engine.check_integrity()
    stats = engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "a page has leaked"
    assert stats.moves is not None
    assert (stats.moves.num_leases, stats.moves.num_between) == (0, 0), f"{stats.moves}"
