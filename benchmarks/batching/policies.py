"""The server's policies with signatures that the benchmark sets."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.ageing import Ageing
from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost
from moe_serve.engine.schedule.policy.expert_aware import Bounds, ExpertAware
from moe_serve.engine.schedule.policy.signature_table import SignatureTable


class Told:
    """A SignatureSource that does nothing, because the benchmark fills the table."""

    is_on, has_predictor = True, False
    recall: float | None = None
    num_learnt: int | None = None

    def refresh(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Does nothing."""

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Does nothing: no state is kept."""


def expert_aware(
    max_dimensions: int, tolerance: float, max_passed_over: int
) -> tuple[ExpertAware, SignatureTable]:
    """Returns a policy and its table; its limits of age are never reached, so runs can be
    repeated.
    """
    cost = ConcaveCost()
    table = SignatureTable(cost, max_dimensions)
    ageing = Ageing(max_passed_over, float("inf"), lambda: 0.0)
    bounds = Bounds(tolerance=tolerance)
    return ExpertAware(Told(), table, ageing, cost, bounds), table
