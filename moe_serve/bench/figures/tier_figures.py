"""The figures of a run by service tier and by tenant: promises, delays and shares.

Latencies count from when a request was due. A request is *attained* if it was answered and met
every target of its tier. Its *tardiness* is how much later than its target the first or the last
token came, whichever is more. Refused requests never count as attained, and have no tardiness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_serve.bench.figures.request_record import REFUSED, RequestRecord
from moe_serve.bench.figures.summary import Slo, Spread
from moe_serve.config.tiers import TierConfig

_MOST_TENANTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigures:
    """The figures of one tier's requests. Shares refer to all requests of the tier that ended. A
    share is None if the tier lacks that target."""

    name: str
    weight: float
    targets: str
    num: int
    num_refused: int
    num_failed: int  # without those refused
    attained: float
    ttft_attained: float | None
    tpot_attained: float | None
    e2e_attained: float | None
    mean_tardiness_s: float  # of answered requests, without the weight
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    longest_wait_s: float | None  # the largest TTFT


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFigures:
    """Counts the service of one tenant: tokens of prompts that were computed, and of answers."""

    name: str
    num: int
    service_tokens: int
    ttft_p99_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """The figures of a run with tiers.

    `weighted_tardiness_s`: mean over answered requests of the tier's weight times the tardiness.
    `jain`: evenness of the tenants' service, 1 if equal; None with fewer than two tenants.
    A request that might have been refused (strict, or of a sheddable tier) and was accepted with a
    forecast is a promise, kept if it met its TTFT target.
    """

    tiers: tuple[TierFigures, ...]
    tenants: tuple[TenantFigures, ...]  # those with most service
    attained: float  # of all requests
    goodput_per_s: float
    weighted_tardiness_s: float
    longest_wait_s: float | None
    num_refused: int
    num_promised: int
    num_kept: int
    forecast_error: float | None  # median of |predicted - actual| / actual TTFT
    jain: float | None

    @classmethod
    def of(
        cls,
        records: Sequence[RequestRecord],
        tiers: Sequence[TierConfig],
        duration_s: float,
        *,
        is_strict: bool = False,
    ) -> ServiceFigures:
        """`is_strict`: all requests were sent as strict."""
        by_tier = defaultdict[str, list[RequestRecord]](list)
        for record in records:
            by_tier[record.tier].append(record)
        of_name = {tier.name: tier for tier in tiers}
        pairs = [(r, of_name[r.tier]) for r in records if r.tier in of_name]
        num_good = sum(_slo(tier).is_met(r) for r, tier in pairs)
        promised = [
            (r, tier)
            for r, tier in pairs
            if (is_strict or tier.is_sheddable) and _is_promise(r, tier)
        ]
        waits = [r.ttft_s for r in records if r.ttft_s is not None]
        tenants = _tenants(records)
        return cls(
            tiers=tuple(_tier(tier, by_tier[tier.name]) for tier in tiers),
            tenants=tuple(tenants[:_MOST_TENANTS]),
            attained=num_good / len(records) if records else 0.0,
            goodput_per_s=num_good / duration_s if duration_s > 0 else 0.0,
            weighted_tardiness_s=_mean([t.weight * tardiness(r, t) for r, t in pairs if r.is_ok]),
            longest_wait_s=max(waits, default=None),
            num_refused=sum(r.error == REFUSED for r in records),
            num_promised=len(promised),
            num_kept=sum(Slo(ttft_s=tier.ttft_s).is_met(r) for r, tier in promised),
            forecast_error=_forecast_error(records),
            jain=jain([tenant.service_tokens for tenant in tenants]),
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ServiceFigures:
        """Reads what `dataclasses.asdict` has made of it."""
        tiers = [
            TierFigures(
                **{**row, "ttft_ms": _spread(row["ttft_ms"]), "tpot_ms": _spread(row["tpot_ms"])}
            )
            for row in content["tiers"]
        ]
        tenants = [TenantFigures(**row) for row in content["tenants"]]
        return cls(**{**content, "tiers": tuple(tiers), "tenants": tuple(tenants)})


def tardiness(record: RequestRecord, tier: TierConfig) -> float:
    """Returns the seconds by which an answered request missed its targets; 0: it met them."""
    late = 0.0
    if tier.ttft_s is not None and record.ttft_s is not None:
        late = record.ttft_s - tier.ttft_s
    if tier.e2e_s is not None:
        late = max(late, record.e2e_s - tier.e2e_s)
    return max(0.0, late)


def jain(values: Sequence[float]) -> float | None:
    """Returns Jain's index, (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has all."""
    squares = sum(value * value for value in values)
    if len(values) < 2 or not squares:
        return None
    return float(sum(values) ** 2 / (len(values) * squares))


