"""Drafts tokens with the layer that a checkpoint ships for predicting further tokens (MTP)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe_serve.engine.drafting.draft import DraftProposal, DraftSource
from moe_serve.engine.execute.verify import Verified
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.stage.mtp_stage import (
    MAX_GUESSES,
    MAX_TOKENS,
    MTPPart,
    pages_of_draft,
)
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Followed:
    """The rows of a step whose next tokens are known, and these tokens at the rows' positions.
    `last` is the last of the rows, counted over all sequences; `is_sampled` means that a token was
    sampled there."""

    piece: SequenceSlice
    last: int
    is_sampled: bool


class MTPDrafter:
    """Runs the layer over the rows of each step, and guesses the tokens behind sampled ones.

    The layer's keys and values lie in the sequences' own pages, so they are shared, moved and
    given back with the model's. A failure ends drafting and affects no request.
    """

    def __init__(self, part: MTPPart, pipeline: Pipeline, max_tokens: int) -> None:
        self._part, self._pipeline = part, pipeline
        self._max_tokens, self._has_failed = min(max_tokens, MAX_TOKENS), False
        self._drafting: list[_Followed] = []  # sequences of the last step that may get guesses
        self._states_TD: Tensor | None = None  # behind its rows
        pipeline.keeps_every_row = True

    def follow(self, plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]) -> None:
        """See GuessingNetwork.follow."""
        hidden_TD, self._states_TD = self._pipeline.hidden_TD, None
        if hidden_TD is None or self._has_failed:
            return
        try:
            self._follow(plan, found, sequences, hidden_TD)
        except Exception:
            self._give_up()

    def guess(self, plan: StepPlan, found: Verified) -> dict[int, DraftProposal]:
        """See GuessingNetwork.guess."""
        drafting, states_TD = self._drafting, self._states_TD
        if states_TD is None or not drafting or len(drafting) > MAX_GUESSES:
            return {}
        most = min(plan.num_guesses, MAX_GUESSES // len(drafting))
        try:
            guesses = self._guesses(drafting, states_TD[[each.last for each in drafting]], most)
        except Exception:
            self._give_up()
            return {}
        return {
            each.piece.sequence_id: DraftProposal(DraftSource.MTP.value, tuple(tokens))
            for each, tokens in zip(drafting, guesses, strict=True)
        }

    def _give_up(self) -> None:
        _log.exception("the MTP layer failed and drafts nothing until the server restarts")
        self._has_failed, self._pipeline.keeps_every_row = True, False

    def _follow(
        self,
        plan: StepPlan,
        found: Verified,
        sequences: Mapping[int, Sequence],
        hidden_TD: Tensor,
    ) -> None:
        followed, rows = _follow(plan, found, sequences)
        if not followed:
            return
        if len(rows) < len(hidden_TD):
            hidden_TD = hidden_TD[torch.from_numpy(rows).to(hidden_TD.device)]
        batch = MicroBatch(tuple(each.piece for each in followed))
        self._states_TD = self._part.stage.first_states(batch, hidden_TD, self._part.cache)
        self._drafting = [each for each in followed if self._may_draft(each, sequences)]

    def _may_draft(self, each: _Followed, sequences: Mapping[int, Sequence]) -> bool:
        """Returns whether drafts behind the rows are wanted and fit the context."""
        piece = each.piece
        end = piece.start + len(piece.token_ids) + self._max_tokens
        request = sequences[piece.sequence_id].request
        return each.is_sampled and request.drafts and end <= self._part.max_positions

    def _guesses(self, drafting: list[_Followed], state_SD: Tensor, most: int) -> list[list[int]]:
        """Returns `most` tokens for each sequence, each the likeliest after the one before it."""
        stage, cache = self._part.stage, self._part.cache
        pieces = [self._with_pages(i, each.piece, most) for i, each in enumerate(drafting)]
        tokens_S, guesses = stage.logits(state_SD).argmax(-1), list[Tensor]()
        for depth in range(1, most):
            guesses.append(tokens_S)
            tokens = tokens_S.cpu().numpy()
            batch = MicroBatch(
                tuple(
                    replace(piece, start=piece.start + depth, token_ids=tokens[i : i + 1])
                    for i, piece in enumerate(pieces)
                )
            )
            state_SD = stage.next_states(batch, state_SD, cache)
            tokens_S = stage.logits(state_SD).argmax(-1)
        found: list[list[int]] = torch.stack((*guesses, tokens_S), dim=1).tolist()
        return found

    def _with_pages(self, index: int, piece: SequenceSlice, most: int) -> SequenceSlice:
        """Returns the last token of a slice, with pages for the keys of `most` - 1 more tokens."""
        last, size = piece.start + len(piece.token_ids) - 1, self._part.cache.page_size
        num_missing = (last + most - 1) // size + 1 - len(piece.page_table)
        table = piece.page_table
        if num_missing > 0:
            own, each = self._part.own_pages, pages_of_draft(size)
            table = (*table, *own[index * each :][:num_missing])
        return replace(piece, start=last, token_ids=piece.token_ids[-1:], page_table=table)


def _follow(
    plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]
) -> tuple[list[_Followed], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Returns the rows of a step whose next tokens are known, and their places in the step.

    For a sequence that caught up, these are the rows of its tokens and of its accepted drafted
    tokens. For any other sequence they are all rows, because its prompt continues.
    """
    followed, ranges, start, num_rows = list[_Followed](), list[range](), 0, 0
    for piece in plan.slices:
        sequence, first = sequences[piece.sequence_id], piece.start
        end = first + len(piece.token_ids) - piece.num_drafted
        following, run = sequence.token_ids[first + 1 : end + 1], list[int]()
        if end == sequence.num_tokens:
            sampled = found.sampled.get(piece.sequence_id, ())
            run = [each.token_id for each in sampled if each.is_valid]
        if (following or run) and not piece.num_dropped:  # else no draft is wanted
            tokens = np.array([*following, *run], dtype=np.int64)
            num_rows += len(tokens)
            ranges.append(range(start, start + len(tokens)))
            shifted = SequenceSlice(piece.sequence_id, first, tokens, piece.page_table, 1)
            followed.append(_Followed(shifted, num_rows - 1, bool(run)))
        start += len(piece.token_ids)
    return followed, np.array([row for each in ranges for row in each], dtype=np.int64)
