"""What the requests of a step are expected to need, as part of the message to expert ranks: bytes,
one for each expert of each layer, as nobody wants to know it better.

L layers with routed experts, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_MOST_BYTES = 64 * 1024  # of a step's message: 128 layers of 512 experts
_STEPS = 255


def pack_needed(each: Iterable[NDArray[np.float32] | None]) -> bytes:
    """Of the probabilities [L, E] of all attention ranks, that one of them needs an expert; empty
    where nobody knows, or it would be too much to send."""
    known = [needed_LE for needed_LE in each if needed_LE is not None]
    if not known or known[0].size > _MOST_BYTES:
        return b""
    spared_LE = np.prod([1 - needed_LE for needed_LE in known], axis=0)
    packed: bytes = np.rint((1 - spared_LE) * _STEPS).astype(np.uint8).tobytes()
    return packed


def unpack_needed(packed: bytes, shape: tuple[int, int]) -> NDArray[np.float64] | None:
    """[L, E]; None: nobody knows, or it is of another shape (the step is none the worse)."""
    if not packed:
        return None
    if len(packed) != shape[0] * shape[1]:
        _log.warning("%d experts are expected, of %d x %d: nothing is", len(packed), *shape)
        return None
    return np.frombuffer(packed, dtype=np.uint8).reshape(shape) / _STEPS
