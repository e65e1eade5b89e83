"""Samples the tokens of a step, and several for a sequence as long as they equal its draft.

A drafted token is never "accepted" by a rule of its own. Each row is sampled with the request's own
parameters and its own random number, as without drafts, and the next row counts only if the token
equals the drafted one. So the tokens are those without drafts, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
_MOST_AT_ONCE = 1 << 18  # logits of drafted rows to sample before it is known if they count


@dataclass(frozen=True, slots=True)
class Verified:
    """The runs of tokens that a step gave. All are by sequence id; see `StepOutcome`."""

    sampled: dict[int, tuple[Sampled, ...]] = field(default_factory=dict)
    failures: dict[int, RowFailure] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)  # behind which the last tokens were sampled
    spoiled: list[int] = field(default_factory=list)


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
        """Note the next token and return whether the row behind it counts.

        A row that is not finite may be so because of a drafted token behind it, as attention may
        multiply hidden values by 0. The next step computes it again, without drafts.
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


def verify(
    logits_RV: Tensor,
    slices: Items[SequenceSlice],
    sequences: Mapping[int, Sequence],
    sample: Sample,
) -> Verified:
    """Sample the sequences that catch up in a step. Their tokens stay as they are.

    logits_RV: the logits of the slices, one after the other.
    sample: samples one token per row, each at its point; it must not raise.
    """
    if not any(piece.num_drafted for piece in slices):
        return _sample_once(logits_RV, slices, sequences, sample)
    walks, start = list[_Walk](), 0
    for piece in slices:
        sequence, start = sequences[piece.sequence_id], start + piece.num_logits
        if piece.start + len(piece.token_ids) - piece.num_drafted == sequence.num_tokens:
            first = start - 1 - piece.num_drafted
            walks.append(_Walk(sequence, first, piece.drafted, sequence.num_tokens))
    try:
        _sample_levels(logits_RV, walks, sample)
    finally:
        for walk in walks:
            if walk.sequence.num_tokens > walk.begin:
                walk.sequence.truncate(walk.begin)
    return Verified(
        {walk.sequence.id: tuple(walk.run) for walk in walks if walk.run},
        {walk.sequence.id: walk.failure for walk in walks if walk.failure is not None},
        {walk.sequence.id: walk.first + len(walk.run) - 1 for walk in walks if walk.run},
        _spoiled(logits_RV, walks),
    )


def _sample_once(
    logits_RV: Tensor,
    slices: Items[SequenceSlice],
    sequences: Mapping[int, Sequence],
    sample: Sample,
) -> Verified:
    """Sample one token for each sequence that catches up in a step without drafts."""
    found, points, rows, start = Verified(), list[SamplingPoint](), list[int](), 0
    for piece in slices:
        sequence, start = sequences[piece.sequence_id], start + piece.num_logits
        position = piece.start + len(piece.token_ids)
        if position == sequence.num_tokens:
            points.append(SamplingPoint(sequence, position))
            rows.append(start - 1)
    if not points:
        return found
    chosen = logits_RV if len(rows) == len(logits_RV) else logits_RV[rows]
    for point, row, token in zip(points, rows, sample(chosen, points), strict=True):
        key = point.sequence.id
        if isinstance(token, RowFailure):
            found.failures[key] = token
        else:
            found.sampled[key], found.rows[key] = (token,), row
    return found


def _sample_levels(logits_RV: Tensor, walks: list[_Walk], sample: Sample) -> None:
    """Sample row by row of each sequence, those of all sequences together. If sampling needs no
    state that a refused token would spoil, all rows of a sequence are sampled with the first one,
    each behind the drafted tokens before it."""
    ahead = {id(walk) for walk in walks if _looks_ahead(walk, logits_RV.shape[-1])}
    for walk in walks:
        for drafted in walk.draft if id(walk) in ahead else ():
            walk.sequence.append(drafted)
    active = walks
    while active:
        rows, points, owners = list[int](), list[SamplingPoint](), list[_Walk]()
        for walk in active:
            done = len(walk.run)
            for place in range(done, 1 + (len(walk.draft) if id(walk) in ahead else done)):
                rows.append(walk.first + place)
                points.append(SamplingPoint(walk.sequence, walk.begin + place))
                owners.append(walk)
        going = dict.fromkeys(map(id, active), True)
        for walk, token in zip(owners, sample(logits_RV[rows], points), strict=True):
            if going[id(walk)]:
                going[id(walk)] = walk.goes_on(token)
        active = [walk for walk in active if going[id(walk)]]
        for walk in active:
            walk.sequence.append(walk.run[-1].token_id)


def _looks_ahead(walk: _Walk, vocab_size: int) -> bool:
    """Return whether all rows of a sequence may be sampled at once."""
    if not walk.draft or len(walk.draft) * vocab_size > _MOST_AT_ONCE:
        return False
    return SamplingPoint(walk.sequence, walk.begin).can_look_ahead


def _spoiled(logits_RV: Tensor, walks: list[_Walk]) -> list[int]:
    """Return the sequences with a row that is not finite behind their runs. Such a row may have
    left NaNs in the sequence's pages."""
    spoiled = [walk.sequence.id for walk in walks if walk.is_spoiled]
    refused = [
        (walk.first + place, walk.sequence.id)
        for walk in walks
        for place in range(max(len(walk.run), 1), len(walk.draft) + 1)
    ]
    if not refused:
        return spoiled
    sums = logits_RV[[row for row, _ in refused]].sum(dim=-1)
    if bool(torch.isfinite(sums).all()):
        return spoiled
    is_finite = torch.isfinite(sums).tolist()
    return spoiled + [key for (_, key), ok in zip(refused, is_finite, strict=True) if not ok]
