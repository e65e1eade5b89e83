"""Keeps the routers' choices of a step while it runs.

T tokens of a micro-batch, N requested tokens, L layers with routed experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.layer_stack import StackResult
from moe_serve.model.step_plan import MicroBatch, StepPlan

MAX_BYTE_EXPERTS = 256
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

    It holds the routers' own outputs until the step's end and copies them once.
    """

    def __init__(self, num_experts: int) -> None:
        self._dtype = torch.uint8 if num_experts <= MAX_BYTE_EXPERTS else torch.int16
        self._is_on = False
        # ids and weights by micro-batch, one entry per layer
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Start a step; data left by a failed step is dropped."""
        self._is_on = plan.routes is not None
        self._rows = {}

    def take(self, micro_batch: int, expert_ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Keep a layer's choices before its rows are sent to the experts."""
        if self._is_on:
            self._rows.setdefault(micro_batch, []).append((expert_ids_TK, weights_TK))

    def take_stacked(self, result: StackResult) -> None:
        """Keep the choices of all layers, which one call has computed."""
        if result.expert_ids_LTK is not None and result.weights_LTK is not None:
            for choices in zip(result.expert_ids_LTK, result.weights_LTK, strict=True):
                self.take(0, *choices)

    def end(self, plan: StepPlan) -> StepChoices | None:
        """Return the choices that the plan asked for; None if it asked for none."""
        kept, self._rows, self._is_on = self._rows, {}, False
        if plan.routes is None:
            return None
        wanted = plan.routes.sequence_ids
        sequences, counts, ids, weights = [], [], [], []
        for index, batch in enumerate(plan.micro_batches):
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
        if not ids:
            return None
        return StepChoices(
            tuple(sequences),
            tuple(counts),
            np.concatenate(ids),
            np.concatenate(weights) if plan.routes.has_weights else None,
        )


def _rows_of(batch: MicroBatch, wanted: frozenset[int]) -> list[int] | slice | None:
    """Return the requested rows of a micro-batch; None if there are none."""
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
    """Stack [T, K] of every layer -> [N, L, K] on the host, with a single copy if they are on a
    device.

    On a CPU it uses numpy, whose calls are short: they are most of the cost of this feature.
    """
    top_k = layers[0].shape[1]
    if layers[0].device.type != "cpu":
        stacked: NDArray[Any] = torch.cat(layers, dim=1)[rows].to(dtype).cpu().numpy()
        return stacked.reshape(-1, len(layers), top_k)
    beside: NDArray[Any] = np.concatenate([layer_TK.numpy() for layer_TK in layers], axis=1)
    return beside[rows].astype(_NUMPY[dtype]).reshape(-1, len(layers), top_k)
