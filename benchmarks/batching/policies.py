"""The server's own policies, told signatures by the benchmark instead of by a server."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.ageing import Ageing
from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost
from moe_serve.engine.schedule.policy.expert_aware import Bounds, ExpertAware
from moe_serve.engine.schedule.policy.signature_table import SignatureTable


class Told:
    """A SignatureSource that does nothing: the table is filled from outside."""

    is_on, has_predictor = True, False
    recall: float | None = None
    num_learnt: int | None = None

    def refresh(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Nothing to do."""

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Nothing is kept."""


def expert_aware(
    max_dimensions: int, tolerance: float, max_passed_over: int
) -> tuple[ExpertAware, SignatureTable]:
    """A policy and its table; ages are never reached, so that a run is the same each time."""
    cost = ConcaveCost()
    table = SignatureTable(cost, max_dimensions)
    ageing = Ageing(max_passed_over, float("inf"), lambda: 0.0)
    bounds = Bounds(tolerance=tolerance)
    return ExpertAware(Told(), table, ageing, cost, bounds), table
