"""Counts what the server did for each service tier and tenant, for `/metrics` and dashboards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from moe_serve.cache.histogram import Histogram

DECISION_BOUNDS = (2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
MAX_TENANTS = 20  # tenants in a snapshot, those with the most service first


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """The requests of one tier since the start.

    `num_with_*` counts finished requests that had the target, `num_*_met` those of them that kept
    it. A promise is made to a request with a target that may be refused or ended (strict or
    sheddable) and is accepted.
    """

    tier: str
    num_finished: int = 0  # all that ended, except those whose client disconnected
    num_good: int = 0  # those that kept all their targets
    num_goodput_tokens: int = 0  # generated tokens of these
    num_with_ttft: int = 0
    num_ttft_met: int = 0
    num_with_tpot: int = 0
    num_tpot_met: int = 0
    num_with_e2e: int = 0
    num_e2e_met: int = 0
    tardiness_s: float = 0.0  # seconds of delay beyond the first or last token's target, weighted
    num_refused: int = 0  # before they were queued, as their target could not be met
    num_expired: int = 0  # strict ones, ended because their deadline had passed
    num_relegated: int = 0  # moved behind all others, as their target could not be met
    num_runaways: int = 0  # answers that reached the predicted limit of their tier
    num_promises_kept: int = 0
    num_promises_broken: int = 0
    num_urgent_preemptions: int = 0  # running ones that gave their seat to a more urgent request

    def __add__(self, other: TierCounts) -> TierCounts:
        names = [field.name for field in fields(self) if field.name != "tier"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return TierCounts(tier=self.tier, **sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCounts:
    """The service of one tenant of a tier since it was last forgotten."""

    tier: str
    tenant: str
    service_s: float = 0.0  # predicted seconds of the work that was done for it
    num_finished: int = 0
    num_good: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastError:
    """The errors of the predictions of the first token, as given when requests were queued."""

    num_compared: int = 0
    p90_ratio: float = 1.0  # actual over predicted, of the recent requests: the cautious factor
    median_error: float = 0.0  # |actual - predicted| / actual, of the recent requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStats:
    """A snapshot. Every configured tier is in `tiers`, in the order of the configuration."""

    order: str = ""  # the name of the policy: atc
    tiers: tuple[TierCounts, ...] = ()
    output_limits: tuple[float, ...] = ()  # of new answers, by tier; infinite: none
    tenants: tuple[TenantCounts, ...] = ()  # at most `MAX_TENANTS`, most service first
    num_tenants: int = 0  # that are remembered
    jain_index: float = 1.0  # of the service of the tenants that have requests: 1 is even
    forecast: ForecastError = ForecastError()
    decisions: Histogram = Histogram.empty(DECISION_BOUNDS)  # seconds to order those that wait


def jain_index(services: Iterable[float]) -> float:
    """Returns (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has everything."""
    values = list(services)
    squares = sum(value * value for value in values)
    return 1.0 if not squares else sum(values) ** 2 / (len(values) * squares)
