"""Drafts on the rank that samples: tokens that a grammar forces or a network expects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.drafting.draft import NO_PROPOSALS, DraftProposal, DraftSource, Proposals
from moe_serve.engine.execute.mtp_drafter import MTPDrafter
from moe_serve.engine.execute.self_drafter import SelfDrafter
from moe_serve.engine.execute.verify import Verified
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.answer_masks import AnswerMasks
from moe_serve.errors import ConfigError
from moe_serve.model.speculation_head import SpeculationHead
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.mtp_stage import MTPPart
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.pipeline import Pipeline

HEAD_FOLDER = "speculation_head"  # in a model's folder
_MOST_SEQUENCES = 32  # of a step after which a head guesses
_LEAST_CONFIDENCE = 0.25  # of all tokens of a draft together; guesses below it are not made


class GuessingNetwork(Protocol):
    """Guesses tokens from the state that a step leaves on its rank."""

    def follow(self, plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]) -> None:
        """Brings the network's own keys and values up to a step, whether or not it guesses."""
        ...

    def guess(self, plan: StepPlan, found: Verified) -> dict[int, DraftProposal]:
        """Returns at most `plan.num_guesses` tokens after each run of a step, by sequence id."""
        ...


class HeadDrafter:
    """Implements GuessingNetwork with a trained head, which starts from the model's last hidden
    states. A draft ends where the head's confidence is too low."""

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


class StepDrafter:
    """Proposes drafts for the next step from the state that a step leaves on its rank."""

    def __init__(self, masks: AnswerMasks | None, network: GuessingNetwork | None = None) -> None:
        self._masks, self.network = masks, network
        self.clock: Clock = REAL_CLOCK  # measures what guesses cost

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        folder: Path,
        masks: AnswerMasks | None,
        stage: AttentionStage,
        pipeline: Pipeline,
        mtp: MTPPart | None = None,
        by_self: SelfDrafter | None = None,
    ) -> StepDrafter | None:
        """Builds the drafter that `config.speculation` needs beside the engine's own ones; None if
        it needs none.

        `mtp` and `by_self` are there if the method needs them. Raises ConfigError or
        CheckpointError if a head is wanted and cannot be used.
        """
        method = config.speculation.method
        if method in ("auto", "self"):
            return cls(masks, by_self)
        if mtp is not None:
            return cls(masks, MTPDrafter(mtp, pipeline, config.speculation.max_tokens))
        if method != "head":
            return None
        device = pipeline.device.type
        if device != "cpu" or config.cluster.attention_tp > 1:
            raise ConfigError(
                "speculation.method is 'head', which runs on CPUs with cluster.attention_tp 1, but "
                f"the device is {device} and attention_tp is {config.cluster.attention_tp}: use "
                "'auto'."
            )
        wanted = config.speculation.head
        head_folder = folder / HEAD_FOLDER if wanted is None else Path(wanted)
        return cls(masks, HeadDrafter(SpeculationHead.load_for(stage, head_folder), pipeline))

    def propose(
        self, plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]
    ) -> Proposals:
        """Returns drafts that continue the sampled tokens of a step. A network guesses only if the
        plan asks for it."""
        proposals, guess_s = dict[int, DraftProposal](), 0.0
        if self.network is not None:
            self.network.follow(plan, found, sequences)
            if plan.num_guesses and found.sampled:
                begun_at = self.clock()
                proposals = self.network.guess(plan, found)
                guess_s = self.clock() - begun_at
        if self._masks is not None:
            for key, tokens in self._masks.forced(found.sampled, sequences).items():
                proposals[key] = DraftProposal(DraftSource.GRAMMAR.value, tokens)
        return Proposals(proposals, guess_s) if proposals or guess_s else NO_PROPOSALS
