"""The router's choice: against its definition in float64, by hand, and row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.interface.routing import RouterShape
from moe_kernels.kernel_choice import KernelsName
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels


def make_logits(num_rows: int, num_experts: int) -> Tensor:
    """Returns a permutation in every row: no two logits are equal, so the choice is unique."""
    generator = torch.Generator().manual_seed(num_experts)
    order = [torch.randperm(num_experts, generator=generator) for _ in range(num_rows)]
    return (torch.stack(order) - num_experts / 2) / num_experts * 8


def definition(
    logits: Tensor, shape: RouterShape, bias: Tensor | None
) -> tuple[list[list[int]], list[list[float]]]:
    """Computes the choice row by row, in plain Python on float64."""
    all_ids, all_weights = [], []
    for row in logits.double():
        scores = (row.sigmoid() if shape.scoring == "sigmoid" else row.softmax(-1)).tolist()
        choice = [s + (0.0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
        size = shape.num_experts // shape.num_groups
        members = [list(range(g * size, (g + 1) * size)) for g in range(shape.num_groups)]
        num_best = 2 if shape.group_score == "top2" else 1
        group_scores = [sum(sorted(choice[e] for e in m)[-num_best:]) for m in members]
        kept = sorted(range(len(members)), key=lambda g: -group_scores[g])
        allowed = [e for g in kept[: shape.num_groups_kept] for e in members[g]]
        ids = sorted(sorted(allowed, key=lambda e: -choice[e])[: shape.top_k])
        weights = [scores[e] for e in ids]
        if shape.is_renormalised:
            weights = [w / max(sum(weights), shape.renorm_floor) for w in weights]
        all_ids.append(ids)
        all_weights.append([w * shape.scaling for w in weights])
    return all_ids, all_weights


def shape_of(num_experts: int, top_k: int, is_renormalised: bool, **more: object) -> RouterShape:
    return RouterShape(
        num_experts=num_experts, top_k=top_k, is_renormalised=is_renormalised, **more
    )  # type: ignore[arg-type]


SHAPES = [
    shape_of(8, 2, True),
    shape_of(32, 4, False),
    shape_of(60, 4, True, scaling=2.5),
    shape_of(5, 5, False),
    shape_of(128, 8, True),
    shape_of(16, 1, False, scoring="sigmoid"),
    shape_of(128, 8, True, scoring="sigmoid", renorm_floor=1e-20, scaling=2.5),
    shape_of(64, 6, False, num_groups=8, num_groups_kept=3, scaling=16.0),
    shape_of(
        256, 8, True, scoring="sigmoid", num_groups=8, num_groups_kept=4, group_score="top2",
        renorm_floor=1e-20, scaling=2.5,
    ),
    shape_of(8, 2, True, scoring="sigmoid", renorm_floor=10.0),
]  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_matches_the_definition(name: KernelsName, shape: RouterShape, has_bias: bool) -> None:
    logits = make_logits(100, shape.num_experts)
    generator = torch.Generator().manual_seed(1)
    bias = torch.rand(shape.num_experts, generator=generator) / 4 if has_bias else None
    kernels = make_kernels(name, torch.float32)
    ids, weights = kernels.route(logits, shape, bias)
    expected_ids, expected = definition(logits, shape, bias)
    assert ids.tolist() == expected_ids, f"{name}, {shape}"
    assert torch.allclose(weights.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-7)
    for rows in (slice(0, 1), slice(7, 12), slice(30, 99)):
        again = kernels.route(logits[rows], shape, bias)
        assert torch.equal(again[0], ids[rows]) and torch.equal(again[1], weights[rows]), f"{rows}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("shape", [*SHAPES, shape_of(59, 59, False, scoring="sigmoid")], ids=str)
def test_a_row_is_routed_alike_wherever_it_stands(name: KernelsName, shape: RouterShape) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(90, shape.num_experts, generator=generator) * 3
    kernels = make_kernels(name, torch.float32)
    ids, weights = kernels.route(logits, shape, None)
    for count in (1, 2, 3, 7, 12, 19, 40, 77):
        rows = torch.randperm(90, generator=generator)[:count]
        again = kernels.route(logits[rows], shape, None)
        assert torch.equal(again[0], ids[rows]), f"{name}, {count=}"
        assert torch.equal(again[1], weights[rows]), f"{name}, {count=}"


def test_where_equal_the_native_router_takes_the_lower_id() -> None:
    kernels = make_kernels("auto", torch.float32)
    if not kernels.name.startswith("native"):
        pytest.skip("torch does not say which of equal values it takes")
    groups = shape_of(8, 2, True, num_groups=4, num_groups_kept=2)
    for shape in (shape_of(8, 2, True), groups):
        ids, weights = kernels.route(torch.zeros(1, 8), shape, None)
        assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.5, 0.5]], f"{shape}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_of_nan_stays_alone(name: KernelsName, scoring: str) -> None:
    shape, logits = shape_of(8, 2, True, scoring=scoring), torch.randn(4, 8)
    kernels = make_kernels(name, torch.float32)
    clean = kernels.route(logits, shape, None)
    spoiled = logits.clone()
    spoiled[2] = float("nan")
    ids, weights = kernels.route(spoiled, shape, None)
    assert ((ids >= 0) & (ids < 8)).all(), "ids stay inside the bank"
    assert weights[2].isnan().all()
    for row in (0, 1, 3):
        assert torch.equal(ids[row], clean[0][row]) and torch.equal(weights[row], clean[1][row])
