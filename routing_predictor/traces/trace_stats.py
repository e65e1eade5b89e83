"""Statistics of a trace or a table of loads: hot experts, experts per batch, drift, a heat map.

N tokens, B tokens of a batch, W windows, L layers, E experts of a layer, K choices, R ranks.
matplotlib is an optional extra (`plot`) and is imported by the function that draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import DECODE, RoutingTrace

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_NUM_DRAWS = 48  # batches of each size

Loads = NDArray[np.int64] | NDArray[np.float64]
_MOST = 4.0  # multiple of the mean above which the colour stays the same


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDistribution:
    """The distribution of a layer's choices over its experts."""

    layer: int
    num_choices: float
    hottest: tuple[int, ...]  # experts, the most chosen first
    shares: tuple[float, ...]  # their shares of the layer's choices
    hottest_over_mean: float
    balancedness: float  # mean load of a rank over the largest, with equal runs of experts
    num_unused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The number of experts of a layer that a batch of B tokens uses, mean over layers and drawn
    batches."""

    batch_size: int
    even: float  # if all experts were equally likely: E (1 - (1 - K / E)^B)
    any_tokens: float  # drawn from all tokens
    one_per_request: float | None  # generated tokens of B requests, like a decode step
    one_request: float | None  # B consecutive tokens of one request, like a chunk of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Distances between windows of the trace, as total variation: mean and largest over layers."""

    window: int
    num_choices: float
    to_previous: float | None
    to_previous_worst: float | None
    to_all: float
    by_chance: float | None  # `to_all` if the tokens were shuffled


def layer_loads(
    load_LE: Loads, layers: Sequence[int], num_ranks: int, num_hottest: int = 3
) -> list[LayerDistribution]:
    """Returns one record for each layer."""
    made = []
    for layer, load_E in zip(layers, load_LE, strict=True):
        total, num_experts = float(load_E.sum()), len(load_E)
        hottest = np.argsort(-load_E, kind="stable")[:num_hottest]
        mean = total / num_experts
        made.append(
            LayerDistribution(
                layer=layer,
                num_choices=total,
                hottest=tuple(hottest.tolist()),
                shares=tuple((load_E[hottest] / max(total, 1e-30)).tolist()),
                hottest_over_mean=float(load_E.max() / mean) if total else 0.0,
                balancedness=balancedness(load_E, num_ranks),
                num_unused=int((load_E == 0).sum()),
            )
        )
    return made


def balancedness(load_E: Loads, num_ranks: int) -> float:
    """Mean load of a rank over the largest one, with experts in equal runs; 1 if even (or without
    load)."""
    by_rank = [float(part.sum()) for part in np.array_split(load_E, num_ranks)]
    return float(np.mean(by_rank) / max(by_rank)) if max(by_rank) else 1.0


def activations(trace: RoutingTrace, seed: int = 0) -> list[Activation]:
    """Returns one record for each batch size that the trace has enough tokens for."""
    rng = np.random.default_rng(seed)
    has_decode = bool((trace.phase_N == DECODE).any())
    decode = trace.select(trace.phase_N == DECODE) if has_decode else trace
    order, starts, counts = _by_request(decode)
    whole = _by_request(trace)
    made = []
    for size in BATCH_SIZES:
        if size > trace.num_tokens:
            break
        anywhere = [rng.choice(trace.num_tokens, size, replace=False) for _ in range(_NUM_DRAWS)]
        apart: list[NDArray[np.int64]] = []
        if len(starts) >= size:
            for _ in range(_NUM_DRAWS):
                requests = rng.choice(len(starts), size, replace=False)
                apart.append(order[starts[requests] + rng.integers(0, counts[requests])])
        together = _runs(whole, size, rng)
        made.append(
            Activation(
                batch_size=size,
                even=trace.num_experts * (1 - (1 - trace.top_k / trace.num_experts) ** size),
                any_tokens=_mean_active(trace, anywhere),
                one_per_request=_mean_active(decode, apart) if apart else None,
                one_request=_mean_active(trace, together) if together else None,
            )
        )
    return made


