"""Packs routing for messages: the routers' choices of a step, and the experts it may need.

Choices travel with a step's tokens, never one message per layer. Expected needs travel to expert
ranks as a byte for each expert of each layer, which is precise enough. L layers with routed
experts, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.cluster.control.messages import Choices
from moe_serve.pipeline.route_tap import StepChoices

_log = logging.getLogger(__name__)

_BYTE, _WEIGHT = np.dtype("u1"), np.dtype("<f2")
_WIDE: np.dtype[np.int16] = np.dtype("<i2")


def pack_choices(choices: StepChoices) -> Choices:
    ids_NLK, weights_NLK = choices.expert_ids_NLK, choices.weights_NLK
    is_wide = ids_NLK.dtype.itemsize > 1
    return Choices(
        choices.sequence_ids,
        choices.counts,
        ids_NLK.shape[1],
        ids_NLK.shape[2],
        is_wide,
        ids_NLK.astype(_WIDE if is_wide else _BYTE, copy=False).tobytes(),
        b"" if weights_NLK is None else weights_NLK.astype(_WEIGHT, copy=False).tobytes(),
    )


def unpack_choices(packed: Choices) -> StepChoices | None:
    """Returns None if the sizes do not fit each other; the step's tokens are not affected."""
    counts = tuple(packed.counts)
    shape = (sum(counts), packed.num_layers, packed.top_k)
    size = shape[0] * shape[1] * shape[2]
    dtype: np.dtype[np.integer[Any]] = _WIDE if packed.is_wide else _BYTE
    is_sound = (
        len(counts) == len(packed.sequence_ids)
        and min(*counts, *shape, 0) == 0
        and len(packed.expert_ids) == size * dtype.itemsize
        and len(packed.weights) in (0, size * _WEIGHT.itemsize)
    )
    if not is_sound:
        _log.warning(
            "ignored a rank's %d bytes of choices: they do not fit the shape (tokens, "
            "layers, k) %s",
            len(packed.expert_ids),
            shape,
        )
        return None
    weights = None
    if packed.weights:
        weights = np.frombuffer(packed.weights, dtype=_WEIGHT).reshape(shape)
    ids = np.frombuffer(packed.expert_ids, dtype=dtype).reshape(shape)
    return StepChoices(tuple(packed.sequence_ids), counts, ids, weights)


_MOST_BYTES = 64 * 1024  # in a step's message: 128 layers of 512 experts
_STEPS = 255


def pack_needed(each: Iterable[NDArray[np.float32] | None]) -> bytes:
    """Packs the probability [L, E] that an attention rank needs an expert, over all attention
    ranks. Empty if no rank predicts, or if it would be too large to send."""
    known = [needed_LE for needed_LE in each if needed_LE is not None]
    if not known or known[0].size > _MOST_BYTES:
        return b""
    spared_LE = np.prod([1 - needed_LE for needed_LE in known], axis=0)
    packed: bytes = np.rint((1 - spared_LE) * _STEPS).astype(np.uint8).tobytes()
    return packed


def unpack_needed(packed: bytes, shape: tuple[int, int]) -> NDArray[np.float64] | None:
    """Returns [L, E]; None if nothing was predicted or the shape differs (the step is not
    affected)."""
    if not packed:
        return None
    if len(packed) != shape[0] * shape[1]:
        _log.warning(
            "ignored a prediction for %d experts, as the model has %d x %d", len(packed), *shape
        )
        return None
    return np.frombuffer(packed, dtype=np.uint8).reshape(shape) / _STEPS
