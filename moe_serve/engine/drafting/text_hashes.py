"""Hashes parts of growing texts, each in constant time regardless of its length.

With tokens t[0], t[1], ... and an odd B, all modulo 2^64:

    prefix(i)    = t[0] B + t[1] B^2 + ... + t[i-1] B^i
    hash(i, j)   = (prefix(j) - prefix(i)) B^-i     the same for equal tokens at any place

This is the polynomial hash of Karp and Rabin (IBM J. Res. Dev. 31, 1987). Its high bits are the
good ones, so a table takes its index from those.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.sequence import Sequence

Prefix: TypeAlias = "array[int]"  # prefix(0), prefix(1), ...: one more than the text has tokens

NUM_BITS = 64
MASK = (1 << NUM_BITS) - 1
_BASE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
_BASE_INVERSE = pow(_BASE, -1, 1 << NUM_BITS)
_FEW = 12  # tokens up to which Python is faster than numpy


class TextHashes:
    """Keeps the prefix hashes of the running sequences. Drafters share them."""

    def __init__(self) -> None:
        self._powers, self._inverses = array("Q", [1]), array("Q", [1])
        self._of: dict[int, Prefix] = {}

    def of(self, sequence: Sequence) -> Prefix:
        """Returns the prefix hashes of all tokens of a sequence."""
        prefix = self._of.get(sequence.id)
        if prefix is None:
            prefix = self._of[sequence.id] = new_prefix()
        tokens, num_known = sequence.token_ids, len(prefix) - 1
        if len(tokens) > num_known:
            self.extend(prefix, tokens[num_known:])
        return prefix

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops sequences that have ended or moved away."""
        for sequence_id in sequence_ids:
            self._of.pop(sequence_id, None)

    def extend(self, prefix: Prefix, tokens: Tokens[int]) -> None:
        """Appends the hashes behind more tokens of a text."""
        start = len(prefix)
        self._grow(start + len(tokens))
        if len(tokens) <= _FEW:
            last, powers = prefix[-1], self._powers
            for position, token in enumerate(tokens, start):
                last = last + token * powers[position] & MASK
                prefix.append(last)
            return
        factors = np.frombuffer(self._powers, np.uint64)[start : start + len(tokens)]
        sums = np.cumsum(np.array(tokens, np.uint64) * factors, dtype=np.uint64)
        prefix.frombytes((sums + np.uint64(prefix[-1])).tobytes())

    def hash(self, prefix: Prefix, start: int, end: int) -> int:
        """Returns the hash of the tokens in [start, end)."""
        return (prefix[end] - prefix[start]) * self._inverses[start] & MASK

    @property
    def inverses(self) -> Prefix:
        """B^-i by i, for the places of all texts: the factors of hash(i, j)."""
        return self._inverses

    def hashes(self, prefix: Prefix, first: int, last: int, size: int) -> NDArray[np.uint64]:
        """Returns the hashes of the `size` tokens before each position in [first, last]."""
        values = np.frombuffer(prefix, np.uint64)
        starts = slice(first - size, last + 1 - size)
        inverses = np.frombuffer(self._inverses, np.uint64)[starts]
        found: NDArray[np.uint64] = (values[first : last + 1] - values[starts]) * inverses
        return found

    def _grow(self, num: int) -> None:
        """Makes powers up to B^num and their inverses."""
        if num < len(self._powers):
            return
        wanted = max(2 * len(self._powers), num + 1, 1024)
        for values, factor in ((self._powers, _BASE), (self._inverses, _BASE_INVERSE)):
            value = values[-1]
            for _ in range(wanted - len(values)):
                value = value * factor & MASK
                values.append(value)


def new_prefix() -> Prefix:
    """Returns the prefix hashes of an empty text."""
    return array("Q", [0])
