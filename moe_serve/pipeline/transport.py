"""Sends rows to the expert stage and returns their sums.

`dispatch` returns at once if it can; `combine` waits. Between the two calls the caller runs the
other micro-batches' attention: that is the ping-pong.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.frames.wire import WireFormat, as_received


class Transport(Protocol):
    """The connection of one attention rank to the experts."""

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        """Send a micro-batch's rows of one layer. At most one is in flight per micro-batch."""
        ...

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        """Wait -> the weighted sum of the rows' experts, [T, D] in fp32,
        in the order dispatched.
        """
        ...

    def finish(self) -> None:
        """Check, once all rows of a step are back, what could not be checked earlier.

        Before this call a GPU may still wait for another rank; afterwards it does not.
        """
        ...

    def reset(self) -> None:
        """Forget the exchanges that were in flight when a step failed."""
        ...


class LocalTransport:
    """Runs both stages in one process: dispatch is a function call.

    With a `wire`, rows are rounded as if they had been sent (cluster.wire_dtype).
    """

    def __init__(self, stage: ExpertStage, wire: WireFormat | None = None) -> None:
        self._stage, self._wire = stage, wire
        self._results: dict[int, Tensor] = {}

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        assert micro_batch not in self._results, f"micro-batch {micro_batch} is still in flight"
        rows, x_TD = routed.rows, routed.rows.x_TD
        if self._wire is not None:
            x_TD = as_received(self._wire, x_TD)
        self._stage.foresee(layer, micro_batch, routed.foreseen_E)
        experts = self._stage.layer(layer)
        self._results[micro_batch] = experts.total(x_TD, rows.expert_ids_TK, rows.weights_TK)

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        return self._results.pop(micro_batch)

    def finish(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        self._results.clear()
