"""Ranks die at every moment of a hand-over: no request fails, no token changes, no page leaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_serve.cluster.cell_start import NewCell
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members import membership
from moe_serve.cluster.ranks.attention_rank import AttentionRank
from moe_serve.cluster.ranks.expert_rank import ExpertRank
from moe_serve.cluster.ranks.rank_parcels import RankParcels
from moe_serve.cluster.ranks.shard_parcels import ShardParcels
from moe_serve.cluster.started_ranks import MakeStarter
from moe_serve.config.sections import CacheConfig
from tests.support.cluster.cells_drive import (
    cells_config,
    check_nothing_is_held,
    in_one_process,
    serving_cells,
    wait_until_whole,
)
from tests.support.cluster.fault_starter import Faults, FaultStarter
from tests.support.cluster.layouts import Answer, requests, serve

OF = cells_config()
WANTED = requests(8, 4096, num_tokens=8)
READER, WRITER = "cell-0/attention-0", "cell-1/attention-0"
AWAKE: Any = SimpleNamespace(is_frozen=lambda thread: False)


def starters(cell: NewCell) -> MakeStarter:
    def make(host: str, port: int, secret: ClusterSecret, num_threads: int) -> FaultStarter:
        starter = FaultStarter(AWAKE, host, port, secret, num_threads)
        starter.prefix = f"cell-{cell.index}/"
        return starter

    return make


@pytest.fixture(scope="module")
def engine() -> Iterator[CellsEngine]:
    """One server for all faults."""
    with serving_cells(OF, starters) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    return in_one_process(OF, WANTED)


POINTS = [
    pytest.param([(READER, AttentionRank, "_run", 1)], id="reader at the first chunk"),
    pytest.param([(READER, AttentionRank, "_run", 3)], id="reader between two chunks"),
    pytest.param([(READER, ShardParcels, "save", 1)], id="reader at the first parcel"),
    pytest.param([(READER, ShardParcels, "save", 3)], id="reader at a later parcel"),
    pytest.param([(WRITER, ShardParcels, "load", 1)], id="writer at the first parcel"),
    pytest.param([(WRITER, ShardParcels, "load", 3)], id="writer at a later parcel"),
    pytest.param([(WRITER, RankParcels, "handle", 2)], id="writer before a parcel"),
    pytest.param([(WRITER, AttentionRank, "_run", 2)], id="writer after adoption"),
    pytest.param([(WRITER, AttentionRank, "_run", 6)], id="writer while it generates"),
    pytest.param([("cell-0/expert-0", ExpertRank, "handle", 3)], id="experts of the reader"),
    pytest.param([("cell-1/expert-0", ExpertRank, "handle", 3)], id="experts of the writer"),
    pytest.param(
        [(READER, AttentionRank, "_run", 2), (WRITER, AttentionRank, "_run", 4)], id="both"
    ),
]


@pytest.mark.parametrize("deaths", POINTS)
def test_a_death_in_a_hand_over(
    engine: CellsEngine,
    expected: dict[str, Answer],
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    deaths: list[tuple[str, Any, str, int]],
) -> None:
    monkeypatch.setattr(membership, "_LASTING_S", 0.0)  # no growing pauses before new starts
    num_lost = engine.stats().num_lost_ranks
    cold = [replace(each, cache_salt=str(deaths)) for each in WANTED]
    for rank, owner, function, time in deaths:
        faults.at(owner, function, faults.die, rank=rank, time=time)
    assert serve(engine, cold) == expected, "a token changed"
    wait_until_whole(engine)
    assert len(faults.happened) == len(deaths), "the fault did not happen"
    assert engine.stats().num_lost_ranks == num_lost + len(deaths)
    check_nothing_is_held(engine)


def test_requests_of_a_lost_cell_go_on_from_the_memory_that_cells_share(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_LASTING_S", 0.0)
    wanted = requests(8, 4096, num_tokens=32)
    tier = CacheConfig(num_pages=256, memory_tier_bytes=16 * 2**20, checkpoint_after_s=0.0)
    of = replace(cells_config("2x(1A1E)"), cache=tier)
    expected = in_one_process(replace(of, cache=CacheConfig(num_pages=256)), wanted)
    with serving_cells(of, starters) as engine:
        faults.at(AttentionRank, "_run", faults.die, rank=WRITER, time=26)
        assert serve(engine, wanted) == expected, "a token changed"
        wait_until_whole(engine)
        assert faults.happened, "the fault did not happen"
        stats = engine.stats()
        assert stats.tier is not None and stats.tier.hit_tokens > 0, "nothing came from the copies"
        engine.check_integrity()
