"""Placements written, read back, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experts.placement.placement_error import PlacementError
from experts.placement.plan_file import read_placement, write_placement
from experts.placement.problem.placement import Placement, contiguous

GOOD: dict[str, Any] = {
    "format": "moe-serve placement", "version": 1, "num_ranks": 2, "num_experts": 3,
    "layers": {"1": [[0], [0, 1], [1]], "3": [[1], [0], [1]]},
}  # fmt: skip


@pytest.mark.parametrize("plan", [
    contiguous([0, 1, 5], 7, 3),
    Placement(num_ranks=2, num_experts=2, ranks_of={4: ((1, 0), (1,))}),
])  # fmt: skip
def test_what_is_written_is_read(plan: Placement, tmp_path: Path) -> None:
    write_placement(plan, tmp_path / "plan.json")
    assert read_placement(tmp_path / "plan.json") == plan


def test_by_hand(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(GOOD))
    plan = read_placement(tmp_path / "plan.json")
    assert (plan.num_ranks, plan.num_experts) == (2, 3)
    assert plan.held_by(0) == {1: [0, 1], 3: [1]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"format": "eplb"},
            'is not a placement of moe-serve: it does not contain "format": "moe-serve placement"; '
            "`moe-serve place --out FILE` writes one, and with --current PLAN --max-moves 0 it",
        ),
        ({"version": 2}, "version must be 1, got 2"),
        ({"more": 1}, r"missing \(\[\]\) or unknown \(\['more'\]\)"),
        ({"layers": []}, "layers must be an object"),
        ({"layers": {"01": [[0], [0], [1]]}}, "layer numbers as text, got '01'"),
        ({"layers": {"1" * 5000: []}}, f"layer numbers as text, got {'1' * 20!r}"),
        ({"layers": {"1": {}}}, "Layer 1 must be a list .* got {}"),
        ({"layers": {"1": [[0], [0]]}}, "Layer 1 places 2 experts; num_experts is 3"),
        ({"layers": {"1": [[0], 0, [1]]}}, "expert 1: ranks must be a list of rank numbers, got 0"),
        (
            {"layers": {"1": [[0], [True], [1]]}},
            r"ranks must be a list of rank numbers, got \[True\]",
        ),
        ({"layers": {"1": [[0], [], [1]]}}, "1 experts are on no rank; the first is expert 1 of l"),
        ({"layers": {"1": [[0], [2], [1]]}}, "puts expert 1 on rank 2; ranks are 0 to 1"),
        ({"num_ranks": "2"}, "num_ranks must be a whole number, got '2'"),
        ({"num_experts": 0, "layers": {}}, "0 experts on 2 ranks"),
        ({"layers": {}}, "layers is empty"),
    ],
)
def test_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD | changes))
    with pytest.raises(PlacementError, match=complaint) as caught:
        read_placement(path)
    assert "plan.json" in str(caught.value), "the file is named"


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", '{"a": 1, "a": 2}', "[" * 100_000])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlacementError, match=r"plan\.json is .* with --current PLAN --max-moves 0"):
        read_placement(tmp_path / "plan.json")
    with pytest.raises(PlacementError, match="cannot be read: No such file"):
        read_placement(tmp_path / "none.json")
