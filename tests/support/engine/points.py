"""The points at which samplers choose the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampling_point import SamplingPoint


def ends_of(sequences: Iterable[Sequence]) -> list[SamplingPoint]:
    """Returns one sampling point for each sequence, behind its last token."""
    return [SamplingPoint(sequence, sequence.num_tokens) for sequence in sequences]
