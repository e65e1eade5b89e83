"""Divides a micro-batch whose sequences take part in different layers.

    layers   0 1 2 3 4 5 6 7
    decode   x x x x x x x x
    prompt       x x x           segments: [0, 2) decode, [2, 5) decode and prompt, [5, 8) decode

n tokens of a sequence, T tokens of a segment, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from moe_serve.pipeline.groups.parked_states import ParkedStates


@dataclass(frozen=True, slots=True)
class LayerSegment:
    """Layers [first, end), in which the same slices of a micro-batch take part."""

    first: int
    end: int
    batch: MicroBatch


def segments(batch: MicroBatch, num_layers: int) -> tuple[LayerSegment, ...]:
    """Returns the segments of a micro-batch, in order and covering all layers."""
    borders = {0, num_layers}
    for piece in batch.slices:
        if piece.layers is not None:
            borders |= {piece.layers.first, piece.layers.end}
    ordered = sorted(borders)
    return tuple(
        LayerSegment(first, end, MicroBatch(tuple(p for p in batch.slices if _is_in(p, first))))
        for first, end in zip(ordered, ordered[1:], strict=False)
    )


def _is_in(piece: SequenceSlice, layer: int) -> bool:
    return piece.layers is None or piece.layers.first <= layer < piece.layers.end


class SegmentRows:
    """The rows of one micro-batch, which join and leave at the borders of its segments."""

    def __init__(self, batch: MicroBatch, num_layers: int, parked: ParkedStates) -> None:
        self.segments, self._parked = segments(batch, num_layers), parked
        self._rows: dict[int, Tensor] = {}  # sequence -> [n, D], of those between two segments

    def join(self, segment: LayerSegment) -> Tensor | None:
        """Returns the residual stream of a segment's rows, [T, D]; None at the first layer, where
        the rows come from the embedding. Raises ParkedStateError."""
        if segment.first == 0:
            return None
        parts = [
            self._parked.take(piece)
            if piece.layers is not None and piece.layers.first == segment.first
            else self._rows[piece.sequence_id]
            for piece in segment.batch.slices
        ]
        return torch.cat(parts)  # a copy, as the parked states stay as they are

    def leave(self, segment: LayerSegment, hidden_TD: Tensor) -> None:
        """Divides the rows at a segment's end, and parks those that leave the step here."""
        slices = segment.batch.slices
        parts = hidden_TD.split([len(piece.token_ids) for piece in slices])
        self._rows = {piece.sequence_id: part for piece, part in zip(slices, parts, strict=True)}
        for piece in slices:
            layers = piece.layers
            if layers is not None and layers.end == segment.end and not layers.is_last:
                self._parked.park(piece, self._rows[piece.sequence_id].clone())
