"""Drafts on the rank that samples: tokens that a grammar forces or a network expects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from moe_serve.config.sections import EngineConfig
from moe_serve.engine.drafting.draft import DraftSource
from moe_serve.engine.execute.mtp_drafter import MTPDrafter
from moe_serve.engine.execute.self_drafter import SelfDrafter
from moe_serve.engine.execute.step_outcome import Proposal
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
_HEAD_TOKENS = 4  # acceptance falls to a fifth behind them
_HEAD_SEQUENCES = 8  # with more, the rows of guesses cost more than they gain


class StepDrafter:
    """Proposes drafts for the next step from the state that a step leaves on its rank."""

    def __init__(
        self,
        masks: AnswerMasks | None,
        head: SpeculationHead | None = None,
        pipeline: Pipeline | None = None,
        mtp: MTPDrafter | None = None,
        by_self: SelfDrafter | None = None,
    ) -> None:
        """`pipeline` keeps the last hidden states, from which a `head` starts. `by_self` drafts
        with the model itself."""
        assert (head is None) == (pipeline is None), "a head starts from a pipeline's states"
        self._masks, self._head, self._pipeline = masks, head, pipeline
        self._mtp, self._self = mtp, by_self
        if pipeline is not None:
            pipeline.keeps_hidden = True

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
            return cls(masks, by_self=by_self)
        if mtp is not None:
            return cls(masks, mtp=MTPDrafter(mtp, pipeline, config.speculation.max_tokens))
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
        return cls(masks, SpeculationHead.load_for(stage, head_folder), pipeline)

    def propose(
        self, plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]
    ) -> dict[int, Proposal]:
        """Returns drafts that follow the runs which a step has sampled, by sequence id."""
        proposals: dict[int, Proposal] = {}
        if self._mtp is not None:
            proposals = self._mtp.propose(plan, found, sequences)
        if self._self is not None and found.sampled:
            proposals = self._self.propose(plan, found)
        if self._head is not None and found.sampled:
            proposals = self._guessed(found)
        if self._masks is not None:
            for key, tokens in self._masks.forced(found.sampled, sequences).items():
                proposals[key] = (DraftSource.GRAMMAR.value, tokens)
        return proposals

    def _guessed(self, found: Verified) -> dict[int, Proposal]:
        assert self._head is not None and self._pipeline is not None, "there is a head"
        hidden_RD = self._pipeline.hidden_RD
        keys = [key for key, run in found.sampled.items() if run[-1].is_valid]
        if hidden_RD is None or not keys or len(keys) > _HEAD_SEQUENCES:
            return {}
        tokens = torch.tensor([found.sampled[key][-1].token_id for key in keys])
        rows = [found.rows[key] for key in keys]
        drafts = self._head.draft(hidden_RD[rows], tokens, _HEAD_TOKENS)
        return {
            key: (DraftSource.HEAD.value, tuple(d)) for key, d in zip(keys, drafts, strict=True)
        }
