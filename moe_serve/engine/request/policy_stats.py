"""Statistics of a batch policy, for metrics and dashboards."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal

PolicyName = Literal["fifo", "balanced", "expert-aware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """A snapshot for the metrics, filled by the policy."""

    policy: PolicyName  # the one in effect, so a fallback to fifo is visible
    num_passed_over: int = 0  # times that a later request started before a waiting one
    activated_experts: float | None = None  # expected in the last step's micro-batches, all layers
    recall: float | None = None  # of the predictor, as measured; None: not measured
    is_predictor_on: bool | None = None  # None: no predictor
    num_learnt: int | None = None  # predictions learnt from; None: the predictor does not learn


def sum_of(each: Items[PolicyStats], past: Items[PolicyStats] = ()) -> PolicyStats | None:
    """Merge the statistics of live and lost engines; None if there are none."""
    engines = (*each, *past)
    if not engines:
        return None
    known = [s.activated_experts for s in each if s.activated_experts is not None]
    return replace(
        engines[0],
        num_passed_over=sum(s.num_passed_over for s in engines),
        activated_experts=sum(known) if known else None,
    )
