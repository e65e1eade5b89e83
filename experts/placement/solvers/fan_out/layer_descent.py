"""Searches the layers in turn, each with its neighbours fixed, until none improves.

The position of a layer relative to its neighbours gives the cost of pairs of one token that cross
nodes. Bundles of experts change devices to lower it: a bundle is all that a device holds in a
layer, and devices of equal slots, speed and memory may trade bundles, which changes no load.

L layers, N tokens, K choices of a token, D devices, M nodes, C things with a position (copies, or
bundles), B those of the neighbouring layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.devices import Devices
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.placement import Placement
from experts.placement.solvers.fan_out.layer_search import LayerSearch

_MAX_PROOFS = 3  # rounds of exact programs
_MAX_SWEEPS = 20


class Neighbours:
    """Shares of pairs between layers; the positions are passed to each call."""

    def __init__(self, chosen: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> None:
        """Takes, by layer, the things that tokens use [N, K], and the number of things."""
        self._sizes = tuple(sizes)
        self._shares = [
            pair_shares(chosen[index], sizes[index], chosen[index + 1], sizes[index + 1])
            for index in range(len(chosen) - 1)
        ]

    def crossing(
        self, index: int, nodes: Sequence[NDArray[np.int64]], num_nodes: int, *, is_first: bool
    ) -> NDArray[np.float64]:
        """[thing, node]: the share of pairs that cross if the thing is on that node. `nodes` has
        the node of each thing of each layer. In the first sweep the next layer is ignored, because
        it will change."""
        crossing_CM = np.zeros((self._sizes[index], num_nodes))
        if index > 0:
            shares_CB = self._shares[index - 1].T
            crossing_CM += shares_CB @ _is_elsewhere(nodes[index - 1], num_nodes)
        if index + 1 < len(self._sizes) and not is_first:
            crossing_CM += self._shares[index] @ _is_elsewhere(nodes[index + 1], num_nodes)
        return crossing_CM


def pair_shares(
    here_NK: NDArray[np.int64], num_here: int, next_NK: NDArray[np.int64], num_next: int
) -> NDArray[np.float64]:
    """[thing of a layer, thing of the next]: share of all pairs of one token; the shares sum to
    1."""
    count_n = np.zeros(num_here * num_next)
    top_k = here_NK.shape[1]
    for k in range(top_k):
        cells_NK = here_NK * num_next + next_NK[:, k : k + 1]
        count_n += np.bincount(cells_NK.ravel(), minlength=num_here * num_next)
    return np.asarray(count_n.reshape(num_here, num_next) / (here_NK.size * top_k))


def _is_elsewhere(node_B: NDArray[np.int64], num_nodes: int) -> NDArray[np.bool_]:
    return np.asarray(node_B[:, None] != np.arange(num_nodes))


def relabelled(
    placement: Placement,
    choices: TokenChoices,
    devices: Devices,
    slots_LD: NDArray[np.int64] | None = None,
) -> Placement:
    """Assign bundles to devices, layer by layer with the neighbouring layers fixed, so that the
    fewest rows cross nodes, until none improves. Does not support pins, groups or a budget of
    moves. `slots_LD` are the slots of each layer if memory is shared over the layers."""
    placement.check_fits(choices.layers, choices.num_experts, len(devices))
    device_LNK = [
        placement.assign(layer, choices.expert_ids_NLK[:, index].astype(np.int64))
        for index, layer in enumerate(choices.layers)
    ]
    neighbours = Neighbours(device_LNK, [len(devices)] * len(device_LNK))
    if slots_LD is None:
        slots_LD = np.zeros((len(choices.layers), len(devices)), dtype=np.int64)
    node_D, kinds_LD = node_of(devices), kinds_of(devices, slots_LD)
    label_LD = [np.arange(len(devices)) for _ in choices.layers]
    for sweep in range(_MAX_SWEEPS):
        has_changed = False
        for index, before_D in enumerate(label_LD):
            nodes = [node_D[label_D] for label_D in label_LD]
            cost_DM = neighbours.crossing(index, nodes, devices.num_nodes, is_first=sweep == 0)
            after_D = best_labels(cost_DM[:, node_D], before_D, kinds_LD[index])
            has_changed |= not np.array_equal(before_D, after_D)
            label_LD[index] = after_D
        if not has_changed:
            break
    return replace(
        placement,
        ranks_of={
            layer: tuple(
                tuple(int(label_D[rank]) for rank in ranks) for ranks in placement.ranks_of[layer]
            )
            for layer, label_D in zip(choices.layers, label_LD, strict=True)
        },
    )


def best_labels(
    cost_DD: NDArray[np.float64], label_D: NDArray[np.int64], kind_D: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the device of each bundle with the least total cost [bundle, device], or `label_D` if
    that is as good. A bundle stays on devices of the same kind."""
    from scipy.optimize import linear_sum_assignment

    allowed_DD = kind_D[label_D][:, None] == kind_D
    never = 1.0 + float(np.abs(cost_DD).sum())
    _, found_D = linear_sum_assignment(np.where(allowed_DD, cost_DD, never))
    bundles_D = np.arange(len(label_D))
    gain = cost_DD[bundles_D, label_D].sum() - cost_DD[bundles_D, found_D].sum()
    return np.asarray(found_D, dtype=np.int64) if gain > 1e-12 else label_D


