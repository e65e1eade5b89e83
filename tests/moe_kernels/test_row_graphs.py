"""Recorded functions of rows, and what the eager recorder holds its users to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.graphs.graph_recorder import EagerRecorder
from moe_kernels.graphs.row_graphs import RowGraphs


def make_graphs(recorder: EagerRecorder, calls: list[tuple[str, int]]) -> RowGraphs:
    def double(x_TD: Tensor) -> Tensor:
        calls.append(("double", len(x_TD)))
        return 2.0 * x_TD

    def negate(x_TD: Tensor) -> Tensor:
        calls.append(("negate", len(x_TD)))
        return -x_TD

    with torch.inference_mode():  # as stages make them; whoever runs them need not be in it
        inputs, out = torch.zeros(8, 3), torch.zeros(8, 3)
    return RowGraphs({"double": double, "negate": negate}, (2, 8), (inputs,), out, recorder)


def test_the_next_larger_recording_runs() -> None:
    recorder, calls = EagerRecorder(), []
    graphs = make_graphs(recorder, calls)
    assert calls == [("double", 8), ("negate", 8), ("double", 2), ("negate", 2)], "largest first"
    calls.clear()
    x_TD = torch.randn(3, 3)
    first, second = graphs.run("double", x_TD), graphs.run("negate", x_TD[:2])
    assert calls == [("double", 8), ("negate", 2)]
    assert first is not None and torch.equal(first, 2 * x_TD), "the second call left it alone"
    assert second is not None and torch.equal(second, -x_TD[:2])
    assert (recorder.num_recordings, recorder.num_replays) == (4, 2)


def test_padding_repeats_the_first_row() -> None:
    seen: list[Tensor] = []

    def keep(x_TD: Tensor) -> Tensor:
        seen.append(x_TD.clone())
        return x_TD

    graphs = RowGraphs({0: keep}, (4,), (torch.zeros(4, 2),), torch.zeros(4, 2), EagerRecorder())
    graphs.run(0, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert seen[-1].tolist() == [[1, 2], [3, 4], [1, 2], [1, 2]]


@pytest.mark.parametrize("num_rows", [0, 9])
def test_numbers_that_are_not_recorded(num_rows: int) -> None:
    graphs = make_graphs(EagerRecorder(), [])
    assert graphs.run("double", torch.zeros(num_rows, 3)) is None


def test_another_dtype_is_not_rounded_silently() -> None:
    graphs = make_graphs(EagerRecorder(), [])
    with pytest.raises(AssertionError, match="recorded were"):
        graphs.run("double", torch.zeros(2, 3, dtype=torch.bfloat16))


def test_tensors_must_stay_where_they_were() -> None:
    held = {"x": torch.zeros(3)}
    recording = EagerRecorder().record(lambda: None, lambda: [held["x"]])
    recording.replay()
    held["x"] = torch.zeros(4)
    with pytest.raises(AssertionError, match="before a replay"):
        recording.replay()

    def move() -> None:
        held["x"] = torch.zeros(5)

    recording = EagerRecorder().record(move, lambda: [held["x"]])
    with pytest.raises(AssertionError, match="after a replay"):
        recording.replay()
