"""Drafts with the served model itself, which runs fewer experts of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_serve.engine.drafting.draft import DraftProposal, DraftSource
from moe_serve.engine.execute.verify import Verified
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline

_MOST_SEQUENCES = 16


@dataclass(slots=True)
class _Guess:
    """The next row to draft of a sequence, and the tokens drafted so far."""

    piece: SequenceSlice
    num_left: int
    tokens: list[int]
    is_finite: bool = True


class SelfDrafter:
    """Runs a drafting pipeline over the pages of the step that has just ended.

    The pipeline writes keys and values behind the sequence's computed tokens. They are not visible
    to other sequences, and the step that verifies the draft overwrites them before it reads them.
    """

    def __init__(self, pipeline: Pipeline, page_size: int) -> None:
        """`pipeline` runs fewer experts on the same cache."""
        self._pipeline, self._page_size = pipeline, page_size

    def follow(self, plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]) -> None:
        """See GuessingNetwork. The model has computed the keys and values."""

    def guess(self, plan: StepPlan, found: Verified) -> dict[int, DraftProposal]:
        """See GuessingNetwork.guess. A sequence whose draft is not finite is added to the spoiled
        ones, as its page may hold NaNs."""
        guesses = [
            guess
            for piece in plan.slices
            if (guess := self._first(piece, found, plan.num_guesses)) is not None
            and guess.num_left > 0
        ]
        if len(guesses) > _MOST_SEQUENCES:
            return {}
        active = guesses
        while active:
            self._step(active)
            active = [guess for guess in active if guess.num_left and guess.is_finite]
        found.spoiled.extend(g.piece.sequence_id for g in guesses if not g.is_finite)
        return {
            guess.piece.sequence_id: DraftProposal(DraftSource.SELF.value, tuple(guess.tokens))
            for guess in guesses
            if guess.is_finite
        }

    def _first(self, piece: SequenceSlice, found: Verified, most: int) -> _Guess | None:
        """Returns the row of a sequence's newest token; None without a valid one."""
        run = found.sampled.get(piece.sequence_id)
        if not run or not run[-1].is_valid or piece.sequence_id in found.spoiled:
            return None
        if piece.num_dropped:
            return None  # no draft is wanted
        start = piece.start + len(piece.token_ids) - piece.num_drafted + len(run) - 1
        room = len(piece.page_table) * self._page_size - start
        token = np.array([run[-1].token_id], dtype=np.int64)
        row = SequenceSlice(piece.sequence_id, start, token, piece.page_table, num_logits=1)
        return _Guess(row, min(most, room), [])

    def _step(self, guesses: list[_Guess]) -> None:
        """Drafts one token of each sequence: the likeliest one."""
        batch = MicroBatch(tuple(guess.piece for guess in guesses))
        top_S, tokens_S = self._pipeline.run(StepPlan((batch,))).max(dim=-1)
        is_finite = torch.isfinite(top_S).tolist()
        for guess, token, ok in zip(guesses, tokens_S.tolist(), is_finite, strict=True):
            guess.is_finite, guess.num_left = ok, guess.num_left - 1
            guess.tokens.append(token)
            ids = np.array([token], dtype=np.int64)
            guess.piece = replace(guess.piece, start=guess.piece.start + 1, token_ids=ids)
