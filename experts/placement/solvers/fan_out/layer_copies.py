"""The copies of one layer's experts, with the load of each and its device, and which two of them
may swap places without breaking a limit of the plan.

S scenarios, C copies (of experts, and then empty slots), D devices, E experts, N tokens or nodes, K
choices, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.placement import RanksOf
from experts.placement.problem.problem import PlacementProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCopies:
    """Copies of expert 0 first, in the order of its ranks, then of expert 1; empty slots are copies
    of expert -1 without load. A search changes only the positions (`device_C`)."""

    expert_C: NDArray[np.int64]
    device_C: NDArray[np.int64]  # at the start
    loads_SC: NDArray[np.float64]  # scaled so that devices of speed 1 have 1 on average
    first_E: NDArray[np.int64]  # index of each expert's first copy

    @classmethod
    def of(cls, ranks_of: RanksOf, each_SE: NDArray[np.float64]) -> LayerCopies:
        """Makes the copies; `each_SE` is the load of one copy."""
        counts_E = np.array([len(ranks) for ranks in ranks_of])
        expert_C = np.repeat(np.arange(len(ranks_of)), counts_E)
        return cls(
            expert_C=expert_C,
            device_C=np.array([rank for ranks in ranks_of for rank in ranks], dtype=np.int64),
            loads_SC=each_SE[:, expert_C],
            first_E=np.concatenate(([0], np.cumsum(counts_E)[:-1])),
        )

    def with_empty(self, empty_D: NDArray[np.int64]) -> LayerCopies:
        """Adds empty slots; `empty_D` counts the unused slots, into which a copy may move."""
        num_empty = int(empty_D.sum())
        device_n = np.repeat(np.arange(len(empty_D)), empty_D)
        return LayerCopies(
            expert_C=np.concatenate((self.expert_C, np.full(num_empty, -1))),
            device_C=np.concatenate((self.device_C, device_n)),
            loads_SC=np.pad(self.loads_SC, ((0, 0), (0, num_empty))),
            first_E=self.first_E,
        )

    def chosen_copies(self, layer: int, expert_ids_NK: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the copy that serves each choice; copies take turns as in `ReplicaChoice`."""
        counts_E = np.bincount(self.expert_C[self.expert_C >= 0], minlength=len(self.first_E))
        rows_N1 = np.arange(len(expert_ids_NK))[:, None]
        turns_NK = (rows_N1 + expert_ids_NK + layer) % counts_E[expert_ids_NK]
        return self.first_E[expert_ids_NK] + turns_NK

    def ranks_of(self, device_C: NDArray[np.int64]) -> RanksOf:
        """Returns the ranks of each expert as a placement has them; copies keep their turns."""
        parts: list[list[int]] = [[] for _ in self.first_E]
        for expert, device in zip(self.expert_C.tolist(), device_C.tolist(), strict=True):
            if expert >= 0:
                parts[expert].append(device)
        return tuple(map(tuple, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLimits:
    """The limits of one layer of the problem."""

    expert_C: NDArray[np.int64]
    num_experts: int
    node_D: NDArray[np.int64]
    pins: Collection[tuple[int, int]]  # (expert, device)
    group_E: NDArray[np.int64] | None  # None if experts are not grouped
    max_nodes_per_group: int
    is_current_ED: NDArray[np.bool_] | None  # None if moves are not limited
    max_moves: int

    @classmethod
    def of(cls, problem: PlacementProblem, layer: int, copies: LayerCopies) -> LayerLimits:
        """Makes the limits; `layer` is the model's number."""
        num_experts = problem.loads.num_experts
        grouping, move = problem.grouping, problem.move
        group_E = is_current_ED = None
        if grouping is not None:
            group_E = np.arange(num_experts) * grouping.num_groups // num_experts
        if move is not None and move.max_copies_per_layer is not None:
            is_current_ED = _holds(move.current.ranks_of[layer], len(problem.devices))
        return cls(
            expert_C=copies.expert_C,
            num_experts=num_experts,
            node_D=np.array([device.node for device in problem.devices.devices]),
            pins={(pin.expert, pin.device) for pin in problem.pins if pin.layer in (None, layer)},
            group_E=group_E,
            max_nodes_per_group=grouping.max_nodes_per_group if grouping else 0,
            is_current_ED=is_current_ED,
            max_moves=(move.max_copies_per_layer or 0) if move else 0,
        )

    @property
    def are_none(self) -> bool:
        """True if only the slots and the one-copy-per-device rule limit the layer."""
        return not self.pins and self.group_E is None and self.is_current_ED is None

    def is_legal(self, device_C: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[a, b]: True if copies a and b may swap places; never for two copies of one device or
        expert."""
        holds_ED = np.zeros((self.num_experts + 1, len(self.node_D)), dtype=bool)
        holds_ED[self.expert_C, device_C] = True
        holds_ED[-1] = False  # several empty slots may be on one device
        doubles_CC = holds_ED[self.expert_C][:, device_C]
        is_legal_CC = ~(doubles_CC | doubles_CC.T)
        is_legal_CC &= device_C[:, None] != device_C
        if self.pins:
            is_free_C = np.array(
                [
                    pair not in self.pins
                    for pair in zip(self.expert_C.tolist(), device_C.tolist(), strict=True)
                ]
            )
            is_legal_CC &= is_free_C[:, None] & is_free_C
        if self.group_E is not None:
            is_legal_CC &= self._keeps_groups(device_C)
        if self.is_current_ED is not None:
            is_legal_CC &= self._keeps_budget(device_C)
        return np.asarray(is_legal_CC)

    def _keeps_groups(self, device_C: NDArray[np.int64]) -> NDArray[np.bool_]:
        assert self.group_E is not None
        group_C = np.append(self.group_E, -1)[self.expert_C]
        node_C = self.node_D[device_C]
        count_GN = np.zeros((int(self.group_E.max()) + 2, int(self.node_D.max()) + 1), dtype=int)
        np.add.at(count_GN, (group_C, node_C), 1)  # the last group is for empty slots
        num_nodes_C = (count_GN > 0).sum(axis=1)[group_C]
        after_CC = (
            num_nodes_C[:, None]
            + (count_GN[group_C][:, node_C] == 0)
            - (count_GN[group_C, node_C] == 1)[:, None]
        )
        keeps_CC = (after_CC <= self.max_nodes_per_group) | (group_C < 0)[:, None]
        is_same_CC = (group_C[:, None] == group_C) | (node_C[:, None] == node_C)
        return np.asarray((keeps_CC & keeps_CC.T) | is_same_CC)

    def _keeps_budget(self, device_C: NDArray[np.int64]) -> NDArray[np.bool_]:
        assert self.is_current_ED is not None
        is_current_ED = np.vstack((self.is_current_ED, np.ones(len(self.node_D), dtype=bool)))
        is_new_CD = ~is_current_ED[self.expert_C]
        is_new_C = is_new_CD[np.arange(len(device_C)), device_C].astype(int)
        more_CC = is_new_CD[:, device_C].astype(int) - is_new_C[:, None]
        return np.asarray(int(is_new_C.sum()) + more_CC + more_CC.T <= self.max_moves)


def _holds(ranks_of: RanksOf, num_devices: int) -> NDArray[np.bool_]:
    holds_ED = np.zeros((len(ranks_of), num_devices), dtype=bool)
    for expert, ranks in enumerate(ranks_of):
        holds_ED[expert, list(ranks)] = True
    return holds_ED
