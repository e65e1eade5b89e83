"""The limits and weights of the fan-out solver."""

from __future__ import annotations

from dataclasses import dataclass

from experts.placement.solvers.fan_out.layer_cost import CostWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutOptions:
    """Options of the solver. `cap` is the fraction by which the largest load may exceed the one
    that `balance` reached."""

    cap: float = 0.03
    weights: CostWeights = CostWeights()
    max_tokens: int = 20_000  # a longer trace is thinned out evenly
    patience: int = 12  # swaps without a better plan before the search leaves a layer
    max_sweeps: int = 3
    seconds: float = 600.0  # default limit if `solve` is given none
    # time for a small layer's integer program; 10 with `ilp` if None
    exact_slice_s: float | None = None
