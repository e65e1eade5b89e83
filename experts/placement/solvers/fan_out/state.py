"""Prepares a problem and a plan for the descent, and makes a placement of its result.

S scenarios, L layers, E experts, D devices, C copies of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.judge.copy_load import CopyLoad
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem
from experts.placement.problem.token_choices import TokenChoices
from experts.placement.solvers.fan_out.descent import Descent
from experts.placement.solvers.fan_out.layer_copies import LayerCopies
from experts.placement.solvers.fan_out.layer_search import LayerSearch
from experts.placement.solvers.fan_out.limits import LayerLimits
from experts.placement.solvers.fan_out.neighbours import Neighbours
from experts.placement.solvers.fan_out.options import FanOutOptions
from experts.placement.solvers.fan_out.relabel import kinds_of, node_of, relabelled
from experts.placement.solvers.fan_out.token_sets import TokenSets


class State:
    """The state of a fan-out search. If no rule prevents it, the devices' bundles are first moved
    where they cross nodes least."""

    def __init__(
        self,
        problem: PlacementProblem,
        choices: TokenChoices,
        placement: Placement,
        options: FanOutOptions,
    ) -> None:
        kinds_LD = None
        if not (problem.pins or problem.grouping or problem.move):
            slots_LD = problem.slots_by_layer()
            placement = relabelled(placement, choices, problem.devices, slots_LD)
            kinds_LD = kinds_of(problem.devices, slots_LD)
        self._start, self._options, self._layers = placement, options, problem.loads.layers
        self._copies = _layer_copies(problem, placement)
        chosen = [
            copies.chosen_copies(layer, choices.expert_ids_NLK[:, index].astype(np.int64))
            for index, (layer, copies) in enumerate(zip(self._layers, self._copies, strict=True))
        ]
        self._descent = Descent(
            _searches(problem, placement, self._copies, chosen, options),
            [copies.device_C for copies in self._copies],
            Neighbours(chosen, [len(copies.expert_C) for copies in self._copies]),
            node_of(problem.devices),
            kinds_LD,
        )

    def descend(self, goes_on: Callable[[float, float], bool], seconds: float | None) -> bool:
        """Run the descent; returns whether it came to its end, see `Descent.run`."""
        patience, max_sweeps = self._options.patience, self._options.max_sweeps
        return self._descent.run(patience, max_sweeps, goes_on, seconds) and self._descent.prove(
            self._options.exact_slice_s or 0.0, goes_on
        )

    @property
    def proof(self) -> str:
        """Describe what was proved about fan-out; empty if nothing was."""
        num_proved = self._descent.num_proved
        if not num_proved:
            return ""
        return (
            f" Fan-out: {num_proved} of {len(self._layers)} layers proved best by HiGHS, with the "
            "layers beside as they are."
        )

    def placement(self) -> Placement:
        """Return the current placement."""
        placed = zip(self._layers, self._copies, self._descent.devices, strict=True)
        ranks_of = {layer: copies.ranks_of(device_C) for layer, copies, device_C in placed}
        return replace(self._start, ranks_of=ranks_of)


def _searches(
    problem: PlacementProblem,
    placement: Placement,
    layer_copies: Sequence[LayerCopies],
    chosen: Sequence[NDArray[np.int64]],
    options: FanOutOptions,
) -> list[LayerSearch]:
    layers = problem.loads.layers
    most_SL = device_loads(problem, copies_of(placement, layers)).max(axis=2)
    speeds_D = np.array([device.speed for device in problem.devices.devices])
    return [
        LayerSearch(
            copies,
            LayerLimits.of(problem, layer, copies),
            TokenSets(chosen_NK, len(copies.expert_C)),
            speeds_D,
            most_SL[:, index] * (1.0 + options.cap),
            options.weights,
        )
        for index, (layer, copies, chosen_NK) in enumerate(
            zip(layers, layer_copies, chosen, strict=True)
        )
    ]


def _layer_copies(problem: PlacementProblem, placement: Placement) -> list[LayerCopies]:
    load = CopyLoad.of(problem)
    num_devices = len(problem.devices)
    even_SL = load.totals() / sum(device.speed for device in problem.devices.devices)
    slots_LD = problem.slots_by_layer()
    found = []
    for index, layer in enumerate(problem.loads.layers):
        ranks_of = placement.ranks_of[layer]
        counts_E = np.array([len(ranks) for ranks in ranks_of])
        each_SE = load.each(load.shares_SLE[:, index], counts_E) / even_SL[:, index, None]
        copies = LayerCopies.of(ranks_of, each_SE)
        used_D = np.bincount(copies.device_C, minlength=num_devices)
        found.append(copies.with_empty(slots_LD[index] - used_D))
    return found
