"""Measures m = 1 to 4 micro-batches, without and with delays of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .job import StepMarks
from .pair import Pair
from .points import Point, StageTimes, point, stage_times

MICRO_BATCHES = (1, 2, 3, 4)
DELAYS = (0.25, 0.5, 1.0)  # of T_f
_NUM_PASSES = 3
SeenByKind = dict[tuple[int, ...], list[tuple[StepMarks, StepMarks]]]  # by the micro-batches' rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """The results: `cut` has one batch in m parts, `grown` m micro-batches of one size as in the
    paper.
    """

    num_layers: int
    batch: int
    stages: tuple[StageTimes, ...]  # by rows: the batch, and its halves, thirds, quarters
    cut: tuple[Point, ...]
    grown: tuple[Point, ...]
    delayed_by: str = "the transport"

    def delayed_as(self, other: Ablation, delayed_by: str) -> Ablation:
        """Returns this ablation with the delayed points of another one, which were run with
        `delayed_by`.
        """
        return replace(
            self,
            cut=(*self.cut, *(p for p in other.cut if p.delay_s)),
            grown=(*self.grown, *(p for p in other.grown if p.delay_s)),
            delayed_by=delayed_by,
        )

    def at(self, points: Sequence[Point], delay_s: float, m: int) -> Point:
        return next(p for p in points if p.delay_s == delay_s and p.num_micro_batches == m)

    def ratio(self, points: Sequence[Point], delay_s: float, m: int, less: int) -> float:
        """Returns the throughput of m micro-batches over that of `less`."""
        more = self.at(points, delay_s, m).tokens_per_s
        return more / self.at(points, delay_s, less).tokens_per_s

    @property
    def delays(self) -> list[float]:
        return sorted({p.delay_s for p in self.cut})

    @property
    def reference(self) -> StageTimes:
        """Returns the stage times of half the batch, in which delays are expressed."""
        return self.stages[1]


def run_ablation(pair: Pair, batch: int, num_rounds: int, delays: Sequence[float]) -> Ablation:
    """Runs all kinds of steps in turns, and all delays in turns.

    If the machine is slow for a while, it is then slow for all of them.
    """
    cut = [_shares(batch, m) for m in MICRO_BATCHES]
    third = cut[2][0]
    grown = [[third] * m for m in MICRO_BATCHES]
    alone = [[rows[0]] for rows in cut]
    seen: dict[float, SeenByKind] = {}
    slower_s = 0.0  # T_f of half of the batch, from the first pass
    for _ in range(_NUM_PASSES):
        _add(seen, 0.0, _rounds(pair, 0.0, [*alone, *cut, *grown], num_rounds))
        half = cut[1][0]
        slower_s = slower_s or stage_times(half, seen[0.0][half,]).slower_s
        for share in delays:
            if share:
                delay_s = round(share * slower_s, 6)
                _add(seen, delay_s, _rounds(pair, delay_s, [*cut, *grown], num_rounds))
    stages = {rows[0]: stage_times(rows[0], seen[0.0][tuple(rows)]) for rows in alone}

    def points(kinds: Sequence[Sequence[int]]) -> tuple[Point, ...]:
        return tuple(
            point(by_kind[tuple(rows)], stages[rows[0]], pair.num_layers, len(rows), delay_s)
            for delay_s, by_kind in seen.items()
            for rows in kinds
        )

    return Ablation(
        num_layers=pair.num_layers,
        batch=batch,
        stages=tuple(stages.values()),
        cut=points(cut),
        grown=points(grown),
    )


def _add(seen: dict[float, SeenByKind], delay_s: float, more: SeenByKind) -> None:
    known = seen.setdefault(delay_s, {})
    for rows, steps in more.items():
        known.setdefault(rows, []).extend(steps)


def _shares(batch: int, m: int) -> list[int]:
    assert batch % m == 0, f"a batch of {batch} cannot be cut into {m} equal parts"
    return [batch // m] * m


def _rounds(
    pair: Pair, delay_s: float, kinds: Sequence[Sequence[int]], num_rounds: int
) -> SeenByKind:
    """Runs each kind once per round; the first round does not count."""
    distinct = list(dict.fromkeys(tuple(rows) for rows in kinds))
    taken = pair.take_steps(delay_s, distinct * (num_rounds + 1))
    size = len(distinct)
    return {rows: taken[size + place :: size] for place, rows in enumerate(distinct)}
