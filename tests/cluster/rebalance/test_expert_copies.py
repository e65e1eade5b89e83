"""Reads of experts that hang: the rank goes on, ends when told, and says what is the matter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from moe_serve.cluster.control.placement_messages import Staged
from moe_serve.cluster.rebalance import expert_copies
from moe_serve.cluster.rebalance.expert_copies import ExpertCopies

PATIENCE_S = 200.0


class Room:
    """Stands for a SlotRoom."""

    slot_bytes = 1

    def __init__(self) -> None:
        self.staged: list[tuple[int, int]] = []

    def stage(
        self, layer: int, expert: int, weights: object, is_cancelled: Callable[[], bool]
    ) -> None:
        if not is_cancelled():
            self.staged.append((layer, expert))

    def drop_staged(self) -> None:
        self.staged.clear()


class Bench:
    """Copies whose first read does not end before it may."""

    def __init__(self) -> None:
        self.room, self.told = Room(), SimpleQueue[Staged]()
        self.hangs, self.may_end, self.num_reads = threading.Event(), threading.Event(), 0
        room: Any = self.room
        self.copies = ExpertCopies("expert-0", room, self._read, self.told.put)

    def _read(self, layer: int, expert: int) -> Any:
        self.num_reads += 1
        if self.num_reads == 1:
            self.hangs.set()
            assert self.may_end.wait(PATIENCE_S), "nobody lets it end"

    def start(self, placement: int) -> None:
        self.copies.start(placement, {0: [placement]}, 1e9)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.start(1)
    assert made.hangs.wait(PATIENCE_S)
    yield made
    made.may_end.set()
    made.copies.close()


def in_time(act: Callable[[], None]) -> None:
    """On a thread of its own: it must return while the read hangs."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 2)
    assert not thread.is_alive(), "it waits for the read"


def test_a_move_is_called_off_while_its_read_hangs(bench: Bench) -> None:
    in_time(bench.copies.cancel)
    bench.may_end.set()
    bench.start(2)
    assert bench.told.get(timeout=PATIENCE_S).why is None, "the first one tells nothing"
    assert bench.room.staged == [(0, 2)], "what came too late is staged"


def test_the_next_move_says_that_a_read_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_copies, "EARLIER_S", 0.01)
    in_time(lambda: bench.start(2))
    told = bench.told.get(timeout=PATIENCE_S)
    assert told == Staged(
        placement=2, why="the read of an expert for an earlier move has not ended"
    )
    assert bench.num_reads == 1, "a second thread hangs, too"


def test_a_later_move_still_waits_for_the_read_that_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_copies, "EARLIER_S", 0.01)
    for placement in (2, 3):
        bench.start(placement)
        assert "has not ended" in str(bench.told.get(timeout=PATIENCE_S).why)
    assert bench.num_reads == 1
    monkeypatch.setattr(expert_copies, "EARLIER_S", PATIENCE_S)
    bench.start(4)
    bench.may_end.set()
    assert bench.told.get(timeout=PATIENCE_S).why is None and bench.room.staged == [(0, 4)]


def test_the_end_of_a_rank_leaves_a_read_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(expert_copies, "_CLOSE_S", 0.01)
    in_time(bench.copies.close)
    assert "expert-0: reading an expert hangs; its thread is abandoned" in caplog.text
