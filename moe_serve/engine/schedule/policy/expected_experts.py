"""Which experts a step will probably need, from its sequences' signatures: what an expert memory
keeps, and reads ahead, before the rows are there.

L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moe_serve.engine.schedule.policy.concave_cost import Floats
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from moe_serve.model.step_plan import SequenceSlice


class ExpectedExperts:
    """Of a server whose experts need not all be in memory. `is_on`: whether signatures are good
    enough to act on."""

    def __init__(self, table: SignatureTable, num_experts: int, is_on: Callable[[], bool]) -> None:
        self._table, self._num_experts, self._is_on = table, num_experts, is_on

    def of(self, slices: Iterable[SequenceSlice]) -> Floats | None:
        """[L, E]: the probability that some token of these needs an expert, each token like a
        coming one of its sequence; None: nothing is known."""
        if not self._is_on():
            return None
        needed = self._table.needed({s.sequence_id: len(s.token_ids) for s in slices})
        return None if needed is None else needed.reshape(-1, self._num_experts)
