"""Drafts with a trained head, which starts from the model's last hidden states."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moe_serve.engine.drafting.draft import DraftProposal, DraftSource
from moe_serve.engine.execute.verify import Verified
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.speculation_head import SpeculationHead
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.pipeline import Pipeline

_MOST_SEQUENCES = 32
_LEAST_CONFIDENCE = 0.25  # of all tokens of a draft together; guesses below it are not made


class HeadDrafter:
    """Implements GuessingNetwork. A draft ends where the head's confidence is too low."""

    def __init__(self, head: SpeculationHead, pipeline: Pipeline) -> None:
        """`pipeline` keeps the last hidden states of steps that ask for guesses."""
        self._head, self._pipeline = head, pipeline
        self.least_confidence = _LEAST_CONFIDENCE
        pipeline.keeps_hidden = True

    def follow(self, plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]) -> None:
        """See GuessingNetwork. A head has no keys and values."""

    def guess(self, plan: StepPlan, found: Verified) -> dict[int, DraftProposal]:
        """See GuessingNetwork.guess."""
        hidden_RD = self._pipeline.hidden_RD
        keys = [key for key, run in found.sampled.items() if run[-1].is_valid]
        if hidden_RD is None or not keys or len(keys) > _MOST_SEQUENCES:
            return {}
        tokens = torch.tensor([found.sampled[key][-1].token_id for key in keys])
        rows = [found.rows[key] for key in keys]
        if len(rows) < len(hidden_RD) or rows != sorted(rows):
            hidden_RD = hidden_RD[rows]
        guesses = self._head.draft(hidden_RD, tokens, plan.num_guesses, self.least_confidence)
        return {
            key: DraftProposal(DraftSource.HEAD.value, guess.token_ids, guess.confidences)
            for key, guess in zip(keys, guesses, strict=True)
            if guess.token_ids
        }
