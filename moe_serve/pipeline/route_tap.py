"""Keeps the routers' choices of a step while it runs.

T tokens of a micro-batch, N requested tokens, L layers with routed experts, K choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.layer_stack import StackResult
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan

MAX_BYTE_EXPERTS = 256
_Choices = tuple[Tensor, Tensor]  # expert ids and weights of a layer
_NUMPY = {torch.uint8: np.uint8, torch.int16: np.int16, torch.float16: np.float16}


@dataclass(frozen=True, slots=True)
class StepChoices:
    """The choices for some slices of a step, one slice after the other."""

    sequence_ids: tuple[int, ...]
    counts: tuple[int, ...]  # tokens of each slice
    expert_ids_NLK: NDArray[np.integer[Any]]  # uint8, or int16 with more than 256 experts
    weights_NLK: NDArray[np.float16] | None = None  # present if the plan asked for them


class RouteTap:
    """Collects the choices of one pipeline. A plan that asks for nothing costs one test per layer.

    It holds the routers' own outputs until the step's end and copies them once. Those of tokens
    that pass the layers in several steps are kept until the last of these steps, and returned then
    if every one of the steps asked for them.
    """

    def __init__(self, num_experts: int) -> None:
        self._dtype = torch.uint8 if num_experts <= MAX_BYTE_EXPERTS else torch.int16
        self._is_on = False
        # ids and weights by micro-batch, one entry per layer
        self._rows: dict[int, list[_Choices]] = {}
        # by sequence, one entry per layer: those of tokens that take part in some layers only, in
        # this step, and in the steps before with the layer that comes next
        self._in_groups: dict[int, list[_Choices]] = {}
        self._parked: dict[int, tuple[int, list[_Choices]]] = {}

    @property
    def is_on(self) -> bool:
        """True if the step's plan asks for choices, which are then kept until its end."""
        return self._is_on

    def begin(self, plan: StepPlan) -> None:
        """Starts a step; data left by a failed step is dropped."""
        self._is_on = plan.routes is not None
        self._rows, self._in_groups = {}, {}
        if self._parked:
            self._parked = {k: kept for k, kept in self._parked.items() if k in plan.parked}

    def take(
        self,
        micro_batch: int,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        pieces: Sequence[SequenceSlice] | None = None,
    ) -> None:
        """Keeps a layer's choices before its rows are sent to the experts. `pieces`: those of the
        rows, if not all of the micro-batch's slices take part in the layer."""
        if not self._is_on:
            return
        if pieces is None:
            self._rows.setdefault(micro_batch, []).append((expert_ids_TK, weights_TK))
            return
        counts = [len(piece.token_ids) for piece in pieces]
        parts = list(zip(expert_ids_TK.split(counts), weights_TK.split(counts), strict=True))
        for piece, choices in zip(pieces, parts, strict=True):
            if piece.layers is not None:
                self._in_groups.setdefault(piece.sequence_id, []).append(choices)
        whole = [part for p, part in zip(pieces, parts, strict=True) if p.layers is None]
        if whole:
            ids, weights = (torch.cat(each) for each in zip(*whole, strict=True))
            self._rows.setdefault(micro_batch, []).append((ids, weights))

    def take_stacked(
        self, result: StackResult, pieces: Sequence[SequenceSlice] | None = None
    ) -> None:
        """Keeps the choices of all layers that one call has computed. `pieces`: see `take`."""
        if result.expert_ids_LTK is not None and result.weights_LTK is not None:
            for choices in zip(result.expert_ids_LTK, result.weights_LTK, strict=True):
                self.take(0, *choices, pieces)

    def end(self, plan: StepPlan) -> StepChoices | None:
        """Returns the choices that the plan asked for; None if it asked for none."""
        kept, self._rows, self._is_on = self._rows, {}, False
        if plan.routes is None:
            return None
        wanted = plan.routes.sequence_ids
        sequences, counts, ids, weights = [], [], [], []
        for index, whole in enumerate(plan.micro_batches):
            batch = whole
            if whole.is_grouped:
                batch = MicroBatch(tuple(s for s in whole.slices if s.layers is None))
            rows = _rows_of(batch, wanted)
            if rows is None or not kept.get(index):
                continue
            for piece in batch.slices:
                if piece.sequence_id in wanted:
                    sequences.append(piece.sequence_id)
                    counts.append(len(piece.token_ids))
            ids.append(_chosen([layer_ids for layer_ids, _ in kept[index]], rows, self._dtype))
            if plan.routes.has_weights:
                layers = [layer_weights for _, layer_weights in kept[index]]
                weights.append(_chosen(layers, rows, torch.float16))
        for piece in plan.slices:
            passed = self._passed(piece) if piece.sequence_id in wanted else []
            if passed:
                sequences.append(piece.sequence_id)
                counts.append(len(piece.token_ids))
                ids.append(_chosen([each for each, _ in passed], slice(None), self._dtype))
                if plan.routes.has_weights:
                    beside = [each for _, each in passed]
                    weights.append(_chosen(beside, slice(None), torch.float16))
        if not ids:
            return None
        return StepChoices(
            tuple(sequences),
            tuple(counts),
            np.concatenate(ids),
            np.concatenate(weights) if plan.routes.has_weights else None,
        )

    def _passed(self, piece: SequenceSlice) -> list[_Choices]:
        """Returns the choices of tokens that have now passed all layers, in several steps; empty if
        they have not, or if some are missing."""
        if piece.layers is None:
            return []
        following, before = self._parked.pop(piece.sequence_id, (0, []))
        if piece.layers.first == 0:
            following, before = 0, []
        choices = [*before, *self._in_groups.get(piece.sequence_id, [])]
        if following != piece.layers.first:
            return []  # the steps before did not ask
        if piece.layers.is_last:
            return choices
        self._parked[piece.sequence_id] = piece.layers.end, choices
        return []


def _rows_of(batch: MicroBatch, wanted: frozenset[int]) -> list[int] | slice | None:
    """Returns the requested rows of a micro-batch; None if there are none."""
    rows: list[int] = []
    end, is_whole = 0, True
    for piece in batch.slices:
        start, end = end, end + len(piece.token_ids)
        if piece.sequence_id in wanted:
            rows.extend(range(start, end))
        else:
            is_whole = False
    return slice(None) if is_whole else rows or None


def _chosen(
    layers: list[Tensor], rows: list[int] | slice, dtype: torch.dtype
) -> NDArray[np.integer[Any]] | NDArray[np.float16]:
    """Stacks [T, K] of every layer -> [N, L, K] on the host, with a single copy if they are on a
    device.

    On a CPU it uses numpy, whose calls are short: they are most of the cost of this feature.
    """
    top_k = layers[0].shape[1]
    if layers[0].device.type != "cpu":
        stacked: NDArray[Any] = torch.cat(layers, dim=1)[rows].to(dtype).cpu().numpy()
        return stacked.reshape(-1, len(layers), top_k)
    beside: NDArray[Any] = np.concatenate([layer_TK.numpy() for layer_TK in layers], axis=1)
    return beside[rows].astype(_NUMPY[dtype]).reshape(-1, len(layers), top_k)
