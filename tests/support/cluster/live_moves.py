"""Experts that move in a cluster under streams, and which placement each rank served a step by."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from experts.placement.problem.placement import Placement
from moe_serve.cluster.control.messages import Join, RunStep, ServeStep
from moe_serve.cluster.ranks.rank_base import RankPlacement
from moe_serve.cluster.rebalance.mover import MoveEnd, Mover
from moe_serve.engine.request.request import GenerationRequest
from tests.support.cluster.fault_drive import DEADLINE_S, FaultDrive
from tests.support.cluster.layouts import Answer


class VersionLog:
    """(epoch, step) -> rank -> the versions that it had for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_step: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
        check = RankPlacement.check

        def noted(placement: RankPlacement, order: RunStep | ServeStep | Join) -> None:
            check(placement, order)
            if not isinstance(order, Join):
                rank = threading.current_thread().name
                self.of_step[order.epoch, order.step][rank] = placement.version

        monkeypatch.setattr(RankPlacement, "check", noted)

    def assert_never_mixed(self) -> set[int]:
        """Checks that no step mixed two versions; returns all versions that served steps."""
        seen = set()
        for step, of_rank in self.of_step.items():
            versions = set(of_rank.values())
            assert len(versions) == 1, f"epoch and step {step} mix placements: {of_rank}"
            seen |= versions
        return seen


class Moves:
    """The moves of a driven cluster, by hand."""

    def __init__(self, drive: FaultDrive) -> None:
        self.drive = drive
        self.mover: Mover = drive.coordinator._mover
        self.ends: list[MoveEnd] = []
        self._following: list[Placement] = []
        self.mover.on_end = self._ended

    @property
    def version(self) -> int:
        return self.drive.coordinator._current.version.number

    @property
    def placement(self) -> Placement:
        return self.drive.coordinator._current.version.placement

    def move_to(self, *targets: Placement) -> None:
        """Moves to the placements one after the other."""
        first, *self._following = targets
        self.mover.propose(first)

    def _ended(self, end: MoveEnd) -> None:
        self.ends.append(end)
        if self._following:
            self.move_to(*self._following)

    def shuffled(self, seed: int) -> Placement:
        """Swaps some experts between ranks in every layer; the number of copies on each rank stays
        the same."""
        return shuffled(self.placement, seed)

    def serve(
        self,
        wanted: Sequence[GenerationRequest],
        at: Mapping[int, Callable[[], None]],
        until: Callable[[], bool] = lambda: True,
    ) -> dict[str, Answer]:
        """Returns all answers, and steps the idle engine further until `until` returns True. `at`
        has actions by step number; each runs before that step."""
        answers = {request.request_id: Answer() for request in wanted}
        for request in wanted:
            self.drive.engine.add(request)
        step, end = 0, time.monotonic() + DEADLINE_S
        while any(answer.end is None for answer in answers.values()) or not until():
            assert time.monotonic() < end, f"hangs: {self.drive.phases()}, {self.ends}"
            at.get(step, lambda: None)()
            for delta in self.drive.engine.step():
                answers[delta.request_id].take(delta)
            step += 1
        self.drive.engine.check_integrity()
        return answers


def shuffled(placement: Placement, seed: int, num_swaps: int = 4) -> Placement:
    rng = np.random.default_rng(seed)
    ranks_of = {}
    for layer, experts in placement.ranks_of.items():
        now = list(experts)
        for _ in range(num_swaps):
            one, other = rng.choice(len(now), size=2, replace=False)
            now[one], now[other] = now[other], now[one]
        ranks_of[layer] = tuple(now)
    return replace(placement, ranks_of=ranks_of)
