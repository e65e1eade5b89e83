"""Chooses the cell of a request, as a load balancer in front of independent servers would."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol


class Balancer(Protocol):
    """Chooses a cell from the prompt's length and the cells' requests in progress alone."""

    def cell_of(self, num_prompt: int, num_in_cell: Sequence[int]) -> int:
        """Returns the number of the cell that gets a request."""
        ...


class FewestRequests:
    """Implements Balancer: the cell with the fewest requests in progress."""

    def cell_of(self, num_prompt: int, num_in_cell: Sequence[int]) -> int:
        return num_in_cell.index(min(num_in_cell))


class ByPromptLength:
    """Implements Balancer for groups of unlike cells. Each range of prompt lengths has a share for
    every group; groups take turns by these shares, and the group's cell with the fewest requests
    gets the request."""

    def __init__(
        self,
        most_prompt: Sequence[int],
        shares: Sequence[Sequence[float]],
        num_cells: Sequence[int],
    ) -> None:
        """`most_prompt[k]`: the longest prompt of range k, ascending; `shares[k][g]`: the share of
        group g; `num_cells[g]`: the cells of group g, which follow one another."""
        self._most, self._shares = most_prompt, shares
        self._given = [[0.0] * len(num_cells) for _ in most_prompt]
        starts = [sum(num_cells[:group]) for group in range(len(num_cells))]
        self._cells = [range(a, a + n) for a, n in zip(starts, num_cells, strict=True)]

    def cell_of(self, num_prompt: int, num_in_cell: Sequence[int]) -> int:
        """See `Balancer.cell_of`. The group that is furthest behind its share is next."""
        bucket = min(bisect_left(self._most, num_prompt), len(self._most) - 1)
        given, shares = self._given[bucket], self._shares[bucket]
        for group, share in enumerate(shares):
            given[group] += share
        group = max(range(len(shares)), key=lambda g: (shares[g] > 0, given[g]))
        given[group] -= 1.0
        return min(self._cells[group], key=lambda cell: num_in_cell[cell])
