"""Measures how even a plan is: the loads of devices, and the engines' balancedness.

S scenarios, L layers with routed experts, E experts of a layer, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copies import CopyLoad
from experts.placement.problem.problem import PlacementProblem

Array = NDArray[np.float64]


def device_loads(problem: PlacementProblem, copies_LED: NDArray[np.int64]) -> Array:
    """Returns [S, L, D]: the load of a device over its speed; 1 if all loads were even.

    A token goes to each copy of its expert with equal probability.
    """
    load = CopyLoad.of(problem)
    copies_LE = np.maximum(copies_LED.sum(axis=2), 1)
    each_SLE = load.each(load.shares_SLE, copies_LE)
    speed_D = np.array([device.speed for device in problem.devices.devices])
    even_SL = load.totals() / speed_D.sum()
    loads_SLD = np.einsum("sle,led->sld", each_SLE, copies_LED, optimize=True) / speed_D
    return np.asarray(loads_SLD / even_SL[:, :, None])


def objective_of(problem: PlacementProblem, copies_LED: NDArray[np.int64]) -> float:
    """Returns the mean over layers and scenarios of the largest load; this is
    `Solution.objective`."""
    return float(device_loads(problem, copies_LED).max(axis=2).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancedness:
    """Mean load / largest load of one scenario, over layers; 1 is perfect. Also as the other
    engines define it: `log_ratio` (vLLM's log) and `excess` (TensorRT-LLM)."""

    mean: float  # as SGLang and vLLM publish it
    worst: float
    p10: float
    p50: float
    log_ratio: float  # sum over layers of the mean load / sum over layers of the largest load
    excess: float  # mean over layers of (largest - mean) / mean; 0 is perfect

    @classmethod
    def of(cls, loads_LD: Array, speed_D: Array | None = None) -> Balancedness:
        """Computes the balancedness from loads over speeds. Their mean is the total load over the
        total speed, which every device would have if loads were even. Without `speed_D` all devices
        are equally fast. Layers count equally, whatever their tokens."""
        weighed_LD = loads_LD if speed_D is None else loads_LD * (speed_D / speed_D.mean())
        mean_L, most_L = weighed_LD.mean(axis=1), loads_LD.max(axis=1)
        ratio_L = mean_L / most_L
        return cls(
            mean=float(ratio_L.mean()),
            worst=float(ratio_L.min()),
            p10=float(np.quantile(ratio_L, 0.1)),
            p50=float(np.quantile(ratio_L, 0.5)),
            log_ratio=float(mean_L.sum() / most_L.sum()),
            excess=float((most_L / mean_L - 1.0).mean()),
        )


def balancedness(
    problem: PlacementProblem, copies_LED: NDArray[np.int64]
) -> dict[str, Balancedness]:
    """Returns the balancedness of each scenario."""
    loads_SLD = device_loads(problem, copies_LED)
    speed_D = np.array([device.speed for device in problem.devices.devices])
    return {
        name: Balancedness.of(loads_LD, speed_D)
        for name, loads_LD in zip(problem.loads.scenarios, loads_SLD, strict=True)
    }


def memory_bytes(copies_LED: NDArray[np.int64], bytes_per_expert: int) -> list[int]:
    """Returns the bytes of each device for the experts of all layers."""
    return [int(copies) * bytes_per_expert for copies in copies_LED.sum(axis=(0, 1))]


def activated_experts(problem: PlacementProblem, copies_LED: NDArray[np.int64]) -> Array:
    """Returns [S, L, D]: the expected number of experts whose weights a device reads in a step of
    the problem's batch size, if tokens choose independently. Needs `top_k`."""
    assert problem.top_k is not None, "activated experts of a step need top_k"
    load = CopyLoad(
        shares_SLE=problem.loads.shares_SLE(),
        num_draws=float(problem.batch_size),
        top_k=problem.top_k,
    )
    each_SLE = load.each(load.shares_SLE, np.maximum(copies_LED.sum(axis=2), 1))
    return np.asarray(np.einsum("sle,led->sld", each_SLE, copies_LED, optimize=True))