def _tier(tier: TierConfig, records: Sequence[RequestRecord]) -> TierFigures:
    slo, ok = _slo(tier), [r for r in records if r.is_ok]
    ttfts = [r.ttft_s for r in ok if r.ttft_s is not None]
    num_refused = sum(r.error == REFUSED for r in records)
    return TierFigures(
        name=tier.name,
        weight=tier.weight,
        targets=str(slo),
        num=len(records),
        num_refused=num_refused,
        num_failed=len(records) - len(ok) - num_refused,
        attained=_share(records, slo),
        ttft_attained=None if slo.ttft_s is None else _share(records, Slo(ttft_s=slo.ttft_s)),
        tpot_attained=None if slo.tpot_s is None else _share(records, Slo(tpot_s=slo.tpot_s)),
        e2e_attained=None if slo.e2e_s is None else _share(records, Slo(e2e_s=slo.e2e_s)),
        mean_tardiness_s=_mean([tardiness(r, tier) for r in ok]),
        ttft_ms=Spread.of(ttfts),
        tpot_ms=Spread.of([r.tpot_s for r in ok if r.tpot_s is not None]),
        longest_wait_s=max(ttfts, default=None),
    )


def _slo(tier: TierConfig) -> Slo:
    return Slo(ttft_s=tier.ttft_s, tpot_s=tier.tpot_s, e2e_s=tier.e2e_s)


def _share(records: Sequence[RequestRecord], slo: Slo) -> float:
    return sum(slo.is_met(r) for r in records) / len(records) if records else 0.0


def _is_promise(record: RequestRecord, tier: TierConfig) -> bool:
    """Returns whether a request was accepted with a forecast. It is broken if it then failed."""
    is_accepted = record.predicted_ttft_s is not None and record.error != REFUSED
    return is_accepted and tier.ttft_s is not None


def _forecast_error(records: Sequence[RequestRecord]) -> float | None:
    errors = [
        abs(r.predicted_ttft_s - r.ttft_s) / r.ttft_s
        for r in records
        if r.predicted_ttft_s is not None and r.ttft_s
    ]
    return float(np.median(errors)) if errors else None


def _tenants(records: Sequence[RequestRecord]) -> list[TenantFigures]:
    """Returns the figures of all tenants, the one with most service first."""
    by_tenant = defaultdict[str, list[RequestRecord]](list)
    for record in records:
        if record.tenant:
            by_tenant[record.tenant].append(record)
    found = [_tenant(name, rows) for name, rows in by_tenant.items()]
    return sorted(found, key=lambda tenant: (-tenant.service_tokens, tenant.name))


def _tenant(name: str, records: Sequence[RequestRecord]) -> TenantFigures:
    ok = [r for r in records if r.is_ok]
    ttfts = [1e3 * r.ttft_s for r in ok if r.ttft_s is not None]
    read = sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in ok)
    return TenantFigures(
        name=name,
        num=len(records),
        service_tokens=read + sum(r.counted_tokens for r in ok),
        ttft_p99_ms=float(np.percentile(ttfts, 99)) if ttfts else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spread(content: Mapping[str, Any] | None) -> Spread | None:
    return None if content is None else Spread(**content)
