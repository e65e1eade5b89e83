"""Decides the service of a request: its tier, its tenant, its targets, and what its answer says
about them.

A client names a tier by `service_tier`, and may ask for other targets in `slo` or in headers. Its
API key decides which tiers it may name, and whether targets may be tighter than those of the tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_serve.config.sections import SchedulerConfig, ServerConfig
from moe_serve.config.tiers import TierConfig, find_tier
from moe_serve.engine.request.service_terms import NO_SERVICE, Service, Targets
from moe_serve.errors import InvalidRequestError
from moe_serve.http.gate.auth import Client
from moe_serve.http.metrics.service_rows import CLIENTS_OWN
from moe_serve.http.schema.parameters import check_fields
from moe_serve.http.schema.service_fields import ServiceWish

MAX_USER_CHARS = 64  # longest name of a tenant; the rest is cut
_TARGETS = ("ttft_s", "tpot_s", "e2e_s")
_AUTO, _DEFAULT = "auto", "default"
_ORDERS_BY_TARGET = ("edf", "atc")
_NO_TIER = TierConfig(name="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entitlement:
    """The service that a request gets.

    `shown_tier` is the value of `service_tier` in the answer; None: the answer has no such field.
    `ignored` names the fields that have no effect here, `used` those that have one although the
    body's own check does not know of it.
    """

    service: Service = NO_SERVICE
    max_output_tokens: int | None = None  # a limit of the tier; None: none
    shown_tier: str | None = None
    ignored: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()

    def unheeded(self, ignored: Iterable[str]) -> list[str]:
        """Completes a list of the fields without effect."""
        return [*(name for name in ignored if name not in self.used), *self.ignored]


NO_ENTITLEMENT = Entitlement()


class ServiceTiers:
    """The tiers of a server, and the rules for the clients that use them."""

    def __init__(self, scheduler: SchedulerConfig, server: ServerConfig) -> None:
        self._tiers, self._server = scheduler.tiers, server
        self._uses_targets = bool(scheduler.tiers) or scheduler.order in _ORDERS_BY_TARGET

    @property
    def tiers(self) -> tuple[TierConfig, ...]:
        return self._tiers

    def admit(self, wish: ServiceWish, client: Client) -> Entitlement:
        """Returns the service that this client gets. Raises InvalidRequestError for a tier or
        target that it may not have, with the allowed ones.
        """
        unknown = check_fields(wish.unknown, frozenset(), {}, "slo.", self._server.is_strict)
        if not self._uses_targets:
            return self._without_targets(wish, unknown)
        tier = self._tier(wish.tier, client)
        targets = self._targets(wish, tier, client)
        tenant, field = self._tenant(wish, client)
        has_tiers = bool(self._tiers)
        silent = ("service_tier",) if wish.tier is not None and not has_tiers else ()
        return Entitlement(
            service=Service(
                tier=tier.name,
                weight=tier.weight,
                targets=targets,
                is_sheddable=tier.is_sheddable,
                tenant=tenant,
                workflow=wish.workflow,
                stage=wish.stage,
            ),
            max_output_tokens=tier.max_output_tokens,
            shown_tier=tier.name if has_tiers else _shown(wish),
            ignored=(*silent, *unknown),
            used=frozenset() if field is None else frozenset({field}),
        )

    def _without_targets(self, wish: ServiceWish, unknown: Sequence[str]) -> Entitlement:
        """Handles a request to a server that has no tiers and does not order by targets.
        `service_tier` is ignored, as OpenAI's clients expect, but targets are refused, because the
        server could not keep them.
        """
        asked = [name for name in wish.fields if not name.startswith("x-")]
        if asked and self._server.is_strict:
            raise InvalidRequestError(
                f"{asked[0]} has no effect on this server, because it has no service tiers "
                "(scheduler.tiers) and does not order requests by deadline (scheduler.order edf or "
                "atc). Leave it out.",
                param=asked[0],
                code="unsupported_parameter",
            )
        names = (*wish.fields, *(("service_tier",) if wish.tier is not None else ()), *unknown)
        return Entitlement(shown_tier=_shown(wish), ignored=names)

    def _tier(self, name: str | None, client: Client) -> TierConfig:
        if not self._tiers:
            return _NO_TIER
        allowed = self._allowed(client)
        if name is None or name == _AUTO or (name == _DEFAULT and _DEFAULT not in allowed):
            name = allowed[0]
        tier = find_tier(self._tiers, name) if name in allowed else None
        if tier is None:
            raise InvalidRequestError(
                f"service_tier must be one of {', '.join((_AUTO, *allowed))} for this client, got "
                f"{name[:40]!r}. The tiers are scheduler.tiers; server.key_tiers, or tier of the "
                "API key, says which of them a client may name.",
                param="service_tier",
                code="service_tier_not_allowed",
            )
        return tier

    def _allowed(self, client: Client) -> tuple[str, ...]:
        """Returns the tiers that a client may name. The first one is its default."""
        every = tuple(tier.name for tier in self._tiers)
        return client.settings.tiers or self._server.key_tiers or every

    def _targets(self, wish: ServiceWish, tier: TierConfig, client: Client) -> Targets:
        """Returns the tier's targets, replaced by those that the client asks for."""
        own = client.settings.may_tighten
        may_tighten = self._server.key_may_tighten if own is None else own
        values: dict[str, float | None] = {name: getattr(tier, name) for name in _TARGETS}
        for name in _TARGETS:
            asked, least = getattr(wish, name), values[name]
            if asked is None:
                continue
            if not may_tighten and (least is None or asked < least):
                raise _too_tight(wish.name_of(name), asked, least, tier)
            values[name] = asked
        ttft_s, e2e_s = values["ttft_s"], values["e2e_s"]
        if ttft_s is not None and e2e_s is not None and e2e_s < ttft_s:
            values["ttft_s"] = e2e_s  # the client's deadline is before the tier's first token
        if wish.is_strict and ttft_s is None and e2e_s is None:
            raise InvalidRequestError(
                "slo.strict requires a target that the request could miss: set slo.ttft_ms or "
                "slo.deadline_ms, or name a tier that has one.",
                param="slo.strict",
            )
        return Targets(
            ttft_s=values["ttft_s"],
            tpot_s=values["tpot_s"],
            e2e_s=values["e2e_s"],
            is_strict=wish.is_strict,
        )

    def _tenant(self, wish: ServiceWish, client: Client) -> tuple[str, str | None]:
        """Returns the tenant, and the field that named it, if one did. An API key comes before
        fields: a client could name any tenant. A colon is in no name that an operator can give."""
        if client.settings.tenant is not None:
            return client.settings.tenant, None
        if self._server.has_api_keys:
            return f"key:{client.name[:12]}", None
        if wish.user is None:
            return "", None
        if not isinstance(wish.user, str):
            raise InvalidRequestError(
                f"{wish.user_field} must be a string: it names the tenant whose share the request "
                "uses.",
                param=wish.user_field,
                code="invalid_type",
            )
        return f"{CLIENTS_OWN}{wish.user[:MAX_USER_CHARS]}", wish.user_field.partition(".")[0]


def _shown(wish: ServiceWish) -> str | None:
    """Returns the tier in the answer of a server without tiers. OpenAI shows it if the client named
    one."""
    return None if wish.tier is None else _DEFAULT


def _too_tight(
    name: str, asked: float, least: float | None, tier: TierConfig
) -> InvalidRequestError:
    of_tier = f"of tier {tier.name}" if tier.name else "of this server"
    if least is None:
        limit = (
            f"is not allowed for this client, because the requests {of_tier} have no such target"
        )
    else:
        limit = f"must be at least {least * 1000:.10g} for this client, the target {of_tier}; got "
        limit += f"{asked * 1000:.10g}"
    return InvalidRequestError(
        f"{name} {limit}. Tighter targets need server.key_may_tighten, or tighten=yes of the API "
        "key.",
        param=name,
        code="target_not_allowed",
    )
