"""Predicts the experts that a step will need from its sequences' signatures.

An expert memory keeps these experts and reads them ahead, before the rows arrive.

L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moe_serve.engine.schedule.policy.concave_cost import Floats
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from moe_serve.model.step_plan import SequenceSlice


class ExpectedExperts:
    """For servers with an expert memory. `is_on` returns whether signatures are good enough to act
    on."""

    def __init__(self, table: SignatureTable, num_experts: int, is_on: Callable[[], bool]) -> None:
        self._table, self._num_experts, self._is_on = table, num_experts, is_on

    def of(self, slices: Iterable[SequenceSlice]) -> Floats | None:
        """Returns [L, E]: the probability that some token of these slices needs an expert, treating
        each token like a coming one of its sequence. None if unknown."""
        if not self._is_on():
            return None
        needed = self._table.needed({s.sequence_id: len(s.token_ids) for s in slices})
        return None if needed is None else needed.reshape(-1, self._num_experts)
