"""Samples the tokens of a step, and several for a sequence as long as they equal its draft.

A drafted token is never "accepted" by a rule of its own. Each row is sampled with the request's own
parameters and its own random number, as without drafts, and the next row counts only if the token
equals the drafted one. So the tokens are those without drafts, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_serve.engine.execute.step_outcome import RowFailure
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.engine.sampling.sampling_point import SamplingPoint
from moe_serve.model.step_plan import SequenceSlice

Sample = Callable[[Tensor, list[SamplingPoint]], list[Sampled | RowFailure]]
_MOST_AT_ONCE = (
    1 << 18
)  # most logits of drafted rows to sample before it is known whether the rows count


@dataclass(frozen=True, slots=True)
class Verified:
    """The runs of tokens that a step gave. All are by sequence id; see `StepOutcome`."""

    sampled: dict[int, tuple[Sampled, ...]] = field(default_factory=dict)
    failures: dict[int, RowFailure] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)  # behind which the last tokens were sampled
    spoiled: list[int] = field(default_factory=list)


def plain_points(
    slices: Items[SequenceSlice], sequences: Mapping[int, Sequence]
) -> list[SamplingPoint] | None:
    """Returns the points of a step if the logits alone decide the token of every slice; None if a
    slice has a draft, or other settings decide its token."""
    points = []
    for piece in slices:
        sequence, position = sequences[piece.sequence_id], piece.start + len(piece.token_ids)
        if not sequence.is_plain or piece.num_logits != 1 or piece.layers is not None:
            return None
        if piece.num_drafted or position != len(sequence.token_ids):
            return None
        points.append(SamplingPoint(sequence, position))
    return points


@dataclass(slots=True)
class _Walk:
    """The rows of one sequence: `first` is the row behind its last token, one more follows for
    each drafted token."""

    sequence: Sequence
    first: int
    draft: list[int]
    begin: int  # tokens of the sequence before the step
    run: list[Sampled] = field(default_factory=list)
    failure: RowFailure | None = None
    is_spoiled: bool = False

    def goes_on(self, token: Sampled | RowFailure) -> bool:
        """Notes the next token and returns whether the row behind it counts.

        A row may be not finite because of a drafted token behind it, because attention multiplies
        hidden values by 0. The next step computes it again, without drafts.
        """
        if isinstance(token, RowFailure):
            self.failure = token
            return False
        if self.draft and not token.is_valid:
            self.is_spoiled = True
            return False
        self.run.append(token)
        place = len(self.run) - 1
        return place < len(self.draft) and token.token_id == self.draft[place]

    def note(self, found: Verified) -> None:
        """Adds the run of tokens to the result of the step."""
        key = self.sequence.id
        if self.run:
            found.sampled[key] = tuple(self.run)
            found.rows[key] = self.first + len(self.run) - 1
        if self.failure is not None:
            found.failures[key] = self.failure


@dataclass(slots=True)
class _Rows:
    """Rows to sample in one call. `owners` has None for a sequence without a draft."""

    rows: list[int] = field(default_factory=list)
    points: list[SamplingPoint] = field(default_factory=list)
    owners: list[_Walk | None] = field(default_factory=list)

    def add(self, row: int, point: SamplingPoint, owner: _Walk | None) -> None:
        self.rows.append(row)
        self.points.append(point)
        self.owners.append(owner)

    def add_walk(self, walk: _Walk, looks_ahead: bool) -> None:
        """Adds the next row of a sequence, or all of its rows if it `looks_ahead`."""
        done = len(walk.run)
        for place in range(done, 1 + (len(walk.draft) if looks_ahead else done)):
            self.add(walk.first + place, SamplingPoint(walk.sequence, walk.begin + place), walk)

    def sample(self, logits_RV: Tensor, sample: Sample) -> list[Sampled | RowFailure]:
        is_all = len(self.rows) == len(logits_RV)  # in their order
        return sample(logits_RV if is_all else logits_RV[self.rows], self.points)


def verify(
    logits_RV: Tensor,
    slices: Items[SequenceSlice],
    sequences: Mapping[int, Sequence],
    sample: Sample,
) -> Verified:
    """Samples the sequences that catch up in a step. Their tokens stay as they are.

    All rows behind sequences without drafts, and the first rows of the others, are sampled in one
    call. If sampling needs no state that a refused token would spoil, all rows of a sequence are
    sampled in that call, each behind the drafted tokens before it.

    logits_RV: the logits of the slices, one after the other.
    sample: samples one token per row, each at its point; it must not raise.
    """
    found, first, walks, start = Verified(), _Rows(), list[_Walk](), 0
    ahead = set[int]()  # sequences of which all rows are sampled at once
    try:
        for piece in slices:
            sequence, start = sequences[piece.sequence_id], start + piece.num_logits
            num_drafted = piece.num_drafted
            position = piece.start + len(piece.token_ids) - num_drafted
            if position != sequence.num_tokens or not piece.is_finished:
                continue
            if not num_drafted:
                first.add(start - 1, SamplingPoint(sequence, position), None)
                continue
            walk = _Walk(sequence, start - 1 - num_drafted, piece.drafted, position)
            walks.append(walk)
            if looks_ahead := _looks_ahead(walk, logits_RV.shape[-1]):
                ahead.add(sequence.id)
                for drafted in walk.draft:
                    sequence.append(drafted)
            first.add_walk(walk, looks_ahead)
        if first.rows:
            _sample_levels(logits_RV, first, ahead, sample, found)
    finally:
        for walk in walks:
            if walk.sequence.num_tokens > walk.begin:
                walk.sequence.truncate(walk.begin)
    for walk in walks:
        walk.note(found)
    found.spoiled.extend(_spoiled(logits_RV, walks))
    return found


def _sample_levels(
    logits_RV: Tensor, level: _Rows, ahead: Set[int], sample: Sample, found: Verified
) -> None:
    """Samples the first rows, and then row by row those of sequences whose tokens equal their
    drafts. `ahead` are sequences whose rows are all among the first."""
    while level.rows:
        walking = dict[int, _Walk]()  # by sequence id, those whose next row counts
        stopped = set[int]()
        tokens = level.sample(logits_RV, sample)
        for point, row, owner, token in zip(
            level.points, level.rows, level.owners, tokens, strict=True
        ):
            key = point.sequence.id
            if owner is not None:
                if key not in stopped:
                    walking[key] = owner
                    if not owner.goes_on(token):
                        stopped.add(key)
                        del walking[key]
            elif isinstance(token, RowFailure):
                found.failures[key] = token
            else:
                found.sampled[key], found.rows[key] = (token,), row
        level = _Rows()
        for key, walk in walking.items():
            assert key not in ahead, "a sequence has no row behind its last one"
            walk.sequence.append(walk.run[-1].token_id)
            level.add_walk(walk, looks_ahead=False)


def _looks_ahead(walk: _Walk, vocab_size: int) -> bool:
    """Returns whether all rows of a sequence may be sampled at once."""
    if not walk.draft or len(walk.draft) * vocab_size > _MOST_AT_ONCE:
        return False
    return SamplingPoint(walk.sequence, walk.begin).can_look_ahead


def _spoiled(logits_RV: Tensor, walks: list[_Walk]) -> list[int]:
    """Returns the sequences with a row that is not finite behind their runs. Such a row may have
    left NaNs in the sequence's pages."""
    spoiled = [walk.sequence.id for walk in walks if walk.is_spoiled]
    refused = dict[int, Tensor]()
    for walk in walks:
        start, end = walk.first + max(len(walk.run), 1), walk.first + len(walk.draft) + 1
        if start < end:
            refused[walk.sequence.id] = logits_RV[start:end].sum()
    if refused:
        sums = torch.stack([*refused.values()]).tolist()
        spoiled += [key for key, each in zip(refused, sums, strict=True) if not math.isfinite(each)]
    return spoiled
