"""T_e: one layer's expert stage, over rows, with the true router's choices and with random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from experts.routed_rows import RoutedRows
from moe_serve.pipeline.costs.cost_model import Experts
from moe_serve.planning.measured_model import MeasuredModel
from moe_serve.planning.stopwatch import Stopwatch

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class ExpertSample:
    """Seconds of one layer; `num_activated` is the layers' mean."""

    num_rows: int
    num_choices: int
    num_activated: float
    is_natural: bool
    seconds: float


@torch.inference_mode()
def time_experts(
    model: MeasuredModel, rows: Mapping[int, RoutedRows], is_natural: bool, stopwatch: Stopwatch
) -> ExpertSample:
    """`rows` by layer: the layers take turns."""

    def layers() -> None:
        for layer, part in rows.items():
            model.experts.run(layer, part)

    ids = [part.expert_ids_TK for part in rows.values()]
    return ExpertSample(
        num_rows=len(ids[0]),
        num_choices=ids[0].numel(),
        num_activated=float(np.mean([len(part.unique()) for part in ids])),
        is_natural=is_natural,
        seconds=stopwatch.seconds(layers) / len(rows),
    )


def first_rows(rows: Mapping[int, RoutedRows], count: int) -> dict[int, RoutedRows]:
    return {
        layer: RoutedRows(r.x_TD[:count], r.expert_ids_TK[:count], r.weights_TK[:count])
        for layer, r in rows.items()
    }


def random_choices(
    rows: Mapping[int, RoutedRows], num_experts: int, seed: int
) -> dict[int, RoutedRows]:
    """The same rows, each sent to k experts drawn alike, ascending as a router's are."""
    generator = torch.Generator().manual_seed(seed)
    chosen = {}
    for layer, r in rows.items():
        draws_TE = torch.rand(len(r.x_TD), num_experts, generator=generator)
        ids_TK = draws_TE.topk(r.expert_ids_TK.shape[1], dim=1).indices.sort(dim=1).values
        chosen[layer] = RoutedRows(r.x_TD, ids_TK.to(r.expert_ids_TK.device), r.weights_TK)
    return chosen


def fit_experts(num_experts: int, top_k: int, samples: Sequence[ExpertSample]) -> Experts:
    """How many equally popular experts would be activated as often as the measured ones were."""
    counts = np.array([(s.num_rows, s.num_activated) for s in samples])
    candidates = np.linspace(top_k, num_experts, 512)
    missed = (1 - top_k / candidates[:, None]) ** counts[None, :, 0]
    errors = np.log(candidates[:, None] * (1 - missed) / counts[None, :, 1])
    best = candidates[np.square(errors).sum(axis=1).argmin()]
    return Experts(num_experts=num_experts, top_k=top_k, num_effective=float(best))
