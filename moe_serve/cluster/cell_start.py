"""Starts the ranks of a cell: with the server, or later beside the cells that serve."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_serve.cache.events.kv_events import KVEvents
from moe_serve.cluster.cell_part import CellPart
from moe_serve.cluster.cells.cell import Cell, cell_name
from moe_serve.cluster.cells.joined_parts import JoinedParts
from moe_serve.cluster.cells.parcel_post import ParcelPost
from moe_serve.cluster.control.secret import ClusterSecret, new_secret, read_secret
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.pool_watch import make_watch
from moe_serve.cluster.members.preflight import JOIN_S
from moe_serve.cluster.members.rank_starter import HandStarter, LocalStarter
from moe_serve.cluster.members.roster import RankPhase
from moe_serve.cluster.parcels.cell_ranks import RosterRanks
from moe_serve.cluster.parcels.link_setup import LinkSetup
from moe_serve.cluster.rank_arena import RankArena
from moe_serve.cluster.rebalance.planner import plan_in_process
from moe_serve.cluster.started_ranks import MakeStarter, StartedRanks, adapters_of
from moe_serve.cluster.steps.rank_witness import RankWitness
from moe_serve.config.cells import CellShape
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.opened_model import LoadReport
from moe_serve.engine.routes.route_records import ListenerGroup, RouteListeners
from moe_serve.engine.schedule.policy.policy_maker import policy_maker
from moe_serve.engine.schedule.policy.rank_load import RankLoads
from moe_serve.errors import ConfigError
from moe_serve.model.load.weight_reader import LoadProgress

# After this many seconds without a rank that every step needs, requests move to other cells.
_PATIENCE_S = 0.5
_ALIKE = ("kernels", "build", "device", "dtype", "expert_weights", "kv_dtype")


@dataclass(frozen=True, slots=True)
class NewCell:
    """A cell whose ranks will be started. `first_place` is the first place of its ranks on this
    host; each place has its GPU. For `node` see `CellPlace`.
    """

    index: int
    shape: CellShape
    first_place: int
    node: str | None = None


StarterOfCell = Callable[[NewCell], MakeStarter]


def local_starter(cell: NewCell) -> MakeStarter:
    """Returns the starter of the ranks of a cell on this host."""
    return lambda host, port, secret, num_threads: LocalStarter(
        host, port, secret, num_threads, cell=cell_name(cell.index), first_place=cell.first_place
    )


class FreeNumbers:
    """Gives out runs of numbers, the lowest that are free. Used with the lock of `CellShared`."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self, count: int) -> range:
        for first in itertools.count():
            run = range(first, first + count)
            if self._taken.isdisjoint(run):
                self._taken.update(run)
                return run
        raise AssertionError("there is always a higher number")

    def give_back(self, run: range) -> None:
        self._taken.difference_update(run)


class CellShared:
    """Everything that the cells of a server have in common. It is closed after them."""

    def __init__(self, config: EngineConfig, model: ClusterModel) -> None:
        """`model` is that of any cell. Raises ConfigError."""
        self.config = config
        self.ids, self.step_numbers = itertools.count(), itertools.count(1)
        self.news = threading.Event()
        self.post = ParcelPost(self.news.set)
        self.rosters = RosterRanks({})
        self.own_secret = read_secret(os.environ)  # None: only this process has one
        self.secret = self.own_secret or new_secret()
        self.routes = RouteListeners()
        self.lock = threading.Lock()  # guards the next three
        self.starts: dict[int, StartingCell] = {}  # replaced, never changed
        self.places, self.attention = FreeNumbers(), FreeNumbers()
        with contextlib.ExitStack() as opened:  # closed again if a part is refused
            self.link = LinkSetup(config.cells)
            opened.callback(self.link.close)
            self.kv_events = KVEvents(config)
            opened.callback(self.kv_events.close)
            self.arena = RankArena(model.config)
            opened.callback(self.arena.close)
            self.joined = JoinedParts(config, adapters_of(model))
            opened.callback(self.joined.close)
            self.close = opened.pop_all().close

    def witnesses(self) -> dict[str, RankWitness | None]:
        """Returns the reporter of each cell's activity, by the cell's name. Safe from any
        thread.
        """
        return {cell_name(index): start.ranks.witness for index, start in self.starts.items()}


