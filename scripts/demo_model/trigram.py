"""Computes the baseline: a byte trigram with interpolated Witten-Bell smoothing.

With n(ab) = times that context ab was seen and t(ab) = different bytes seen after it,
    P(c | ab) = (n(abc) + t(ab) P(c | b)) / (n(ab) + t(ab)),
and so on down to the uniform 1/256.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BYTES = 256
_SEPARATOR = b"\0"  # between documents; in no text

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


def trigram_bits_per_byte(train: list[str], valid: list[str]) -> float:
    """Returns the bits per byte on `valid` of a trigram that counted `train`."""
    seen, asked = _stream(train), _stream(valid)
    probability: Floats = np.full(len(asked) - 2, 1.0 / _BYTES)
    for order in (1, 2, 3):
        probability = _interpolate(seen, asked, order, probability)
    num_text_bytes = sum(len(text.encode()) for text in valid)
    return float(-np.log2(probability).sum() / num_text_bytes)


def _stream(texts: list[str]) -> Bytes:
    joined = _SEPARATOR * 2 + _SEPARATOR.join(text.encode() for text in texts) + _SEPARATOR
    return np.frombuffer(joined, dtype=np.uint8)


def _interpolate(seen: Bytes, asked: Bytes, order: int, lower: Floats) -> Floats:
    """Returns P of each byte of `asked` from position 2 on, given `order` - 1 bytes; `lower` is
    interpolated."""
    counts = np.bincount(_keys(seen, order), minlength=_BYTES**order).astype(np.int32)
    by_context = counts.reshape(-1, _BYTES)
    num_seen = by_context.sum(axis=1)
    num_kinds = (by_context > 0).sum(axis=1)
    keys = _keys(asked, order)
    context = keys // _BYTES
    total = num_seen[context] + num_kinds[context]
    mixed = (counts[keys] + num_kinds[context] * lower) / np.maximum(total, 1)
    return np.where(total > 0, mixed, lower)


def _keys(stream: Bytes, order: int) -> NDArray[np.int64]:
    """Returns the n-gram that ends at each position from 2 on, as one number."""
    keys = np.zeros(len(stream) - 2, dtype=np.int64)
    for back in range(order - 1, -1, -1):
        keys = keys * _BYTES + stream[2 - back : len(stream) - back]
    return keys
