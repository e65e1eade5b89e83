"""Searches the layers in turn, each with its neighbours fixed, until none improves.

C copies of a layer, D devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.fan_out.layer_search import LayerSearch
from experts.placement.solvers.fan_out.neighbours import Neighbours, best_labels

_MAX_PROOFS = 3  # rounds of exact programs


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
        """Search one layer; returns whether it changed."""
        crossing_CM = self._crossing(index, is_first=is_first)
        start_C = self._traded(index, crossing_CM)
        return self._put(index, self._layers[index].improved(start_C, crossing_CM, patience, hears))

    def prove(self, slice_s: float, goes_on: Callable[[float, float], bool]) -> bool:
        """Solve exact programs of layers that are small enough; returns whether all were
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
        """Set a layer's plan; returns whether it changed."""
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