class StartingCell:
    """Implements CellStart. It listens for its ranks as soon as it is made."""

    def __init__(
        self,
        shared: CellShared,
        model: ClusterModel,
        index: int,
        shape: CellShape,
        starter_of: StarterOfCell | None,
        *,
        is_later: bool = False,
        node: str | None = None,
    ) -> None:
        """With `starter_of` None the ranks are started by hand. `is_later` means that the server
        already runs. For `node` see `CellPlace`. Raises ConfigError.
        """
        self.index, self.shape, self.model, self._shared = index, shape, model, shared
        self.max_model_len: int | None = None  # once it serves
        self._hand: HandStarter | None = None
        self._node = node
        self._counts = (0, 0)
        self._closing = threading.Lock()
        with shared.lock:
            self._places = shared.places.take(shape.attention_ranks + shape.expert_ranks)
            self._attention = shared.attention.take(shape.attention_ranks)
            shared.starts = {**shared.starts, index: self}
        self._routes = ListenerGroup(shared.routes)
        self._parts = contextlib.ExitStack()  # closes all, even if one cannot be closed
        self._parts.callback(self._forget)
        self._parts.callback(self._routes.remove_all)
        try:
            self._open(starter_of, is_later=is_later)
        except BaseException:
            self.close()
            raise

    def _open(self, starter_of: StarterOfCell | None, *, is_later: bool) -> None:
        """Makes the cell's parts. They are closed with the cell."""
        shared, model = self._shared, self.model
        self._parts.callback(shared.kv_events.close_ranks, self._attention)
        if is_later:  # those of the first cells are open
            shared.kv_events.open(self._attention)
        self.watch = make_watch(model.config, model)
        self._parts.callback(self.watch.close)
        part = CellPart(
            name=cell_name(self.index),
            ids=shared.ids,
            step_numbers=shared.step_numbers,
            outage_limit_s=math.inf,
            patience_s=_PATIENCE_S,
            kv_events=shared.kv_events,
            first_rank=self._attention.start,
            arena=shared.arena,
            adapters=shared.joined.adapters,
            policy=shared.joined.policy,
            join_s=math.inf if starter_of is None else JOIN_S,
        )
        self.ranks = StartedRanks(model, shared.link.setup, part, shared.secret)
        self._parts.callback(self.ranks.close)
        self.ranks.membership.on_parcel = shared.post.receiver(self.index, self.ranks.roster)
        loads = RankLoads(model.placement)
        self._make_policy = policy_maker(
            model.config, model.folder, model.spec, self._routes, loads
        )
        self.ranks.current.on_switch(loads.use)
        self._make_starter: MakeStarter = self._by_hand
        if starter_of is not None:
            cell = NewCell(self.index, self.shape, self._places.start, self._node)
            self._make_starter = starter_of(cell)

    def _by_hand(self, host: str, port: int, _: ClusterSecret, num_threads: int) -> HandStarter:
        self._hand = HandStarter(cell_name(self.index), host, port, num_threads)
        return self._hand

    @property
    def report(self) -> LoadReport:
        """The report of its first attention rank on the weights that it has loaded."""
        return self.ranks.first_loaded.report

    @property
    def note(self) -> str:
        """See `CellStart.note`."""
        limit = f"at most {self.model.config.cluster.start_timeout_s:g} s after its start began"
        if num_missing := len(self.commands):
            ranks = "one rank that is" if num_missing == 1 else f"{num_missing} ranks that are"
            return f"it waits for {ranks} started by hand, {limit}"
        done, total = self._counts
        return f"its ranks have loaded {done} of {total} parts" if total else "its ranks start"

    @property
    def commands(self) -> tuple[str, ...]:
        """See `CellStart.commands`."""
        hand, states = self._hand, self.ranks.roster.all()
        missing = [] if hand is None else [s for s in states if s.phase is RankPhase.STARTING]
        return tuple(hand.command(state.name) for state in missing if hand is not None)

    def load(self, progress: LoadProgress | None = None) -> None:
        """Starts the ranks and waits until they have loaded. Raises MoeServeError."""

        def note(done: int, total: int) -> None:
            self._counts = done, total
            if progress is not None:
                progress(done, total)

        self.ranks.start(self._make_starter, note)

    def serve(self) -> Cell:
        """Makes the engine over its loaded ranks, and the cell."""
        shared = self._shared
        own = RouteListeners(shared.routes)  # its placement follows its own rows
        engine = self.ranks.engine(self.watch, own, self._make_policy, plan_in_process)
        self.max_model_len = engine.max_model_len
        shared.rosters.add(self.index, self.ranks.roster)
        cell = Cell(self.index, self.shape, engine, shared.news.set, self.close)
        shared.joined.connect(cell, self.ranks.membership.adapters, self.ranks.rebalancer)
        self._parts.callback(shared.joined.disconnect, cell)
        return cell

    def run(self) -> Cell:
        """See `CellStart.run`. Refuses ranks that compute other bits than those that serve."""
        self.load()
        serving = [start for start in self._shared.starts.values() if start.max_model_len]
        check_alike([*serving, self])
        most = min(start.max_model_len or 0 for start in serving)
        cell = self.serve()
        if (self.max_model_len or 0) < most:
            cell.close()
            raise ConfigError(
                f"{cell.name} has room only for sequences of {self.max_model_len} tokens, but the "
                f"server accepts {most}: give its ranks more KV pages, or memory."
            )
        return cell

    def close(self) -> None:
        """See `CellStart.close`."""
        with self._closing:
            self._parts.close()

    def _forget(self) -> None:
        shared = self._shared
        shared.rosters.remove(self.index)
        with shared.lock:
            shared.places.give_back(self._places)
            shared.attention.give_back(self._attention)
            shared.starts = {i: each for i, each in shared.starts.items() if each is not self}


def check_alike(starts: Sequence[StartingCell]) -> None:
    """Raises ConfigError unless all cells compute the same bits, so that requests may move."""
    first = starts[0]
    for start in starts[1:]:
        for name in _ALIKE:
            own, others = getattr(start.report, name), getattr(first.report, name)
            if own != others:
                raise ConfigError(
                    f"{cell_name(start.index)} and {cell_name(first.index)} differ in {name} "
                    f"({own} and {others}), so a request that moves could get other tokens: give "
                    "all cells the same kind of machine."
                )
