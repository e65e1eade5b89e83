"""Micro-batches on their way through the layers.

T rows of a micro-batch, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels.interface.rank_kernels import AttentionTurn
from moe_serve.model.stage.adapted_stage import AdaptedStage
from moe_serve.model.stage.step_inputs import StepInputs
from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from moe_serve.pipeline.groups.segments import SegmentRows

MakeInputs = Callable[[MicroBatch], StepInputs]


class MicroBatchState:
    """A micro-batch whose rows pass all layers together."""

    pieces: Sequence[SequenceSlice] | None = None  # of its rows, where these change
    turn: AttentionTurn | None = None  # if its layers are single calls, see RankTurns
    is_away_by_turn = False  # the rows with the experts were sent by `turn`

    def __init__(self, inputs: StepInputs, hidden_TD: Tensor) -> None:
        self.inputs, self.hidden_TD = inputs, hidden_TD
        self.layer_away: int | None = None  # layer whose rows are with the experts
        self.shared_TD: Tensor | None = None  # output of that layer's shared expert
        self.plans: list[Any] = []  # of `inputs`, as `turn` needs them

    def enter(self, layer: int) -> bool:
        """Returns whether it has rows in a layer, after the layer before has been added."""
        return True

    def end(self) -> Tensor | None:
        """Returns the wanted rows of logits, [R], once all layers have been added."""
        return self.inputs.logit_rows


class SegmentedState(MicroBatchState):
    """A micro-batch some of whose rows take part in some layers only."""

    def __init__(self, rows: SegmentRows, make_inputs: MakeInputs, stage: AdaptedStage) -> None:
        self._rows, self._make_inputs, self._stage = rows, make_inputs, stage
        self._segment, self._left = rows.segments[0], list(rows.segments[::-1])
        self.layer_away = self.shared_TD = None
        self.hidden_TD = torch.empty(0, stage.spec.width)
        self.pieces = ()

    def enter(self, layer: int) -> bool:
        """See `MicroBatchState.enter`. Raises ParkedStateError."""
        if self._left and self._left[-1].first == layer:
            self._leave()
            self._segment = segment = self._left.pop()
            self.pieces = segment.batch.slices
            if self.pieces:
                self.inputs = self._make_inputs(segment.batch)
                joined_TD = self._rows.join(segment)
                if joined_TD is None:
                    joined_TD = self._stage.embed(self.inputs)
                self.hidden_TD = joined_TD
        return bool(self.pieces)

    def end(self) -> Tensor | None:
        """See `MicroBatchState.end`. None: no rows are left."""
        self._leave()
        return self.inputs.logit_rows if self.pieces else None

    def _leave(self) -> None:
        if self.pieces:
            self._rows.leave(self._segment, self.hidden_TD)
