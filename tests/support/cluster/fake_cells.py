"""Cells without processes or threads, a carrier that a test delays and breaks, and their clock.

The fake model reads every token back from its pages (`fake_runner.py`), so a page of another
request, a stale page or a page that was freed too early changes an answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from moe_serve.cluster.cells.moves import CellMoves
from moe_serve.cluster.cells.rates import TokenSteps
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.parcels.parcel import Lease, Parcel, ParcelEnd, RankPlace
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.remote_executor import RemoteExecutor
from moe_serve.config.cells import CellsConfig, CellShape, parse_cells
from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_terms import NO_SERVICE, Service
from moe_serve.engine.service.service_policy import ServicePolicy
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.engine.service.step_model import FittedSteps, StepModel, StepWork
from tests.support.cluster.fake_coordinator import FakeCoordinator
from tests.support.engine.fake_runner import NAN, PAGE_SIZE, continuation
from tests.support.engine.windows import windowed_answer

MAX_MODEL_LEN = 160
PAGE_BYTES = 1000
ALWAYS = CellsConfig(hand_over="always", min_tokens=32)
POISON = 49  # is never sampled; the model computes NaNs after it
GARBAGE = 47  # in pages that a broken parcel has written


@dataclass(frozen=True, slots=True)
class Limits:
    """The room of one rank, and how its cell steps."""

    num_pages: int = 24
    num_seats: int = 4
    budget: int = 32
    is_ahead: bool = True


class FakeCell:
    """Implements CellLike with a real ClusterEngine. A test ends its steps."""

    def __init__(
        self,
        index: int,
        shape: CellShape,
        clock: Clock,
        ids: itertools.count[int],
        numbers: itertools.count[int],
        limits: Limits,
        policy: ServicePolicy | None = None,
    ) -> None:
        self.index, self.shape, self.is_draining, self.is_out = index, shape, False, False
        self.lost: set[int] = set()  # adapters
        self.coordinator = FakeCoordinator(shape.attention_ranks)
        scheduler = SchedulerConfig(max_num_seqs=limits.num_seats, max_batched_tokens=limits.budget)
        service = None
        if policy is not None:
            scheduler, service = policy.config, ServiceState(policy, TokenSteps())
            service.refresh(StepWork())

        def make_engine(executor: RemoteExecutor, ids: itertools.count[int]) -> Engine:
            return Engine(
                executor,
                scheduler=scheduler,
                num_pages=limits.num_pages,
                micro_batches=1,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=frozenset(),
                ids=ids,
                clock=clock,
                service=service,
            )

        self.engine = ClusterEngine(
            self.coordinator,
            make_engine,
            PoolWatch(None, 2, None),
            lambda: None,
            is_ahead=limits.is_ahead,
            service=service,
            ids=ids,
            step_numbers=numbers,
        )

    @property
    def is_live(self) -> bool:
        return bool(self.rank_engines) and not self.coordinator.away

    @property
    def rank_engines(self) -> Mapping[str, Engine]:
        return self.engine.rank_engines

    def lacks(self, adapter: int) -> bool:
        return adapter in self.lost

    def place_of(self, rank: str) -> RankPlace:
        return RankPlace(self.index, rank, self.engine.start_of(rank))

    def begin(self) -> None:
        self.is_out = self.engine.begin()

    def end(self) -> list[TokenDelta]:
        self.engine.wait()
        self.is_out = False
        return self.engine.end()


class Clock:
    """Moves on only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class OnWay:
    """A parcel on its way, with what its pages held when it was sent."""

    parcel: Parcel
    contents: list[list[int]]
    sent_at: float
    why: str = ""


