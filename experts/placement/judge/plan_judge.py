"""Judges plans on the loads of a problem, with the same figures for all plans that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import (
    Balancedness,
    activated_experts,
    balancedness,
    memory_bytes,
    objective_of,
)
from experts.placement.judge.copies import num_layers_with_repeats, placement_of
from experts.placement.judge.fan_out import measure_fan_out
from experts.placement.judge.steps import StepBalance, draw_steps, step_balance
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.problem import PlacementProblem

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutFigures:
    """Mean fan-out over tokens and layers."""

    devices_per_token: float
    nodes_per_token: float
    cross_node_rows: float
    cross_node_pairs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The figures of one plan. Devices and memory are in device order; moves are counted
    elsewhere."""

    name: str
    objective: float
    scenarios: dict[str, Balancedness]
    num_copies: int  # of a layer, on the average rounded
    layers_with_repeats: int  # where a device holds an expert twice
    memory: list[int] | None  # bytes by device
    busiest_activated: float | None  # experts that the busiest device's step activates, expected
    step: StepBalance | None
    fan_out: FanOutFigures | None

    @property
    def mean(self) -> float:
        """Balancedness, mean over layers and scenarios."""
        return float(np.mean([each.mean for each in self.scenarios.values()]))

    @property
    def worst(self) -> float:
        """Balancedness of the worst layer of the worst scenario."""
        return min(each.worst for each in self.scenarios.values())


class Judge:
    """Judges plans on the same steps, which are drawn once."""

    def __init__(self, problem: PlacementProblem, tokens: TokenChoices | None = None) -> None:
        """`tokens` are the choices behind the loads, if they are known."""
        self._problem, self._tokens = problem, tokens

    @cached_property
    def _rows_WLE(self) -> Ints | None:  # noqa: N802
        return draw_steps(self._problem, self._tokens)

    def step(self, copies_LED: Ints) -> StepBalance | None:
        """Returns the balancedness of single steps; None if neither tokens nor top-k are known."""
        rows_WLE, has_tokens = self._rows_WLE, self._tokens is not None
        if rows_WLE is None:
            return None
        return step_balance(self._problem, copies_LED, rows_WLE, has_tokens=has_tokens)

    def judge(self, name: str, copies_LED: Ints) -> Judged:
        """Judges a plan; `copies_LED` has the layers of the loads."""
        problem, tokens = self._problem, self._tokens
        weight = problem.bytes_per_expert
        fan_out = None
        if tokens is not None:
            found = measure_fan_out(
                placement_of(copies_LED, problem.loads.layers), tokens, problem.devices
            )
            fan_out = FanOutFigures(
                devices_per_token=found.devices_per_token,
                nodes_per_token=found.nodes_per_token,
                cross_node_rows=found.cross_node_rows,
                cross_node_pairs=found.cross_node_pairs,
            )
        activated = None
        if problem.top_k is not None:
            activated = float(activated_experts(problem, copies_LED).max(axis=2).mean())
        return Judged(
            name=name,
            objective=objective_of(problem, copies_LED),
            scenarios=balancedness(problem, copies_LED),
            num_copies=round(float(copies_LED.sum(axis=(1, 2)).mean())),
            layers_with_repeats=num_layers_with_repeats(copies_LED),
            memory=None if weight is None else memory_bytes(copies_LED, weight),
            busiest_activated=activated,
            step=self.step(copies_LED),
            fan_out=fan_out,
        )
