"""Cells without processes behind a CellsEngine: a test holds their steps, and their starts."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from moe_serve.clock import REAL_CLOCK
from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.cells.cell_roll import CellRoll
from moe_serve.cluster.cells.cells_engine import CellsEngine, Parcels
from moe_serve.cluster.cells.moves import CellMoves
from moe_serve.cluster.cells.parcel_post import ParcelPost
from moe_serve.cluster.steps.step_in_flight import StepInFlight
from moe_serve.config.cells import CellsConfig, CellShape, parse_cells
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.watch.cells_control import CellPlace, NodeStatus
from moe_serve.errors import CellsError, ClusterError
from tests.support.cluster.fake_cells import FakeCarrier, prompt
from tests.support.cluster.fake_coordinator import FakeCoordinator, fake_cluster
from tests.support.engine.fake_runner import continuation

_LONGEST_S = 200.0


class HeldCoordinator(FakeCoordinator):
    """Steps do not end while the cell is held."""

    def __init__(self, num_attention: int) -> None:
        super().__init__(num_attention)
        self.free = threading.Event()
        self.free.set()

    def collect(self, flight: StepInFlight) -> Any:
        assert self.free.wait(_LONGEST_S), "the test does not let it go"
        return super().collect(flight)

    def settle(self, *, is_patient: bool) -> bool:
        is_settled = super().settle(is_patient=is_patient)
        self.outage_s = 0.0 if is_settled else 5.0
        if not is_settled:
            time.sleep(0.005)
        return is_settled


class FakeStart:
    """Implements CellStart: a test lets it load, or fail."""

    def __init__(self, make: Callable[[], Cell]) -> None:
        self._make = make
        self.note, self.commands = "it loads", ()
        self._may_end, self._why, self.num_closed = threading.Event(), "", 0

    def load(self) -> None:
        self._may_end.set()

    def fail(self, why: str) -> None:
        self._why = why
        self._may_end.set()

    def run(self) -> Cell:
        assert self._may_end.wait(_LONGEST_S), "the test lets it neither load nor fail"
        if self._why:
            raise ClusterError(self._why)
        return self._make()

    def close(self) -> None:
        self.num_closed += 1
        self.fail(self._why or "the start was cancelled")


class FakeMaker:
    """Implements CellMaker."""

    def __init__(self, ids: itertools.count[int], news: threading.Event) -> None:
        self._ids, self._news = ids, news
        self.starts: dict[int, FakeStart] = {}
        self.coordinators: dict[int, HeldCoordinator] = {}
        self.closed: list[int] = []  # cells that have ended
        self.refusal = ""

    def check(self, shapes: Sequence[CellShape], place: CellPlace) -> None:
        if self.refusal:
            raise CellsError(self.refusal)

    def begin(self, index: int, shape: CellShape, place: CellPlace) -> FakeStart:
        self.starts[index] = FakeStart(lambda: self._cell(index, shape))
        return self.starts[index]

    def nodes(self) -> Sequence[NodeStatus]:
        return ()

    def _cell(self, index: int, shape: CellShape) -> Cell:
        coordinator = self.coordinators[index] = HeldCoordinator(shape.attention_ranks)
        engine = fake_cluster(coordinator, ids=self._ids)
        return Cell(index, shape, engine, self._news.set, lambda: self.closed.append(index))


class World:
    """Two cells of one attention rank, as their engine sees them."""

    def __init__(self, outage_limit_s: float) -> None:
        news, ids = threading.Event(), itertools.count()
        self.coordinators = [HeldCoordinator(1) for _ in range(2)]
        shapes = parse_cells("2x(1A1E)")
        engines = [fake_cluster(coordinator, ids=ids) for coordinator in self.coordinators]
        cells = [
            Cell(i, s, e, news.set) for i, (s, e) in enumerate(zip(shapes, engines, strict=True))
        ]
        carrier: Any = FakeCarrier(lambda: 0.0)  # type: ignore[arg-type]
        carrier.has_news, carrier.check_integrity = False, lambda: None
        config = CellsConfig(hand_over="off", migrate=False)
        moves = CellMoves(cells, carrier, config, REAL_CLOCK, timeout_s=30.0, chunk_tokens=32)
        link: Any = SimpleNamespace(close=lambda: None)
        self.maker = FakeMaker(ids, news)
        roll = CellRoll(cells, self.maker)
        parcels = Parcels(carrier, ParcelPost(news.set), link.close)
        self.engine = CellsEngine(roll, moves, parcels, ids, news, outage_limit_s=outage_limit_s)
        self.deltas: dict[str, list[TokenDelta]] = {}

    def add(self, name: str, first: int, max_tokens: int = 12) -> GenerationRequest:
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt(20, first)),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        )
        self.deltas[name] = []
        self.engine.add(request)
        return request

    def step_until(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + _LONGEST_S
        while not is_done():
            assert time.monotonic() < end, f"{self.deltas}"
            for delta in self.engine.step():
                self.deltas[delta.request_id].append(delta)
            time.sleep(0.001)

    def turn(self) -> None:
        """Ends and begins what it can, without a wait for a cell that is held."""
        self.engine.nudge()
        for delta in self.engine.step():
            self.deltas[delta.request_id].append(delta)

    def states(self) -> dict[str, str]:
        return {cell.name: cell.state for cell in self.engine.stats().cells}

    def has_ended(self, name: str) -> bool:
        return any(delta.finish_reason is not None for delta in self.deltas[name])

    def cell_of(self, name: str) -> int:
        found = [
            c.index
            for c in self.engine.cells
            for e in c.rank_engines.values()
            if name in e._sequences
        ]
        return found[0]

    def is_right(self, request: GenerationRequest) -> bool:
        told = [token for delta in self.deltas[request.request_id] for token in delta.token_ids]
        return told == continuation(list(request.prompt_token_ids), request.params.max_tokens or 0)


@contextmanager
def world(outage_limit_s: float = 100.0) -> Iterator[World]:
    made = World(outage_limit_s)
    try:
        yield made
    finally:
        for coordinator in made.coordinators:
            coordinator.free.set()
        made.engine.close()
