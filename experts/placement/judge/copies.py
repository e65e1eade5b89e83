"""A plan as an array: the number of copies of each expert on each device.

L layers, E experts of a layer, D devices, C slots of the device that has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.placement import Placement


def copies_of(placement: Placement, layers: Sequence[int]) -> NDArray[np.int64]:
    """[L, E, D], of zeros and ones; layers in the order of `layers`."""
    copies_LED = np.zeros((len(layers), placement.num_experts, placement.num_ranks), dtype=np.int64)
    for row, layer in enumerate(layers):
        ranks_of = placement.ranks_of[layer]
        expert = np.repeat(np.arange(len(ranks_of)), [len(ranks) for ranks in ranks_of])
        copies_LED[row, expert, list(chain.from_iterable(ranks_of))] = 1
    return copies_LED


def copies_in_slots(slots_LDC: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """[L, E, D]: copies from the expert in each slot; -1 is an empty slot. An expert that is twice
    on a device counts twice."""
    num_layers, num_devices, _ = slots_LDC.shape
    copies_LED = np.zeros((num_layers, num_experts, num_devices), dtype=np.int64)
    layer, device, slot = np.nonzero(slots_LDC >= 0)
    np.add.at(copies_LED, (layer, slots_LDC[layer, device, slot], device), 1)
    return copies_LED


def placement_of(copies_LED: NDArray[np.int64], layers: Sequence[int]) -> Placement:
    """Make a placement that names each device of an expert once, ascending."""
    num_experts, num_devices = copies_LED.shape[1:]
    ranks_of = {}
    for row, layer in enumerate(layers):
        counts_E = (copies_LED[row] > 0).sum(axis=1).tolist()
        ranks = iter(np.nonzero(copies_LED[row])[1].tolist())  # experts in order
        ranks_of[layer] = tuple(tuple(islice(ranks, count)) for count in counts_E)
    return Placement(num_ranks=num_devices, num_experts=num_experts, ranks_of=ranks_of)


def num_layers_with_repeats(copies_LED: NDArray[np.int64]) -> int:
    """Number of layers in which a device holds an expert twice."""
    return int((copies_LED > 1).any(axis=(1, 2)).sum())
