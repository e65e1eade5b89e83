"""Ways to cut a prompt into pieces."""

from __future__ import annotations

from itertools import pairwise

from tests.support.sampled_cases import EVERY_CASE

PAGE = 16


def pieces_of(length: int, chunk: int) -> list[tuple[int, int]]:
    """Returns the first position and the end of each piece.

    Pieces of one token lie at both ends of each page, and a longer one between them, because inside
    a page one step is like the next; unless every case runs.
    """
    starts = range(0, length, chunk)
    if chunk == 1 and not EVERY_CASE:
        starts_at = {0, 1, 2, PAGE - 1}
        return [*pairwise([*(s for s in starts if s % PAGE in starts_at), length])]
    return [*pairwise([*starts, length])]
