"""The recorded choices of experts: how often each was chosen, and the choices of single tokens,
which fan-out and per-step balance need.

S scenarios (workloads, or windows of one), L layers with routed experts, E experts of a layer, N
tokens, K choices of a token in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement_error import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """Counts of choices, checked on construction. A layer that a scenario did not use has only
    zeros.

    Scenarios may differ in size by any factor: solvers scale each layer of each scenario to a sum
    of 1.
    """

    counts_SLE: NDArray[np.float64]
    layers: tuple[int, ...]  # the model's numbers of the L layers
    scenarios: tuple[str, ...]  # unique names

    def __post_init__(self) -> None:
        shape = self.counts_SLE.shape
        if len(shape) != 3 or 0 in shape:
            raise PlacementError(
                f"Loads must have the shape scenarios x layers x experts, got {shape}."
            )
        if (len(self.scenarios), len(self.layers)) != shape[:2]:
            raise PlacementError(
                f"Loads of {shape[0]} scenarios and {shape[1]} layers need as many names and layer "
                f"numbers, got {len(self.scenarios)} names and {len(self.layers)} layer numbers."
            )
        for what, names in (("scenario", self.scenarios), ("layer", self.layers)):
            if len(set(names)) < len(names):
                raise PlacementError(f"Each {what} must be unique, got {list(names)}.")
        self._check_counts()

    def _check_counts(self) -> None:
        for what, bad_SLE in (
            ("not a finite number", ~np.isfinite(self.counts_SLE)),
            ("negative", self.counts_SLE < 0),
        ):
            if bad_SLE.any():
                scenario, layer, expert = np.argwhere(bad_SLE)[0]
                raise PlacementError(
                    f"{int(bad_SLE.sum())} loads are {what}; the first is "
                    f"{self.counts_SLE[scenario, layer, expert]}, of expert {expert} in "
                    f"layer {self.layers[layer]} of {self.scenarios[scenario]}."
                )
        unused_S = ~self.counts_SLE.any(axis=(1, 2))
        if unused_S.any():
            name = self.scenarios[int(np.argmax(unused_S))]
            raise PlacementError(
                f"No expert was chosen in {name}: every load is 0. Give loads of a run that "
                "processed tokens."
            )
        with np.errstate(over="ignore"):
            is_beyond_SL = ~np.isfinite(self.counts_SLE.sum(axis=2))
        if is_beyond_SL.any():
            scenario, layer = np.argwhere(is_beyond_SL)[0]
            raise PlacementError(
                f"The loads of layer {self.layers[layer]} of {self.scenarios[scenario]} add up to "
                f"more than {np.finfo(np.float64).max:.2g}: divide them all by one number."
            )

    @property
    def num_experts(self) -> int:
        """Number of experts E, the same in every layer."""
        return int(self.counts_SLE.shape[2])

    def shares_SLE(self) -> NDArray[np.float64]:  # noqa: N802
        """Returns the counts scaled to a sum of 1 in every layer; a layer without choices gets
        equal shares."""
        totals_SL1 = self.counts_SLE.sum(axis=2, keepdims=True)
        return np.where(
            totals_SL1 > 0,
            self.counts_SLE / np.maximum(totals_SL1, np.finfo(np.float64).tiny),
            1.0 / self.num_experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoices:
    """The choices of N tokens, in descending score if the source knew the scores."""

    expert_ids_NLK: NDArray[np.integer]
    num_experts: int
    layers: tuple[int, ...]  # the model's numbers

    def __post_init__(self) -> None:
        shape = self.expert_ids_NLK.shape
        if len(shape) != 3 or 0 in shape or shape[1] != len(self.layers):
            raise PlacementError(
                f"Choices must have the shape tokens x {len(self.layers)} layers x k, got {shape}."
            )
        low, high = int(self.expert_ids_NLK.min()), int(self.expert_ids_NLK.max())
        if low < 0 or high >= self.num_experts:
            raise PlacementError(
                f"Expert ids must be 0 to {self.num_experts - 1}, got {low} to {high}."
            )

    def loads(self, name: str) -> ExpertLoads:
        """Counts the choices as the loads of one scenario."""
        num_layers = len(self.layers)
        offsets_L1 = np.arange(num_layers)[:, None] * self.num_experts
        counts = np.bincount(
            (self.expert_ids_NLK + offsets_L1).ravel(), minlength=num_layers * self.num_experts
        )
        counts_1LE = counts.reshape(1, num_layers, self.num_experts).astype(np.float64)
        return ExpertLoads(counts_SLE=counts_1LE, layers=self.layers, scenarios=(name,))
