"""Functions of rows as recordings: each for some numbers of rows, padded to the next larger.

T rows, B rows of a recording, D width of the result. All functions read the same tensors and write
the same result, so they cost no memory of their own; what `run` returns is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from moe_kernels.graphs.graph_recorder import Recorder, Recording
from moe_kernels.graphs.graph_sizes import smallest

RowFunction = Callable[..., Tensor]  # tensors of B rows -> [B, D]


class RowGraphs:
    """`inputs` and `out` have the largest number of rows; the others use their first rows.

    A function's rows must not depend on each other: padding repeats the first row.
    """

    def __init__(
        self,
        functions: Mapping[Hashable, RowFunction],
        buckets: Sequence[int],
        inputs: Sequence[Tensor],
        out_BD: Tensor,
        recorder: Recorder,
    ) -> None:
        self._inputs, self._out_BD = tuple(inputs), out_BD
        self._buckets = sorted(buckets)
        for tensor in (*self._inputs, out_BD):
            assert len(tensor) == self._buckets[-1], f"{len(tensor)} rows, not {self._buckets[-1]}"
        self._recordings = {
            (key, num_rows): self._record(function, num_rows, recorder)
            for num_rows in reversed(self._buckets)
            for key, function in functions.items()
        }

    @torch.inference_mode()
    def _record(self, function: RowFunction, num_rows: int, recorder: Recorder) -> Recording:
        inputs = [held[:num_rows] for held in self._inputs]

        def step() -> None:
            self._out_BD[:num_rows].copy_(function(*inputs))

        return recorder.record(step, lambda: (*self._inputs, self._out_BD))

    @torch.inference_mode()
    def run(self, key: Hashable, *rows: Tensor) -> Tensor | None:
        """The function `key` of some rows -> [T, D]; None of no rows, or more than recorded."""
        count = len(rows[0])
        num_rows = smallest(self._buckets, count)
        if num_rows is None or count == 0:
            return None
        for held, new in zip(self._inputs, rows, strict=True):
            assert held.dtype == new.dtype, f"rows are {new.dtype}, recorded were {held.dtype}"
            held[:count].copy_(new)
            if count < num_rows:
                held[count:num_rows].copy_(new[:1].expand(num_rows - count, -1))
        self._recordings[key, num_rows].replay()
        return self._out_BD[:count].clone()
