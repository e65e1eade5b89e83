"""Finds where the last tokens of a text occurred before, in constant time for each token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens

import numpy as np

from moe_serve.engine.drafting.text_hashes import MASK, NUM_BITS, Prefix, TextHashes

_FEW = 8  # positions up to which Python is faster than numpy


class GramIndex:
    """Maps the n tokens before a position of a text to that position, for several n.

    Each n has a table of positions, addressed by a hash of the n tokens; the newest entry wins. A
    found position is compared with the text, so a collision, or a text that was overwritten, loses
    an entry and never finds a wrong one. Memory is 4 bytes x `num_entries` for each n.
    """

    def __init__(self, hashes: TextHashes, sizes: tuple[int, ...], num_entries: int) -> None:
        """`sizes` are the lengths n, in ascending order. `num_entries` is rounded up to a power of
        two."""
        assert list(sizes) == sorted(set(sizes)) and sizes[0] > 0, f"the sizes are {sizes}"
        self._hashes = hashes
        num_bits = (max(num_entries, 2) - 1).bit_length()
        self._shift, empty = NUM_BITS - num_bits, array("i", [-1])
        self._tables = tuple((size, empty * (1 << num_bits)) for size in sizes)

    @property
    def num_bytes(self) -> int:
        return sum(table.itemsize * len(table) for _, table in self._tables)

    def note(self, prefix: Prefix, start: int, end: int, offset: int = 0) -> None:
        """Enters the positions in (start, end] of a text with these prefix hashes. They are found
        as positions `offset` higher."""
        hash_of, shift = self._hashes.hash, self._shift
        for size, table in self._tables:
            first = max(start + 1, size)
            if end - first < _FEW:
                for position in range(first, end + 1):
                    key = hash_of(prefix, position - size, position) >> shift
                    table[key] = position + offset
                continue
            keys = self._hashes.hashes(prefix, first, end, size) >> np.uint64(shift)
            places = np.arange(first + offset, end + 1 + offset, dtype=np.int32)
            np.frombuffer(table, np.int32)[keys] = places  # the last of equal keys stays

    def find(
        self, prefix: Prefix, tokens: list[int], text: Tokens[int], least: int = 0
    ) -> tuple[int, int] | None:
        """Returns the position behind the newest occurrence in `text` of the longest end of
        `tokens` that was entered, and the length of that end; None if none of more than `least`
        tokens was found.

        `prefix` has the hashes of `tokens`. The lengths are tried in ascending order: a longer end
        is there only if a shorter one is.
        """
        end, found = len(tokens), None
        last, inverses, shift = prefix[end], self._hashes.inverses, self._shift
        for size, table in self._tables:
            start = end - size
            if start < 0:
                break
            if size <= least:
                continue
            position = table[((last - prefix[start]) * inverses[start] & MASK) >> shift]
            if position < 0:
                break  # never entered, so no longer end was
            if position >= size and [*text[position - size : position]] == tokens[start:]:
                found = position, size
        return found