class FakeCarrier:
    """Implements PageCarrier. Parcels arrive when a test delivers them, in any order."""

    def __init__(self, clock: Clock, *, pages_per_parcel: int = 2, num_pages: int = 8) -> None:
        self._clock = clock
        self.page_bytes, self.pages_per_parcel = PAGE_BYTES, pages_per_parcel
        self._num_pages = num_pages
        self.cells: Items[FakeCell] = ()
        self.on_way: list[OnWay] = []
        self.ended: list[ParcelEnd] = []
        self.closed: set[Lease] = set()
        self.refusal = ""
        self.num_sent = 0

    def can_carry(self, source: RankPlace, target: RankPlace) -> str:
        return self.refusal

    def num_free(self, target: RankPlace) -> int:
        under_way = [each.parcel for each in self.on_way if each.parcel.target == target]
        return self._num_pages - sum(len(parcel.source_pages) for parcel in under_way)

    def send(self, parcel: Parcel) -> None:
        count = len(parcel.source_pages)
        assert 0 < count <= self.pages_per_parcel, f"a parcel of {count} pages"
        assert count <= self.num_free(parcel.target), "the carrier had no room"
        assert count == len(parcel.target_pages) and 0 not in parcel.source_pages
        assert parcel.lease not in self.closed, "a parcel for a lease that has ended"
        slots = self._slots(parcel.source)
        if slots is None:
            self.ended.append(ParcelEnd(parcel, f"{parcel.source.rank} is lost"))
            return
        contents = [list(slots[page]) for page in parcel.source_pages]
        self.on_way.append(OnWay(parcel, contents, self._clock.now))
        self.num_sent += 1

    def deliver(self, which: int = 0, why: str = "") -> None:
        """Ends a parcel that is on its way. With `why` it fails, after it has written garbage."""
        each = self.on_way.pop(which)
        parcel, slots = each.parcel, self._slots(each.parcel.target)
        if slots is None:
            return  # the rank is gone, and `rank_lost` tells
        self._check_owner(parcel)
        for page, content in zip(parcel.target_pages, each.contents, strict=True):
            slots[page] = [GARBAGE if why else token for token in content]
        if not why and any(NAN in content for content in each.contents):
            why = "the pages hold values that are not finite"
        self.ended.append(ParcelEnd(parcel, why, self._clock.now - each.sent_at))

    def deliver_all(self) -> None:
        while self.on_way:
            self.deliver()

    def end_lease(self, lease: Lease) -> None:
        self.closed.add(lease)
        self.on_way = [each for each in self.on_way if each.parcel.lease != lease]

    def take_ended(self) -> Items[ParcelEnd]:
        ended, self.ended = self.ended, []
        return ended

    def rank_lost(self, place: RankPlace) -> None:
        lost = [e for e in self.on_way if place in (e.parcel.source, e.parcel.target)]
        self.on_way = [each for each in self.on_way if each not in lost]
        self.ended += [ParcelEnd(each.parcel, f"{place.rank} is lost") for each in lost]

    def _slots(self, place: RankPlace) -> dict[int, list[int]] | None:
        """Returns the pages of a rank; None if that process is gone."""
        coordinator = self.cells[place.cell].coordinator
        if coordinator.starts[place.rank] != place.start or place.rank in coordinator.away:
            return None
        return coordinator.ranks[place.rank].runner.slots

    def _check_owner(self, parcel: Parcel) -> None:
        """Asserts that the target's pages are reserved for this sequence and for no other one."""
        engine = self.cells[parcel.target.cell].rank_engines[parcel.target.rank]
        reservations = engine._scheduler.reservations._open
        table = reservations[parcel.lease.sequence_id].table
        shared = table[: reservations[parcel.lease.sequence_id].num_shared]
        assert set(parcel.target_pages) <= set(table) - set(shared), "a page of another owner"


