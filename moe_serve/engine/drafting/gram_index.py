"""Finds where the last tokens of a text occurred before, in constant time for each token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens


class GramIndex:
    """Maps the n tokens before a position of a text to that position, for several n.

    Each n has a table of positions, addressed by the hash of the n tokens; the newest entry wins.
    A found position is compared with the text, so a collision, or a text that was overwritten,
    loses an entry and never finds a wrong one. Memory is 4 bytes x `num_entries` for each n.
    """

    def __init__(self, sizes: tuple[int, ...], num_entries: int) -> None:
        """`sizes` are the lengths n, in ascending order. `num_entries` is rounded up to a power of
        two."""
        assert list(sizes) == sorted(set(sizes)) and sizes[0] > 0, f"the sizes are {sizes}"
        self.sizes = sizes
        self._mask = (1 << (max(num_entries, 2) - 1).bit_length()) - 1
        empty = array("i", [-1])
        self._tables = tuple((size, empty * (self._mask + 1)) for size in reversed(sizes))

    @property
    def num_bytes(self) -> int:
        return sum(table.itemsize * len(table) for _, table in self._tables)

    def note(self, text: Tokens[int], first: int, start: int, end: int) -> None:
        """Enter the positions in (start, end]. Only tokens from `first` on belong to the text."""
        mask = self._mask
        for size, table in self._tables:
            for position in range(max(start + 1, first + size), end + 1):
                table[hash(tuple(text[position - size : position])) & mask] = position

    def find(self, text: Tokens[int], tail: Tokens[int]) -> tuple[int, int] | None:
        """Return the position behind the newest occurrence of the longest end of `tail` that was
        entered, and the length of that end; None if it was not found."""
        for size, table in self._tables:
            if len(tail) < size:
                continue
            gram = tuple(tail[-size:])
            position = table[hash(gram) & self._mask]
            if position >= size and tuple(text[position - size : position]) == gram:
                return position, size
        return None
