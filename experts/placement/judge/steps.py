"""Estimates how even single steps will be: a batch is a small sample of the loads that a plan was
made for.

B tokens of a step, W drawn steps, L layers, E experts, D devices, K choices of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.problem import PlacementProblem
from experts.placement.replicas.lp_split import LpSplit

_MOST_TOKENS, _MOST_STEPS, _FEWEST_STEPS = 2**16, 32, 4
_MOST_SPLITS = 192  # limit on the (step, layer) pairs for which the exact split is computed
_SEED = 20240601


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBalance:
    """Mean over layers and drawn steps of mean rows / largest rows of a device (over its speed)."""

    batch_size: int
    num_steps: int
    even: float  # if copies of an expert take equal parts of its rows
    # if rows are split at dispatch to minimise the busiest device; None without replicas
    split: float | None
    # steps were drawn from a trace; otherwise experts were drawn independently, by their loads
    has_tokens: bool


def draw_steps(
    problem: PlacementProblem, choices: TokenChoices | None, seed: int = _SEED
) -> NDArray[np.int64] | None:
    """Draws the rows of each expert [W, L, E]; None if neither tokens nor top-k are known."""
    size, rng = problem.batch_size, np.random.default_rng(seed)
    num_steps = int(np.clip(_MOST_TOKENS // size, _FEWEST_STEPS, _MOST_STEPS))
    if choices is not None:
        drawn = rng.integers(0, len(choices.expert_ids_NLK), (num_steps, size))
        return np.stack([_counted(choices, tokens_B) for tokens_B in drawn])
    if problem.top_k is None:
        return None
    shares_SLE = problem.loads.shares_SLE()
    rows = size * problem.top_k
    return np.stack(
        [rng.multinomial(rows, shares_SLE[step % len(shares_SLE)]) for step in range(num_steps)]
    )


def step_balance(
    problem: PlacementProblem,
    copies_LED: NDArray[np.int64],
    rows_WLE: NDArray[np.int64],
    *,
    has_tokens: bool,
) -> StepBalance:
    """Measures the balance of a plan in the drawn steps. `rows_WLE` comes from `draw_steps` and is
    the same for all plans that are compared."""
    copies_LE = np.maximum(copies_LED.sum(axis=2), 1)
    speed_D = np.array([device.speed for device in problem.devices.devices])
    loads_WLD = np.einsum("wle,led->wld", rows_WLE / copies_LE, copies_LED, optimize=True) / speed_D
    even_WL = rows_WLE.sum(axis=2) / speed_D.sum()
    has_splits = bool((copies_LED > 0).sum(axis=2).max() > 1) and bool((speed_D == 1.0).all())
    return StepBalance(
        batch_size=problem.batch_size,
        num_steps=len(rows_WLE),
        even=float((even_WL / loads_WLD.max(axis=2)).mean()),
        split=_split(copies_LED, rows_WLE) if has_splits else None,
        has_tokens=has_tokens,
    )


def _split(copies_LED: NDArray[np.int64], rows_WLE: NDArray[np.int64]) -> float:
    """Balance with the exact split, on evenly spaced layers of the steps."""
    num_devices = copies_LED.shape[2]
    cells = [(w, layer) for layer in range(rows_WLE.shape[1]) for w in range(len(rows_WLE))]
    ratios = []
    splits: dict[int, LpSplit] = {}
    for step, layer in cells[:: -(-len(cells) // _MOST_SPLITS)]:
        ranks_of = [np.flatnonzero(held).tolist() for held in copies_LED[layer]]
        splitter = splits.setdefault(layer, LpSplit(ranks_of))
        rows_E = rows_WLE[step, layer]
        quotas = splitter.quotas(rows_E)
        rows_D = np.zeros(num_devices)
        for expert in np.flatnonzero(rows_E):
            rows_D[ranks_of[expert]] += quotas.get(int(expert), [int(rows_E[expert])])
        ratios.append(rows_D.mean() / rows_D.max())
    return float(np.mean(ratios))


def _counted(choices: TokenChoices, tokens_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [L, E]: rows of each expert in a step."""
    num_layers, num_experts = len(choices.layers), choices.num_experts
    cells = choices.expert_ids_NLK[tokens_B] + (np.arange(num_layers) * num_experts)[:, None]
    counts = np.bincount(cells.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)
