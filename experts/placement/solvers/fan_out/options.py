"""What the fan-out solver may spend, and what counts how much."""

from __future__ import annotations

from dataclasses import dataclass

from experts.placement.solvers.fan_out.layer_cost import CostWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutOptions:
    """`cap`: by what part of what `balance` reached the largest load may be above it."""

    cap: float = 0.03
    weights: CostWeights = CostWeights()
    max_tokens: int = 20_000  # more are thinned out evenly
    patience: int = 12  # swaps without a better plan, after which a layer is left
    max_sweeps: int = 3
    seconds: float = 600.0  # where `solve` is given none
    exact_slice_s: float | None = None  # for a small layer's integer program; None: 10 with `ilp`