def node_of(devices: Devices) -> NDArray[np.int64]:
    """Returns the node of each device."""
    return np.array([device.node for device in devices.devices], dtype=np.int64)


def kinds_of(devices: Devices, slots_LD: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [L, D]: devices with equal numbers may trade all that they hold in a layer. Shared
    memory may leave identical devices different numbers of slots in a layer."""
    alike = [(each.num_slots, each.speed, each.memory_bytes) for each in devices.devices]
    kinds_LD = []
    for slots_D in slots_LD.tolist():
        kinds = list(zip(alike, slots_D, strict=True))
        kinds_LD.append([kinds.index(kind) for kind in kinds])
    return np.array(kinds_LD, dtype=np.int64)


class Descent:
    """Holds the position of every copy in each layer; every step leaves a valid plan."""

    def __init__(
        self,
        layers: Sequence[LayerSearch],
        start: Sequence[NDArray[np.int64]],
        neighbours: Neighbours,
        node_D: NDArray[np.int64],
        kinds_LD: NDArray[np.int64] | None,
    ) -> None:
        """`start` has the device of each copy [C] by layer. Devices of equal kind in `kinds_LD` may
        trade all that they hold in a layer; with None no devices may."""
        self._kinds_LD = kinds_LD
        self._layers, self._neighbours, self._node_D = layers, neighbours, node_D
        self._num_nodes = int(node_D.max()) + 1
        self.devices = [device_C.copy() for device_C in start]
        self._is_proved_L = np.zeros(len(layers), dtype=bool)
        self._nodes_per_token_L = [
            layer.nodes_per_token(device_C) for layer, device_C in zip(layers, start, strict=True)
        ]

    def run(
        self,
        patience: int,
        max_sweeps: int,
        goes_on: Callable[[float, float], bool],
        seconds: float | None,
    ) -> bool:
        """Sweep until no layer improves; returns whether the search came to its end.

        `goes_on` is called often with the nodes per token and the part done. With `seconds` each
        layer of a sweep gets an even share of the remaining time.
        """
        num_layers, ends = len(self._layers), time.monotonic() + (seconds or 0.0)
        for sweep in range(max_sweeps):
            has_changed = False
            for index in range(num_layers):
                done = (sweep + index / num_layers) / max_sweeps
                nodes = float(np.mean(self._nodes_per_token_L))
                hears: Callable[[], bool] = partial(goes_on, nodes, done)
                if not hears():
                    return False
                if seconds is not None:
                    share = (ends - time.monotonic()) / (num_layers - index)
                    hears = _until(time.monotonic() + share, hears)
                has_changed |= self._search(index, patience, hears, is_first=sweep == 0)
            if not has_changed:
                break
        return True

    def _search(
        self, index: int, patience: int, hears: Callable[[], bool], *, is_first: bool
    ) -> bool:
        """Searches one layer; returns whether it changed."""
        crossing_CM = self._crossing(index, is_first=is_first)
        start_C = self._traded(index, crossing_CM)
        return self._put(index, self._layers[index].improved(start_C, crossing_CM, patience, hears))

    def prove(self, slice_s: float, goes_on: Callable[[float, float], bool]) -> bool:
        """Solves exact programs of layers that are small enough; returns whether all were
        finished."""
        for _ in range(_MAX_PROOFS if slice_s > 0 else 0):
            has_changed = False
            for index, layer in enumerate(self._layers):
                if not goes_on(float(np.mean(self._nodes_per_token_L)), 1.0):
                    return False
                if self._is_proved_L[index]:
                    continue
                crossing_CM = self._crossing(index, is_first=False)
                found = layer.exact(self.devices[index], crossing_CM, slice_s)
                if found is None:
                    continue
                if self._put(index, found.device_C):
                    has_changed = True
                    self._is_proved_L[max(0, index - 1) : index + 2] = False
                self._is_proved_L[index] = found.is_proved
            if not has_changed:
                break
        return True

    @property
    def num_proved(self) -> int:
        """Number of layers for which no cheaper plan exists while the neighbouring layers stay as
        they are."""
        return int(self._is_proved_L.sum())

    def _put(self, index: int, device_C: NDArray[np.int64]) -> bool:
        """Sets a layer's plan; returns whether it changed."""
        has_changed = not np.array_equal(self.devices[index], device_C)
        self.devices[index] = device_C
        self._nodes_per_token_L[index] = self._layers[index].nodes_per_token(device_C)
        return has_changed

    def _crossing(self, index: int, *, is_first: bool) -> NDArray[np.float64]:
        nodes = [self._node_D[device_C] for device_C in self.devices]
        return self._neighbours.crossing(index, nodes, self._num_nodes, is_first=is_first)

    def _traded(self, index: int, crossing_CM: NDArray[np.float64]) -> NDArray[np.int64]:
        """Trade all that devices hold in a layer, so that it crosses least."""
        device_C: NDArray[np.int64] = self.devices[index]
        if self._kinds_LD is None:
            return device_C
        kind_D, num_devices = self._kinds_LD[index], len(self._node_D)
        cost_DM = np.zeros((num_devices, self._num_nodes))
        np.add.at(cost_DM, device_C, crossing_CM)
        label_D = best_labels(cost_DM[:, self._node_D], np.arange(num_devices), kind_D)
        return np.asarray(label_D[device_C])


def _until(end: float, goes_on: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: time.monotonic() < end and goes_on()
