"""Measures the balance of single steps for each policy that splits an expert's rows over its
copies.

Plans are made on half of the prompts of a trace, and steps are drawn from the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.devices import even_devices
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem
from experts.placement.replicas.lp_split import LpSplit
from experts.placement.replicas.replica_choice import LayerChoice, ReplicaPolicy
from experts.placement.solvers.search.search_solver import Search
from placement.inputs import Halves, read_halves, workloads
from placement.part import Bar, PartResult, Setting

_CELLS = ((8, 8), (16, 16), (16, 32))  # devices, replicas
_BATCHES = (64, 1024, 16384)
_POLICIES: tuple[ReplicaPolicy, ...] = ("round-robin", "least-tokens", "lp")


def run(setting: Setting) -> Iterator[PartResult]:
    """Yields the results. Balance needs a trace; the time of a split does not."""
    if setting.trace is not None:
        yield _evenness(setting, read_halves(setting.trace))
    yield _times()


def _times() -> PartResult:
    """Measures one layer of many experts."""
    loads = workloads(1, 1, 256)
    problem = PlacementProblem(loads=loads, devices=even_devices(32, 4, 256 + 32))
    split = LpSplit(Search().solve(problem).placement.ranks_of[0])
    rng, rows = np.random.default_rng(1), list[dict[str, object]]()
    for size in _BATCHES:
        seconds = []
        for _ in range(50):
            # Steps differ from the plan by more than chance, as those of single requests do.
            share_E = loads.shares_SLE()[0, 0] * rng.gamma(2.0, 0.5, 256)
            counts_E = rng.multinomial(8 * size, share_E / share_E.sum())
            began = time.perf_counter()
            split.quotas(counts_E)
            seconds.append(time.perf_counter() - began)
        row: dict[str, object] = {"batch": size}
        row["median us"] = f"{np.median(seconds) * 1e6:.0f}"
        row["least us"] = f"{min(seconds) * 1e6:.0f}"
        rows.append(row)
    return PartResult(
        title="lp: the split of 8 rows a token, 256 experts and 32 replicas on 32 devices",
        columns=tuple(rows[0]),
        rows=rows,
    )


def _evenness(setting: Setting, halves: Halves) -> PartResult:
    planned, rows, is_best = halves.planned.loads("half"), list[dict[str, object]](), True
    for num_devices, num_replicas in _CELLS[:1] if setting.quick else _CELLS:
        devices = even_devices(num_devices, 1, planned.num_experts + num_replicas)
        placement = Search().solve(PlacementProblem(loads=planned, devices=devices)).placement
        for size in _BATCHES[:2] if setting.quick else _BATCHES:
            steps = _steps(halves.held_out, size)
            found = {name: _balance(placement, halves.held_out, steps, name) for name in _POLICIES}
            row: dict[str, object] = {
                "devices": num_devices,
                "replicas": num_replicas,
                "batch": size,
            }
            row |= {name: f"{balance:.3f}" for name, (balance, _) in found.items()}
            row |= {f"{name} us": f"{us:.0f}" for name, (_, us) in found.items()}
            rows.append(row)
            is_best &= found["lp"][0] >= max(balance for balance, _ in found.values())
    return PartResult(
        title="Steps, gpt-oss-20b, by the choice of copies at dispatch, held out",
        columns=tuple(rows[0]),
        rows=rows,
        bars=[
            Bar(
                name="lp: the most even steps of all policies",
                wanted="in every cell",
                got="so" if is_best else "not so",
                is_met=is_best,
            )
        ],
        notes=[
            "tokens of a step are drawn independently: steps of real requests are less even",
            "us: median of one layer's choice, rows assigned",
        ],
    )


def _steps(choices: TokenChoices, size: int) -> NDArray[np.int64]:
    """Returns the tokens of the steps [steps, tokens], which are the same for every plan and
    policy.
    """
    num_steps = max(2, min(20, 40_000 // size))
    rng = np.random.default_rng(1)
    return rng.integers(0, len(choices.expert_ids_NLK), (num_steps, size))


def _balance(
    placement: Placement, choices: TokenChoices, steps: NDArray[np.int64], policy: ReplicaPolicy
) -> tuple[float, float]:
    """Returns mean rows / largest rows of a device, mean over layers and steps, and the
    microseconds.
    """
    ratios, seconds = [], []
    for index, layer in enumerate(choices.layers):
        choice = LayerChoice(policy, layer, placement.ranks_of[layer])
        for tokens in steps:
            ids_TK = choices.expert_ids_NLK[tokens, index].astype(np.int64)
            began = time.perf_counter()
            ranks_TK = choice.ranks(ids_TK)
            seconds.append(time.perf_counter() - began)
            rows_D = np.bincount(ranks_TK.ravel(), minlength=placement.num_ranks)
            ratios.append(rows_D.mean() / rows_D.max())
    return float(np.mean(ratios)), float(np.median(seconds)) * 1e6
