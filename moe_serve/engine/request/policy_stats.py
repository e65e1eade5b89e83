"""Figures of a batch policy, as metrics and dashboards show them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal

PolicyName = Literal["fifo", "balanced", "expert-aware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """A snapshot for the metrics; a policy fills it."""

    policy: PolicyName  # that decides now: a fallback shows
    num_passed_over: int = 0  # times that somebody who waited let a later one go first
    activated_experts: float | None = None  # expected in the last step's micro-batches, all layers
    recall: float | None = None  # of the predictor, as measured; None: not measured
    is_predictor_on: bool | None = None  # None: there is none
    num_learnt: int | None = None  # predictions that it learnt from; None: it does not learn


def sum_of(each: Items[PolicyStats], past: Items[PolicyStats] = ()) -> PolicyStats | None:
    """Merge the statistics of live and lost engines; None if there are none."""
    everyone = (*each, *past)
    if not everyone:
        return None
    known = [s.activated_experts for s in each if s.activated_experts is not None]
    return replace(
        everyone[0],
        num_passed_over=sum(s.num_passed_over for s in everyone),
        activated_experts=sum(known) if known else None,
    )
