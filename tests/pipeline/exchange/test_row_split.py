"""Layers whose experts have moved have their own tables, and send rows as newly made tables do."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from experts.expert_stage import RoutedRows
from experts.placement.replicas.replica_choice import ReplicaPolicy
from moe_serve.pipeline.exchange.row_split import (
    RowSplit,
    broadcast_bytes,
    is_broadcast_worth,
    routed_bytes,
)

T, K, E, R = 24, 2, 6, 3
SINGLE = [[0], [0], [1], [1], [2], [2]]
SPREAD = [[0, 1, 2], [0], [1], [1, 2], [2], [2, 0]]


@pytest.mark.parametrize("policy", get_args(ReplicaPolicy))
def test_with_layers(policy: ReplicaPolicy) -> None:
    """Layer 0 stays as it is, layer 1 gets replicas, and layer 2 loses them."""
    before = {0: SPREAD, 1: SINGLE, 2: SPREAD}
    changes = {1: SPREAD, 2: SINGLE}
    changed = RowSplit(before, R, policy=policy).with_layers(changes)
    anew = RowSplit(before | changes, R, policy=policy)
    generator = torch.Generator().manual_seed(1)
    ids_TK = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    rows = RoutedRows(torch.randn(T, 4, generator=generator), ids_TK, torch.rand(T, K))
    for layer in before:
        for part, expected in zip(changed.split(layer, rows), anew.split(layer, rows), strict=True):
            assert torch.equal(part.expert_ids_nK, expected.expert_ids_nK)
            assert torch.equal(part.x_nD, expected.x_nD)


@pytest.mark.parametrize(
    ("row_bytes", "top_k", "num_ranks", "expected"),
    [
        (4096, 8, 1, False),  # 4160 against 4100: too little for routing twice
        (4096, 8, 4, False),
        (4096, 8, 32, False),
        (512, 8, 1, True),  # narrow rows: their choices weigh
        (512, 8, 2, True),
        (512, 8, 32, False),
        (512, 1, 4, False),
    ],
)
def test_the_side_that_routes(row_bytes: int, top_k: int, num_ranks: int, expected: bool) -> None:
    assert is_broadcast_worth(row_bytes, top_k, num_ranks) is expected


def test_bytes_of_a_row() -> None:
    assert routed_bytes(4096, 8, 1) == 4096 + 64
    assert routed_bytes(100, 1, 7) == pytest.approx(108), "one choice, one rank"
    assert broadcast_bytes(4096, 4) == 4 * 4100
