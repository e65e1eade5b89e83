"""How evenly a placement shares out what ranks do, copies of an expert carrying equal parts."""

from __future__ import annotations

from dataclasses import dataclass

from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of all layers and scenarios of a problem."""

    balancedness: float  # mean of mean / max load of the ranks: 1 is perfect
    busiest: float  # mean of what the busiest rank has to do: 1 if all had the same

    def gain_to(self, other: Forecast) -> float:
        """The share of the busiest rank's work that `other` spares it."""
        return 1.0 - other.busiest / self.busiest


def forecast(problem: PlacementProblem, placement: Placement) -> Forecast:
    """By what the problem balances: rows, or activated experts."""
    loads_SLR = device_loads(problem, copies_of(placement, problem.loads.layers))
    most_SL = loads_SLR.max(axis=2)
    balancedness_SL = loads_SLR.mean(axis=2) / most_SL
    return Forecast(balancedness=float(balancedness_SL.mean()), busiest=float(most_SL.mean()))