@dataclass
class CellsWorld:
    """Some cells, their moves and all requests. `layout`: see `parse_cells`."""

    layout: str = "1x(1A1E prefill) 1x(1A1E decode)"
    config: CellsConfig = ALWAYS
    limits: Limits = field(default_factory=Limits)
    timeout_s: float = 30.0
    pages_per_parcel: int = 2
    room: int = 8
    step_s: float = 0.01
    make_model: Callable[[], StepModel] = FittedSteps
    tiers: tuple[TierConfig, ...] = ()  # steps are told to take a second for each token, with tiers

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.ids = itertools.count()
        numbers = itertools.count(1)
        scheduler = SchedulerConfig(
            max_num_seqs=self.limits.num_seats,
            max_batched_tokens=self.limits.budget,
            tiers=self.tiers,
        )
        self.policy = ServicePolicy.of(scheduler, self.clock)
        self.cells = [
            FakeCell(index, shape, self.clock, self.ids, numbers, self.limits, self.policy)
            for index, shape in enumerate(parse_cells(self.layout))
        ]
        self.carrier = FakeCarrier(
            self.clock, pages_per_parcel=self.pages_per_parcel, num_pages=self.room
        )
        self.carrier.cells = self.cells
        self.moves = CellMoves(
            self.cells,
            self.carrier,
            self.config,
            self.clock,
            timeout_s=self.timeout_s,
            chunk_tokens=self.limits.budget,
            make_model=self.make_model,
            policy=self.policy,
        )
        self._poison()
        for cell in self.cells:
            cell.engine.on_lost = self._on_lost(cell)
        self.requests: dict[str, GenerationRequest] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.aborts: dict[int, list[str]] = {}  # for cells that are out, by index

    def _on_lost(self, cell: FakeCell) -> Callable[[str, int, list[Sequence]], None]:
        return lambda rank, start, sequences: self.moves.rank_lost(cell, rank, sequences)

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 10,
        service: Service = NO_SERVICE,
        **params: object,
    ) -> None:
        fields = {"temperature": 0.0, "max_tokens": max_tokens} | params
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**fields),  # type: ignore[arg-type]
            service=service,
            arrival_time=self.clock(),
        )
        self.requests[name] = request
        self.moves.add(Sequence(next(self.ids), request))

    def abort(self, name: str) -> None:
        deltas = self.moves.abort(name)
        if deltas is not None:
            self._note(deltas)
            return
        for cell in self.cells:
            if cell.is_out:
                self.aborts.setdefault(cell.index, []).append(name)
            else:
                cell.engine.abort(name)

    def lose(self, index: int, rank: str = "attention-0", *, is_back: bool = True) -> None:
        """Ends a rank's process."""
        self.cells[index].coordinator.lose(rank, is_back=is_back)
        self._poison()

    def _poison(self) -> None:
        """Lets the model compute NaNs after one token."""
        for cell in self.cells:
            for rank in cell.coordinator.ranks.values():
                rank.runner.nan_after_token = POISON

    def come_back(self) -> None:
        """Lets all lost ranks come back."""
        for cell in self.cells:
            cell.coordinator.away.clear()
            cell.coordinator.has_events = True

    def begin(self, index: int) -> None:
        """Begins a step of a cell that is not out, if it has work."""
        cell = self.cells[index]
        assert not cell.is_out
        self.moves.before_step(cell)
        if cell.engine.has_work or not cell.rank_engines:
            cell.begin()
            if not cell.is_out:
                self.end(index)

    def end(self, index: int) -> None:
        """Ends the step of a cell."""
        cell = self.cells[index]
        self.clock.now += self.step_s
        self._note(cell.end())
        for name in self.aborts.pop(index, []):
            cell.engine.abort(name)
        self.moves.after_step(cell)

    def turn(self, *, delivers: bool = True) -> None:
        """Begins and ends a step of every cell, with the parcels that arrive in between."""
        for cell in self.cells:
            if not cell.is_out:
                self.begin(cell.index)
        if delivers:
            self.carrier.deliver_all()
        self.moves.turn()
        for cell in self.cells:
            if cell.is_out:
                self.end(cell.index)
        self.check()

    def run(self, most: int = 400) -> None:
        """Runs until all requests have ended."""
        for _ in range(most):
            if not self.has_work:
                break
            self.turn()
        assert not self.has_work, "some requests never end"
        self.check_idle()

    @property
    def has_work(self) -> bool:
        busy = [c for c in self.cells if c.is_out or (c.is_live and c.engine.has_work)]
        return self.moves.has_work or bool(busy)

    def _note(self, deltas: Items[TokenDelta]) -> None:
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)

    def answer(self, name: str) -> list[int]:
        return [token for delta in self.deltas.get(name, []) for token in delta.token_ids]

    def expected(self, name: str) -> list[int]:
        request = self.requests[name]
        tokens, count = list(request.prompt_token_ids), request.params.max_tokens or 0
        window = request.params.kv_window
        return windowed_answer(tokens, count, window) if window else continuation(tokens, count)

    def check(self) -> None:
        """Asserts that the books of all cells agree and that no request ended twice."""
        for cell in self.cells:
            cell.engine.check_integrity()
        self.moves.check_integrity()
        for name, deltas in self.deltas.items():
            ends = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
            assert len(ends) <= 1 and (not ends or deltas[-1].finish_reason is ends[0]), name
            answer = self.answer(name)
            assert answer == self.expected(name)[: len(answer)], f"{name} got wrong tokens"

    def check_idle(self) -> None:
        """Asserts that every request has ended and that nothing is held."""
        self.check()
        for name in self.requests:
            reason = self.deltas[name][-1].finish_reason
            assert reason is not None, f"{name} has not ended"
            if reason is FinishReason.LENGTH:
                assert self.answer(name) == self.expected(name), f"{name} lost tokens"
            has_failed = reason is FinishReason.ERROR
            is_bad = POISON in self.requests[name].prompt_token_ids
            assert reason is FinishReason.ABORT or has_failed == is_bad, self.deltas[name][-1]
        stats = self.moves.stats()
        assert (stats.num_leases, stats.num_between) == (0, 0), f"{stats}"
        for cell in self.cells:
            load = cell.engine.stats().load
            assert load.num_free_pages == load.num_pages, f"cell {cell.index} holds pages"

    def where(self, name: str) -> int | None:
        """Returns the cell that has a request; None if it belongs to no engine."""
        for cell in self.cells:
            for engine in cell.rank_engines.values():
                if name in engine._sequences:
                    return cell.index
        return None


def prompt(length: int, first: int = 1) -> list[int]:
    """Returns tokens that differ from those of another `first` in every page."""
    return [1 + (first * 7 + place * (first + 3)) % 46 for place in range(length)]


assert PAGE_SIZE == 16, "the tests count on pages of 16 tokens"
