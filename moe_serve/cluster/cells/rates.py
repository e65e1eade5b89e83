"""Measures how long steps of cells and parcels between them take, for routing and for moves.

Before a step of any cell was measured, a token counts as one second in all of them, so that only
the numbers of tokens decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_serve.clock import Clock
from moe_serve.cluster.cells.places import CellLike
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.service.step_model import FittedSteps, StepModel, StepWork

_WEIGHT = 0.2  # of a new step or parcel in the usual seconds
_REST_S = 1.0  # without parcels after a failure; doubled by each further one
_MOST_REST_S = 60.0


class TokenSteps:
    """Implements StepModel for cells that are not measured: a step takes a second per token."""

    is_measured = True

    def seconds(self, rows: StepWork) -> float:
        return float(rows.num_decoding + rows.num_prompt)

    def observe(self, rows: StepWork, seconds: float) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _MeasuredRate:
    """The steps of one cell. `progress`: prompt tokens read and tokens generated, at the last
    end."""

    model: StepModel
    begun_at: float = 0.0
    ended_at: float = 0.0
    usual_s: float = 0.0
    progress: tuple[int, int] = (0, 0)


class StepRates:
    """Measures the steps of cells by the clock, and the rows in them by the tokens that they gave.

    A step begins when the step before it has ended, or when `begins` was called, if that is later.
    """

    def __init__(
        self,
        cells: Sequence[CellLike],
        clock: Clock,
        chunk_tokens: int,
        make_model: Callable[[], StepModel] = FittedSteps,
    ) -> None:
        """`chunk_tokens`: the most tokens of a step, see `scheduler.max_batched_tokens`."""
        self._cells, self._clock, self.chunk_tokens = cells, clock, chunk_tokens
        self._make_model, self._tokens = make_model, TokenSteps()
        self._measured: dict[int, _MeasuredRate] = {}  # by the numbers of cells

    def forget(self, cell: CellLike) -> None:
        """Forgets a cell that has left."""
        self._measured.pop(cell.index, None)

    def begins(self, cell: CellLike) -> None:
        """Notes that a cell may begin a step."""
        self._of(cell).begun_at = self._clock()

    def ended(self, cell: CellLike) -> bool:
        """Learns from a step that has ended; returns False if it gave no tokens."""
        of, now = self._of(cell), self._clock()
        begun_at = max(of.begun_at, of.ended_at)
        before, after = of.progress, _progress(cell)
        of.progress, of.ended_at = after, now
        num_prompt, num_generated = after[0] - before[0], after[1] - before[1]
        has_tokens = num_prompt >= 0 and num_generated >= 0 and num_prompt + num_generated > 0
        if has_tokens:
            context, seconds = work_of(cell).num_context, now - begun_at
            rows = StepWork(num_generated, num_prompt, context)
            of.model.observe(rows, seconds)
            weight = _WEIGHT if of.usual_s else 1.0
            of.usual_s += weight * (seconds - of.usual_s)
        return has_tokens

    def model(self, cell: CellLike) -> StepModel:
        """Returns a cell's own model; until it is measured, that of another cell, if possible of
        the same shape."""
        own = self._of(cell).model
        if own.is_measured:
            return own
        known = [other for other in self._cells if self._of(other).model.is_measured]
        if not known:
            return self._tokens
        return self._of(min(known, key=lambda c: (c.shape != cell.shape, c.index))).model

    def prompt_s(self, cell: CellLike, num_tokens: int, work: StepWork) -> tuple[float, float]:
        """Predicts the seconds in which a cell reads this many tokens beside the rows of `work`,
        and how many of these seconds delay the rows.
        """
        if num_tokens <= 0:
            return 0.0, 0.0
        model, chunk = self.model(cell), min(self.chunk_tokens, num_tokens)
        num_steps = num_tokens / chunk
        with_it = model.seconds(StepWork(work.num_decoding, chunk, work.num_context))
        delay_s = max(0.0, with_it - model.seconds(work))
        return with_it * num_steps, delay_s * num_steps

    def usual_s(self, cell: CellLike) -> float:
        """Returns the usual seconds of a step of a cell lately; 0 if it had none."""
        return self._of(cell).usual_s

    def step_s(self, cell: CellLike, more: StepWork | None = None) -> float:
        """Predicts a step in which the sequences of a cell decode, and `more` rows."""
        return self.model(cell).seconds(work_of(cell) + (more or StepWork()))

    def _of(self, cell: CellLike) -> _MeasuredRate:
        if cell.index not in self._measured:
            self._measured[cell.index] = _MeasuredRate(self._make_model())
        return self._measured[cell.index]


class LinkRates:
    """Measures the parcels between cells, and lets a pair of cells rest after failures."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._page_s: dict[tuple[int, int], float] = {}
        self._failures: dict[tuple[int, int], int] = {}  # in turn
        self._rests_until: dict[tuple[int, int], float] = {}

    def arrived(self, source: int, target: int, seconds: float, num_pages: int) -> None:
        """Learns from a parcel. `num_pages`: those on their way when it was sent, with its own."""
        pair, page_s = (source, target), seconds / max(1, num_pages)
        known = self._page_s.get(pair)
        self._page_s[pair] = page_s if known is None else known + _WEIGHT * (page_s - known)
        self._failures.pop(pair, None)

    def failed(self, source: int, target: int, *, is_late: bool = False) -> None:
        """Lets a pair of cells rest after a late parcel, and after two failed parcels in a row: a
        single one may have had bad pages.
        """
        pair = source, target
        self._failures[pair] = count = self._failures.get(pair, 0) + 1 + is_late
        if count > 1:
            rest_s = min(_MOST_REST_S, _REST_S * 2 ** min(count - 2, 10))
            self._rests_until[pair] = self._clock() + rest_s

    def forget(self, cell: int) -> None:
        """Forgets the pairs of a cell that has left."""
        for pair in {*self._page_s, *self._failures, *self._rests_until}:
            if cell in pair:
                self._page_s.pop(pair, None)
                self._failures.pop(pair, None)
                self._rests_until.pop(pair, None)

    def is_resting(self, source: int, target: int) -> bool:
        return self._clock() < self._rests_until.get((source, target), -1.0)

    def pages_s(self, source: int, target: int, num_pages: int) -> float:
        """Predicts the seconds in which this many pages travel; 0 before any measurement."""
        return num_pages * self._page_s.get((source, target), 0.0)


def work_of(cell: CellLike) -> StepWork:
    """Returns the work of a step of a cell in which every sequence decodes that can, and those that
    have a seat reserved there.
    """
    decoding: list[EngineSequence] = []
    for engine in cell.rank_engines.values():
        decoding += [s for s in engine.moving.running if is_decoding(s)]
        decoding += engine.moving.arriving
    return StepWork(len(decoding), 0, sum([s.num_tokens for s in decoding]))


def is_decoding(sequence: EngineSequence) -> bool:
    """Returns whether a running sequence has read its prompt."""
    num_tokens = len(sequence.token_ids)
    return (
        num_tokens - sequence.num_computed_tokens == 1 and num_tokens > sequence.num_prompt_tokens
    )


def _progress(cell: CellLike) -> tuple[int, int]:
    """Returns how many prompt tokens a cell has read and how many it has generated."""
    each = [engine.progress for engine in cell.rank_engines.values()]
    return sum([prompt for prompt, _ in each]), sum([made for _, made in each])
