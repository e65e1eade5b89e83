"""Measures the load of a running server between two decisions of autoscaling."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_serve.cluster.autoscale.scale_view import RoleLoad, ScaleView
from moe_serve.config.cells import CellRole, parse_cell
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.stats import CellStatus, EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCell:
    """A cell of a running server with its number of seats."""

    index: int
    num_seats: int  # requests that it runs at once
    status: CellStatus

    @property
    def num_requests(self) -> int:
        return self.status.load.num_running + self.status.load.num_waiting


def cells_of_role(stats: EngineStats, role: CellRole, num_seats: int) -> list[ScaledCell]:
    """Returns the cells of a role. Each attention rank has `num_seats` seats."""
    found = [cell for cell in stats.cells if cell.role == role]
    return [
        ScaledCell(
            index=int(cell.name.rpartition("-")[2]),
            num_seats=num_seats * parse_cell(cell.ranks).attention_ranks,
            status=cell,
        )
        for cell in found
    ]


@dataclass(slots=True)
class _CellCounts:
    """The counts of one interval. `busy` has request-seconds by role."""

    num_arrived: int = 0
    num_ended: int = 0
    output_tokens: int = 0
    busy: dict[CellRole, float] = field(default_factory=dict)


class ScalingWindow:
    """Counts requests, tokens and the time in cells since the last decision.

    `request_came` and `note` are called on the engine's thread, the rest on another one.
    """

    def __init__(self, roles: Sequence[CellRole], num_seats: int, now: float) -> None:
        """`num_seats`: see `cells_of_role`."""
        self._roles, self._num_seats = roles, num_seats
        self._lock = threading.Lock()  # guards the next two
        self._counts = _CellCounts()
        self._lengths: dict[str, int] = {}  # tokens of the answers that have begun
        self._begun_at = self._seen_at = now
        self._prompt_tokens = 0

    def request_came(self) -> None:
        with self._lock:
            self._counts.num_arrived += 1

    def note(self, deltas: Sequence[TokenDelta]) -> None:
        """Counts the tokens of answers, and the answers that end."""
        with self._lock:
            for delta in deltas:
                length = self._lengths.pop(delta.request_id, 0) + len(delta.token_ids)
                if delta.finish_reason is None:
                    self._lengths[delta.request_id] = length
                elif delta.finish_reason is not FinishReason.ABORT:
                    self._counts.num_ended += 1
                    self._counts.output_tokens += length

    def sample(self, stats: EngineStats, now: float) -> None:
        """Counts the requests that are in the cells now for the time since the last sample."""
        elapsed, self._seen_at = now - self._seen_at, now
        busy = self._counts.busy
        for role in self._roles:
            num = sum(cell.num_requests for cell in cells_of_role(stats, role, self._num_seats))
            busy[role] = busy.get(role, 0.0) + num * elapsed

    def take(self, stats: EngineStats, now: float, start_s: float) -> ScaleView:
        """Returns the load since the last call. `start_s` is the start time of a new cell."""
        prompt_tokens = stats.counts.num_missed_tokens
        new_tokens, self._prompt_tokens = prompt_tokens - self._prompt_tokens, prompt_tokens
        interval_s, self._begun_at = max(1e-3, now - self._begun_at), now
        with self._lock:
            counts, self._counts = self._counts, _CellCounts()
        return ScaleView(
            at_s=now,
            interval_s=interval_s,
            num_arrived=counts.num_arrived,
            prompt_tokens=max(0, new_tokens),
            num_ended=counts.num_ended,
            output_tokens=counts.output_tokens,
            start_s=start_s,
            roles=self._loads(
                stats, {r: counts.busy.get(r, 0.0) / interval_s for r in self._roles}
            ),
        )

    def _loads(
        self, stats: EngineStats, busy: Mapping[CellRole, float]
    ) -> dict[CellRole, RoleLoad]:
        loads: dict[CellRole, RoleLoad] = {}
        for role in self._roles:
            cells = cells_of_role(stats, role, self._num_seats)
            serving = [cell for cell in cells if cell.status.state == "serving"]
            num_seats = sum(cell.num_seats for cell in serving)
            loads[role] = RoleLoad(
                num_serving=len(serving),
                num_starting=sum(cell.status.state == "starting" for cell in cells),
                num_draining=sum(cell.status.is_draining for cell in cells),
                num_requests=sum(cell.num_requests for cell in cells),
                utilisation=busy[role] / num_seats if num_seats else 0.0,
            )
        return loads
