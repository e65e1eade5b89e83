"""How rows reach the expert stage and come back.

`dispatch` returns at once where it can; `combine` waits. Between the two calls the caller runs the
other micro-batches' attention: that is the ping-pong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.frames.wire import WireFormat, as_received


class Transport(Protocol):
    """One attention rank's way to the experts."""

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        """Send a micro-batch's rows of one layer. At most one is in flight per micro-batch."""
        ...

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        """-> the weighted sum of the rows' experts, [T, D] in fp32, in the order dispatched."""
        ...

    def finish(self) -> None:
        """All rows of a step are back: check what could not be checked on their way. Until then a
        GPU may still be waiting for another rank; afterwards it waits for nobody."""
        ...

    def reset(self) -> None:
        """Forget what was in flight when a step failed."""
        ...


class LocalTransport:
    """Both stages in one process: dispatch is a function call.

    With a `wire` rows are rounded as if they had travelled (cluster.wire_dtype).
    """

    def __init__(self, stage: ExpertStage, wire: WireFormat | None = None) -> None:
        self._stage, self._wire = stage, wire
        self._results: dict[int, Tensor] = {}

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        assert micro_batch not in self._results, f"micro-batch {micro_batch} is still in flight"
        rows = routed.rows
        if self._wire is not None:
            rows = replace(rows, x_TD=as_received(self._wire, rows.x_TD))
        self._stage.foresee(layer, micro_batch, routed.foreseen_E)
        self._results[micro_batch] = self._stage.run(layer, rows)

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        return self._results.pop(micro_batch)

    def finish(self) -> None:
        """Nothing is left."""

    def reset(self) -> None:
        self._results.clear()
