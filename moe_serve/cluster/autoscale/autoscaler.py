"""Applies the decisions of a policy: within limits, after a calm time, and with few changes in an
hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from moe_serve.cluster.autoscale.scale_view import AutoscalePolicy, CellCounts, ScaleView
from moe_serve.config.cells import CellRole

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    """The limits of an autoscaler. Cells are removed only after fewer have been wanted for
    `calm_s`. At most `num_changes` changes happen within any hour; the last half of them can only
    add cells, so that a wrong removal can be undone.
    """

    min_cells: int
    max_cells: Mapping[CellRole, int]
    calm_s: float = 600.0
    num_changes: int = 4


@dataclass(frozen=True, slots=True)
class Possible:
    """The smallest and the largest possible number of cells of a role after a decision."""

    fewest: int
    most: int


class Autoscaler:
    """Asks a policy once in every interval. Starting and draining cells is left to the caller."""

    def __init__(self, policy: AutoscalePolicy, limits: ScaleLimits) -> None:
        self.policy, self._limits = policy, limits
        self._wishes: deque[tuple[float, CellCounts]] = deque()
        self._changes: deque[float] = deque()
        self._begun_at: float | None = None  # when the first decision was made
        self.aim: CellCounts = {}  # the last decision, as if every change were possible

    def first(self, view: ScaleView) -> CellCounts:
        """Returns how many cells to begin with, from a view without requests."""
        most, least = self._limits.max_cells, self._limits.min_cells
        return {
            role: max(least, min(n, most[role])) for role, n in self.policy.decide(view).items()
        }

    def wanted(
        self, view: ScaleView, possible: Mapping[CellRole, Possible] | None = None
    ) -> CellCounts:
        """Returns how many cells of each role should serve or be starting from now on. `possible`
        are the numbers that are possible now; with None any number is.
        """
        limits, now = self._limits, {role: x.num_cells for role, x in view.roles.items()}
        wish = self.policy.decide(view)
        if self._begun_at is None:
            self._begun_at = view.at_s
        is_calm = view.at_s - self._begun_at >= limits.calm_s
        self._wishes.append((view.at_s, wish))
        while self._wishes[0][0] <= view.at_s - limits.calm_s and len(self._wishes) > 1:
            self._wishes.popleft()
        while self._changes and self._changes[0] <= view.at_s - _HOUR_S:
            self._changes.popleft()
        num_left = limits.num_changes - len(self._changes)
        wanted = {role: self._bounded(role, count, wish) for role, count in now.items()}
        if not is_calm:
            wanted = {role: max(count, now[role]) for role, count in wanted.items()}
        self.aim = dict(wanted)
        if 2 * num_left <= limits.num_changes:
            wanted = {role: max(count, now[role]) for role, count in wanted.items()}
        if num_left <= 0:
            wanted = dict(now)
        for role, within in (possible or {}).items():
            wanted[role] = max(within.fewest, min(wanted[role], within.most))
        if wanted != now:
            self._changes.append(view.at_s)
        return wanted

    def _bounded(self, role: CellRole, now: int, wish: CellCounts) -> int:
        """Returns more cells at once, but fewer only if fewer were wanted during the whole calm
        time.
        """
        most_wanted = max(each[role] for _, each in self._wishes)
        count = wish[role] if wish[role] >= now else min(now, most_wanted)
        return max(self._limits.min_cells, min(count, self._limits.max_cells[role]))
