"""Estimates how many experts a batch activates, and how uneven the load of expert ranks is.

A formula for equally popular experts, or the popularity that a recorded trace shows. With p_e the
probability that a row chooses expert e, and rows that choose independently, B rows activate

    sum over e of 1 - (1 - p_e)^B          equally popular: E (1 - (1 - k/E)^B)

experts. Rows of a real batch are not quite independent, so fewer are activated than that.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.workloads import read_workloads
from experts.placement.solvers.references import eplb_slots
from moe_serve.errors import ConfigError

_CACHED = 4096  # batch sizes


class RoutingLaw(Protocol):
    """Describes the choices of the routers, as the mean over layers."""

    def num_activated(self, num_rows: int) -> float:
        """Returns the expected number of experts that `num_rows` rows activate in a layer."""
        ...

    def imbalance(self, num_ranks: int, num_redundant: int | None = None) -> float:
        """Returns the busiest expert rank's share of the choices divided by the mean share.

        With `num_redundant` None the experts of a layer are placed in their order. Else they are
        placed by these loads, with so many further copies, as EPLB does."""
        ...


class EvenRouting:
    """Implements RoutingLaw for equally popular experts."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self._num_experts, self._missed = num_experts, 1 - top_k / num_experts

    def num_activated(self, num_rows: int) -> float:
        """See `RoutingLaw.num_activated`."""
        return self._num_experts * (1 - float(self._missed**num_rows))

    def imbalance(self, num_ranks: int, num_redundant: int | None = None) -> float:
        """Returns 1."""
        return 1.0


class RecordedRouting:
    """Implements RoutingLaw with the popularity [L, E] of a trace. A layer's row sums to k."""

    def __init__(self, popularity_LE: NDArray[np.float64]) -> None:
        self._log_missed_LE = np.log1p(-np.minimum(popularity_LE, 1 - 1e-12))
        self._popularity_LE = popularity_LE
        self._activated = lru_cache(_CACHED)(self._compute)

    def __reduce__(self) -> tuple[type[RecordedRouting], tuple[NDArray[np.float64]]]:
        return RecordedRouting, (self._popularity_LE,)

    @classmethod
    def read(cls, path: Path, num_experts: int, top_k: int) -> RecordedRouting:
        """Reads a trace or a file of loads. Raises TraceError and PlacementInputError, and
        ConfigError if it is of a model with another number of experts."""
        counts_LE = read_workloads([path], 1, None).loads.counts_SLE[0].astype(np.float64)
        if counts_LE.shape[1] != num_experts:
            raise ConfigError(
                f"{path} has choices among {counts_LE.shape[1]} experts in a layer, but the model "
                f"has {num_experts}."
            )
        totals_L = counts_LE.sum(axis=1)
        if not totals_L.all():
            raise ConfigError(f"{path} has a layer without choices: record more tokens.")
        return cls(top_k * counts_LE / totals_L[:, None])

    def num_activated(self, num_rows: int) -> float:
        """See `RoutingLaw.num_activated`."""
        return self._activated(num_rows)

    def imbalance(self, num_ranks: int, num_redundant: int | None = None) -> float:
        """See `RoutingLaw.imbalance`."""
        if num_redundant is None:
            parts = np.array_split(self._popularity_LE, num_ranks, axis=1)
            shares_KL = np.stack([part.sum(axis=1) for part in parts])
        else:
            shares_KL = self._balanced(num_ranks, num_redundant)
        return float((shares_KL.max(axis=0) / shares_KL.mean(axis=0)).mean())

    def _balanced(self, num_ranks: int, num_redundant: int) -> NDArray[np.float64]:
        """Returns the load of each rank and layer if experts are placed by their loads. Copies of
        an expert share its load evenly."""
        num_layers, num_experts = self._popularity_LE.shape
        slots_LP = eplb_slots(
            self._popularity_LE,
            num_slots=num_experts + num_redundant,
            num_groups=1,
            num_nodes=1,
            num_devices=num_ranks,
        )
        rows_L1 = np.arange(num_layers)[:, None]
        copies_LE = np.zeros((num_layers, num_experts))
        np.add.at(copies_LE, (rows_L1, slots_LP), 1)
        loads_LP = (self._popularity_LE / copies_LE)[rows_L1, slots_LP]
        loads_RL: NDArray[np.float64] = loads_LP.reshape(num_layers, num_ranks, -1).sum(axis=2).T
        return loads_RL

    def _compute(self, num_rows: int) -> float:
        return float((1 - np.exp(num_rows * self._log_missed_LE)).sum(axis=1).mean())
