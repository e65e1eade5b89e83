"""Splits the rows of replicated experts over their copies with the least possible load of the
busiest rank.

T rows, K choices per row, E experts, R ranks. The linear program "the rows of an expert sum to its
count, those of a rank to at most t, minimise t" is solved in whole rows: rows are poured as in
`LeastTokens`, then levelled pair by pair, then moved along paths of copies while a path lowers the
busiest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.placement.replicas.greedy_choices import poured

_SWEEPS = 4  # rounds of pairwise levelling before paths finish the work


class LpSplit:
    """Finds the split of one layer's rows with the least busiest rank, exactly and
    deterministically."""

    def __init__(self, ranks_of: Sequence[Sequence[int]]) -> None:
        """`ranks_of[expert]` lists the ranks that hold it; an expert without ranks is never
        chosen."""
        self._num_ranks = 1 + max((rank for ranks in ranks_of for rank in ranks), default=0)
        self._ranks_of = [tuple(ranks) or (-1,) for ranks in ranks_of]
        self._single_E = np.array([ranks[0] for ranks in self._ranks_of], dtype=np.int64)
        self._is_single_E = np.array([len(ranks) == 1 for ranks in self._ranks_of])
        by_copies = sorted((len(ranks), e) for e, ranks in enumerate(ranks_of) if len(ranks) > 1)
        self._replicated = [(expert, tuple(ranks_of[expert])) for _, expert in by_copies]
        self._replicated_n = np.array([expert for _, expert in by_copies], dtype=np.int64)

    def quotas(self, counts_E: NDArray[np.int64]) -> dict[int, list[int]]:
        """Returns the rows of each replicated expert that has any, by copy in the placement's
        order.

        Worked example, experts 0, 1 and 2 on ranks [0], [0, 1] and [1, 2] with 6, 3 and 9 rows:
        rank 0 has 6 already, so expert 1 goes to rank 1 in full, expert 2 mostly to rank 2: {1: [0,
        3], 2: [3, 6]}, 6 on each.
        """
        loads = self._loads_of_singles(counts_E)
        counts = counts_E[self._replicated_n].tolist()
        quotas = {}
        for (expert, ranks), count in zip(self._replicated, counts, strict=True):
            if not count:
                continue
            if len(ranks) == 2:
                quotas[expert] = [count, 0]
                loads[ranks[0]] += count
                _level_two(ranks, quotas[expert], loads)
                continue
            quotas[expert] = poured([loads[rank] for rank in ranks], count)
            for copy, rank in enumerate(ranks):
                loads[rank] += quotas[expert][copy]
        paths = _Paths(self._ranks_of, quotas, loads)
        for _ in range(_SWEEPS):
            if not paths.can_lower() or not self._level(quotas, loads):
                break
        paths.lower()
        return quotas

    def ranks(self, expert_ids_TK: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rank of each choice [T, K]; -1 for a choice of -1. The first rows of an
        expert go to the copy that its placement names first, up to its quota, and so on."""
        flat_N = expert_ids_TK.reshape(-1)
        counts_E = np.bincount(flat_N + 1, minlength=len(self._ranks_of) + 1)[1:]
        rank_N = np.where(flat_N < 0, -1, self._single_E[flat_N])
        quotas = self.quotas(counts_E)
        if not quotas:
            return rank_N.reshape(expert_ids_TK.shape)
        # The choices of replicated experts are sorted by expert: the first quota goes to the first
        # copy, and so on.
        places_n = np.flatnonzero((flat_N >= 0) & ~self._is_single_E[flat_N])
        by_expert_n = np.argsort(flat_N[places_n].astype(np.uint16), kind="stable")
        used = sorted(quotas)
        ranks_in_turn = [rank for expert in used for rank in self._ranks_of[expert]]
        repeats = [quota for expert in used for quota in quotas[expert]]
        rank_N[places_n[by_expert_n]] = np.repeat(ranks_in_turn, repeats)
        return rank_N.reshape(expert_ids_TK.shape)

    def _loads_of_singles(self, counts_E: NDArray[np.int64]) -> list[int]:
        """Returns the rows of experts with one copy, by rank."""
        is_here_E = self._is_single_E & (self._single_E >= 0)
        loads_R = np.bincount(
            self._single_E[is_here_E], weights=counts_E[is_here_E], minlength=self._num_ranks
        )
        return [int(load) for load in loads_R]

    def _level(self, quotas: dict[int, list[int]], loads: list[int]) -> bool:
        """Pours each expert's rows over its copies again while all others stay. Returns whether any
        moved.
        """
        has_moved = False
        for expert, quota in quotas.items():
            ranks = self._ranks_of[expert]
            if len(ranks) == 2:
                has_moved |= _level_two(ranks, quota, loads)
                continue
            under = [loads[rank] - quota[copy] for copy, rank in enumerate(ranks)]
            anew = poured(under, sum(quota))
            has_moved |= anew != quota
            for copy, rank in enumerate(ranks):
                loads[rank] = under[copy] + anew[copy]
            quota[:] = anew
        return has_moved


