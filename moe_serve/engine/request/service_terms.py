"""The tier, tenant, targets and workflow of a request.

The front end finds them in the request, the API key and the configuration. The scheduler orders
requests by them; no token depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.config.tiers import TierConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Times in seconds that a request should keep; None: no target.

    `ttft_s` and `e2e_s` count from the arrival to the first and to the last token, `tpot_s` is the
    mean time between two tokens. A strict request is refused or ended when it cannot keep them.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The tier and tenant of a request, and what they entitle it to."""

    tier: str = ""  # the name of a tier; empty: the server has no tiers
    weight: float = 1.0  # how much a second of delay counts
    targets: Targets = Targets()
    is_sheddable: bool = False  # may be refused when its targets cannot be met
    tenant: str = ""  # tenants share the server: a digest of the API key, else the field `user`
    workflow: str = ""  # a name of the client for a task of several requests; empty: none
    stage: str = ""  # the name of this request's step in the workflow

    @classmethod
    def of_tier(cls, tier: TierConfig, tenant: str = "") -> Service:
        """Returns what a tier gives to each of its requests."""
        return cls(
            tier=tier.name,
            weight=tier.weight,
            targets=Targets(ttft_s=tier.ttft_s, tpot_s=tier.tpot_s, e2e_s=tier.e2e_s),
            is_sheddable=tier.is_sheddable,
            tenant=tenant,
        )


NO_SERVICE = Service()