def windows(trace: RoutingTrace, count: int) -> NDArray[np.int64]:
    """Returns [W, L, E]: the loads of equal runs of tokens, in the order of the trace."""
    count = max(1, min(count, trace.num_tokens))
    parts = np.array_split(np.arange(trace.num_tokens), count)
    return np.stack([trace.select(slice(part[0], part[-1] + 1)).load() for part in parts])


def shuffled(trace: RoutingTrace, seed: int = 0) -> RoutingTrace:
    """Returns the trace with its tokens in random order."""
    return trace.select(np.random.default_rng(seed).permutation(trace.num_tokens))


def drifts(load_WLE: Loads, chance_WLE: Loads | None = None) -> list[Drift]:
    """Returns one record for each window; `chance_WLE` are the same windows of a shuffled trace."""
    all_LE = load_WLE.sum(axis=0)
    made: list[Drift] = []
    for index, load_LE in enumerate(load_WLE):
        before = None if index == 0 else total_variation(load_LE, load_WLE[index - 1])
        chance = None if chance_WLE is None else total_variation(chance_WLE[index], all_LE)
        made.append(
            Drift(
                window=index,
                num_choices=float(load_LE.sum()),
                to_previous=None if before is None else float(before.mean()),
                to_previous_worst=None if before is None else float(before.max()),
                to_all=float(total_variation(load_LE, all_LE).mean()),
                by_chance=None if chance is None else float(chance.mean()),
            )
        )
    return made


def total_variation(one_LE: Loads, other_LE: Loads) -> NDArray[np.float64]:
    """Returns [L]: half the sum of the absolute differences of two shares; 0 if equal, 1 if
    disjoint."""
    one, other = (
        load / np.maximum(load.sum(axis=1, keepdims=True), 1e-30) for load in (one_LE, other_LE)
    )
    distances: NDArray[np.float64] = np.abs(one - other).sum(axis=1) / 2
    return distances


def _by_request(
    trace: RoutingTrace,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sorts tokens by request; returns the order, and the start and number of each request's
    tokens."""
    order = np.argsort(trace.request_N, kind="stable")
    _, starts, counts = np.unique(trace.request_N[order], return_index=True, return_counts=True)
    return order, starts, counts


def _runs(
    by_request: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    size: int,
    rng: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Draws batches of consecutive tokens of one request that has enough of them."""
    order, starts, counts = by_request
    long_enough = np.flatnonzero(counts >= size)
    if not len(long_enough):
        return []
    made = []
    for request in rng.choice(long_enough, _NUM_DRAWS):
        first = starts[request] + rng.integers(0, counts[request] - size + 1)
        made.append(order[first : first + size])
    return made


def _mean_active(trace: RoutingTrace, batches: list[NDArray[np.int64]]) -> float:
    num_layers, num_experts = len(trace.layers), trace.num_experts
    is_active = np.zeros((num_layers, num_experts), dtype=bool)
    layers = np.arange(num_layers)[None, :, None]
    total = 0
    for batch in batches:
        is_active[:] = False
        is_active[layers, trace.expert_ids_NLK[batch]] = True
        total += int(is_active.sum())
    return total / (len(batches) * num_layers)


def draw_heat_map(load_LE: Loads, layers: Sequence[int], title: str, path: Path) -> None:
    """Draws layers down and experts across; white is the mean of the layer, blue below, red above.

    Raises TraceError if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise TraceError("a heat map needs matplotlib: pip install 'moe-serve[plot]'") from None
    mean_L1 = np.maximum(load_LE.mean(axis=1, keepdims=True), 1e-30)
    num_layers, num_experts = load_LE.shape
    width, height = min(16.0, 4.0 + 0.16 * num_experts), min(14.0, 2.0 + 0.24 * num_layers)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        load_LE / mean_L1,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        norm=TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=_MOST),
    )
    step = max(1, -(-num_layers // 32))
    axes.set_yticks(range(0, num_layers, step), [str(layer) for layer in layers[::step]])
    axes.set_xticks(range(0, num_experts, max(1, -(-num_experts // 32))))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=10, parse_math=False)
    bar = figure.colorbar(image, ax=axes, extend="max", ticks=[0.0, 0.5, 1.0, 2.0, 3.0, _MOST])
    bar.set_label("load over the layer's mean")
    try:
        with path.open("wb") as file:
            figure.savefig(file, dpi=130, format="png")
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}") from None