def _level_two(ranks: tuple[int, ...], quota: list[int], loads: list[int]) -> bool:
    """Moves half of the difference, as far as there are rows; returns whether any moved."""
    first, second = ranks
    more = loads[first] - loads[second]
    rows = min(more // 2, quota[0]) if more > 0 else -min(-more // 2, quota[1])
    if not rows:
        return False
    quota[0] -= rows
    quota[1] += rows
    loads[first] -= rows
    loads[second] += rows
    return True


class _Paths:
    """Moves rows from the busiest rank along experts' copies to a rank that has two fewer.

    If the busiest rank reaches no such rank, the ranks it reaches hold every copy of the experts
    they have rows of. Their rows must then be there, and no split has a lower busiest rank.
    """

    def __init__(
        self, ranks_of: list[tuple[int, ...]], quotas: dict[int, list[int]], loads: list[int]
    ) -> None:
        self._ranks_of, self._quotas, self._loads = ranks_of, quotas, loads
        self._on: list[list[tuple[int, int]]] = [[] for _ in loads]  # rank -> (expert, copy)
        for expert in quotas:
            for copy, rank in enumerate(ranks_of[expert]):
                self._on[rank].append((expert, copy))

    def can_lower(self) -> bool:
        """Returns whether some split has a lower busiest rank."""
        return bool(self._path_from(self._loads.index(max(self._loads))))

    def lower(self) -> None:
        """Moves rows until the busiest rank cannot have fewer."""
        loads = self._loads
        while True:
            busiest = loads.index(max(loads))
            path = self._path_from(busiest)
            if not path:
                return
            last_expert, _, last_copy = path[-1]
            end = self._ranks_of[last_expert][last_copy]
            rows = min(self._quotas[expert][copy] for expert, copy, _ in path)
            rows = min(rows, (loads[busiest] - loads[end]) // 2)
            for expert, copy, to_copy in path:
                self._quotas[expert][copy] -= rows
                self._quotas[expert][to_copy] += rows
            loads[busiest] -= rows
            loads[end] += rows

    def _path_from(self, start: int) -> list[tuple[int, int, int]]:
        """Searches breadth first for a rank that has two rows fewer than `start`.

        Returns the path as (expert, copy that gives, copy that takes). The path is empty if
        no rank can be reached that has so few.
        """
        loads, room = self._loads, self._loads[start] - 1
        came_by: dict[int, tuple[int, int, int]] = {}
        ranks = [start]
        for rank in ranks:
            for expert, copy in self._on[rank]:
                if not self._quotas[expert][copy]:
                    continue
                for to_copy, to_rank in enumerate(self._ranks_of[expert]):
                    if to_rank == start or to_rank in came_by:
                        continue
                    came_by[to_rank] = (expert, copy, to_copy)
                    if loads[to_rank] < room:
                        return self._way(start, to_rank, came_by)
                    ranks.append(to_rank)
        return []

    def _way(
        self, start: int, end: int, came_by: dict[int, tuple[int, int, int]]
    ) -> list[tuple[int, int, int]]:
        steps: list[tuple[int, int, int]] = []
        rank = end
        while rank != start:
            step = came_by[rank]
            steps.append(step)
            rank = self._ranks_of[step[0]][step[1]]
        return steps[::-1]
