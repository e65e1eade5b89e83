"""A policy of autoscaling that learns from its own days, as a baseline for the others.

Tabular Q-learning, after Schuler et al. (arXiv 2005.14410), who learn a limit of concurrency: the
state is the number of cells and how many requests each has; an action adds a cell, removes one, or
does nothing. An interval costs its cells and, far more, requests that find no seat.
"""

from __future__ import annotations

import random
from collections import defaultdict

from moe_serve.cluster.autoscale.scale_view import CellCounts, RoleLoad, ScaleView
from moe_serve.config.cells import CellRole

_ACTIONS = (-1, 0, 1)
_STEP, _DISCOUNT = 0.2, 0.9
_CROWDED = 10.0  # cost of a cell's worth of requests without a seat, in cells
_BUCKETS = 10  # of the utilisation, from 0 to 1.25
_State = tuple[CellRole, int, int]


class LearntPolicy:
    """Implements AutoscalePolicy. With `exploration` 0 it only does what it has learnt."""

    name = "learnt"

    def __init__(self, seed: int) -> None:
        self.exploration = 0.0
        self._random = random.Random(seed)
        self._values: defaultdict[tuple[_State, int], float] = defaultdict(float)
        self._last: dict[CellRole, tuple[_State, int]] = {}

    def begin_day(self, exploration: float) -> None:
        """Forgets where the last day ended, and keeps what was learnt."""
        self.exploration, self._last = exploration, {}

    def decide(self, view: ScaleView) -> CellCounts:
        """Chooses for every role, after learning from what the last choice led to."""
        wanted: dict[CellRole, int] = {}
        for role, load in view.roles.items():
            state = _state(role, load)
            if role in self._last:
                self._learn(*self._last[role], -_cost(load), state)
            action = self._choose(state)
            self._last[role] = state, action
            wanted[role] = max(1, load.num_cells + action)
        return wanted

    def _choose(self, state: _State) -> int:
        if self._random.random() < self.exploration:
            return self._random.choice(_ACTIONS)
        return max(_ACTIONS, key=lambda action: (self._values[state, action], action == 0))

    def _learn(self, state: _State, action: int, reward: float, after: _State) -> None:
        best = max(self._values[after, each] for each in _ACTIONS)
        old = self._values[state, action]
        self._values[state, action] = old + _STEP * (reward + _DISCOUNT * best - old)


def _state(role: CellRole, load: RoleLoad) -> _State:
    bucket = min(_BUCKETS - 1, int(load.utilisation * 8))
    return role, load.num_cells, bucket


def _cost(load: RoleLoad) -> float:
    """Returns the cost of an interval, in cells."""
    return load.num_cells + _CROWDED * max(0.0, load.utilisation - 1) * max(1, load.num_serving)
