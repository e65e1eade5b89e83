"""The service of a client: the tiers and targets that it may have, its tenant, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from moe_serve.config.sections import SchedulerConfig, ServerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.service_terms import NO_SERVICE, Service, Targets
from moe_serve.errors import InvalidRequestError
from moe_serve.http.gate.auth import NO_SETTINGS, Client, KeySettings
from moe_serve.http.generation.service_tiers import Entitlement, ServiceTiers
from moe_serve.http.schema.service_fields import NO_WISH, ServiceWish

CHAT = TierConfig(name="interactive", weight=4.0, ttft_s=1.0, tpot_s=0.1)
FLEX = TierConfig(name="flex", e2e_s=600.0, is_sheddable=True, max_output_tokens=9)
TIERS = SchedulerConfig(tiers=(CHAT, FLEX))
NO_KEY = Client("192.0.2.1", NO_SETTINGS)


def admit(
    wish: ServiceWish = NO_WISH,
    scheduler: SchedulerConfig = TIERS,
    client: Client = NO_KEY,
    **server: Any,
) -> Entitlement:
    return ServiceTiers(scheduler, ServerConfig(**server)).admit(wish, client)


def refused(wish: ServiceWish, **others: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        admit(wish, **others)
    return caught.value


def test_a_named_tier_gives_its_targets() -> None:
    given = admit(ServiceWish(tier="flex"))
    assert given.service == Service(
        tier="flex", weight=1.0, targets=Targets(e2e_s=600.0), is_sheddable=True
    )
    assert (given.shown_tier, given.max_output_tokens, given.ignored) == ("flex", 9, ())


@pytest.mark.parametrize("name", [None, "auto", "default"])
def test_the_first_tier_is_the_default(name: str | None) -> None:
    assert admit(ServiceWish(tier=name)).shown_tier == "interactive"


def test_a_tier_named_default_is_not_the_first_one() -> None:
    scheduler = SchedulerConfig(tiers=(CHAT, TierConfig(name="default")))
    named = [admit(ServiceWish(tier=n), scheduler).shown_tier for n in (None, "auto", "default")]
    assert named == ["interactive", "interactive", "default"]


def test_keys_decide_which_tiers_may_be_named() -> None:
    one = Client("k", KeySettings(tiers=("flex",)))
    assert admit(client=one).shown_tier == "flex", "the key's first tier is its default"
    error = refused(ServiceWish(tier="interactive"), client=one)
    assert (error.param, error.code) == ("service_tier", "service_tier_not_allowed")
    assert "one of auto, flex for this client, got 'interactive'" in str(error)
    assert str(refused(ServiceWish(tier="x" * 60))).count("x") < 45, "a long name is cut"
    others = {"key_tiers": ("flex", "interactive")}
    assert admit(**others).shown_tier == "flex"
    assert admit(ServiceWish(tier="interactive"), **others).shown_tier == "interactive"
    assert admit(client=Client("k", KeySettings(tiers=("interactive",))), **others).shown_tier == (
        "interactive"
    )


def test_targets_may_be_loosened_by_everyone_and_tightened_by_few() -> None:
    loose = admit(ServiceWish(ttft_s=3.0, tpot_s=0.1)).service.targets
    assert loose == Targets(ttft_s=3.0, tpot_s=0.1)
    tight = ServiceWish(ttft_s=0.5)
    error = refused(tight)
    assert (error.param, error.code) == ("slo.ttft_ms", "target_not_allowed")
    assert "at least 1000 for this client, the target of tier interactive; got 500" in str(error)
    assert "no such target" in str(refused(ServiceWish(e2e_s=9.0)))
    assert admit(tight, key_may_tighten=True).service.targets.ttft_s == 0.5
    yes, no = (Client("k", KeySettings(may_tighten=may)) for may in (True, False))
    assert admit(tight, client=yes).service.targets == Targets(ttft_s=0.5, tpot_s=0.1)
    refused(tight, client=no, key_may_tighten=True)


def test_errors_name_the_header_that_asked() -> None:
    wish = NO_WISH.with_headers({"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "0"})
    assert (wish.ttft_s, wish.tpot_s) == (0.5, None)
    assert refused(wish).param == "x-slo-ttft-ms"
    body = ServiceWish(ttft_s=2.0).with_headers({"x-slo-ttft-ms": "500"})
    assert admit(body).service.targets.ttft_s == 2.0, "the body counts more"


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf", "1e3", "0.01", "9" * 13, "１"])
def test_wrong_headers_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"header x-slo-tpot-ms must be .*milliseconds"):
        NO_WISH.with_headers({"x-slo-tpot-ms": text})


def test_a_deadline_before_the_tiers_first_token_moves_it() -> None:
    targets = admit(ServiceWish(e2e_s=0.4), key_may_tighten=True).service.targets
    assert (targets.ttft_s, targets.e2e_s) == (0.4, 0.4)


def test_strict_needs_a_target() -> None:
    assert admit(ServiceWish(is_strict=True)).service.targets.is_strict
    plain = SchedulerConfig(tiers=(TierConfig(name="plain", tpot_s=1.0),))
    assert refused(ServiceWish(is_strict=True), scheduler=plain).param == "slo.strict"


def test_the_tenant_is_the_keys_before_the_clients_own_word() -> None:
    def tenant(client: Client, user: object = "bob", **server: Any) -> tuple[str, frozenset[str]]:
        given = admit(ServiceWish(user=user), client=client, **server)
        return given.service.tenant, given.used

    digest = Client("0123456789abcdef" * 4, NO_SETTINGS)
    keys = {"api_keys": ("a", "b")}
    assert tenant(Client("ff", KeySettings(tenant="acme")), **keys) == ("acme", frozenset())
    assert tenant(digest, **keys) == ("key:0123456789ab", frozenset())
    assert tenant(NO_KEY) == ("user:bob", {"user"})
    assert tenant(NO_KEY, None) == ("", frozenset())
    assert len(tenant(NO_KEY, "x" * 10_000)[0]) == len("user:") + 64
    assert refused(ServiceWish(user=3)).param == "user"


@pytest.mark.parametrize("order", ["auto", "fifo", "priority"])
def test_without_tiers_the_tier_is_ignored_and_targets_are_refused(order: Any) -> None:
    scheduler = SchedulerConfig(order=order)
    given = admit(ServiceWish(tier="flex", user=3), scheduler)
    assert given == Entitlement(shown_tier="default", ignored=("service_tier",))
    assert admit(NO_WISH, scheduler) == Entitlement()
    for wish, name in (
        (ServiceWish(ttft_s=1.0), "slo"),
        (ServiceWish(is_strict=True), "slo"),
        (ServiceWish(workflow="w", stage="s"), "workflow"),
    ):
        error = refused(wish, scheduler=scheduler, key_may_tighten=True)
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert "scheduler.tiers" in str(error)
        lenient = admit(wish, scheduler, is_strict=False)
        assert lenient.service == NO_SERVICE and name in lenient.ignored
    header = NO_WISH.with_headers({"x-slo-ttft-ms": "500"})  # proxies add them
    assert admit(header, scheduler).ignored == ("x-slo-ttft-ms",)


def test_targets_without_tiers_need_an_order_by_deadline_and_the_right() -> None:
    scheduler = SchedulerConfig(order="edf")
    wish = ServiceWish(tier="flex", ttft_s=1.0, workflow="w")
    assert "of this server have no such target" in str(refused(wish, scheduler=scheduler))
    given = admit(wish, scheduler, key_may_tighten=True)
    assert given.service == Service(targets=Targets(ttft_s=1.0), workflow="w")
    assert (given.shown_tier, given.ignored) == ("default", ("service_tier",))


def test_unknown_fields_of_slo_are_refused_or_named() -> None:
    wish = ServiceWish(unknown={"ttft": 1})
    assert refused(wish).param == "slo.ttft"
    assert admit(wish, is_strict=False).ignored == ("slo.ttft",)


def test_fields_that_became_useful_are_no_longer_named_as_ignored() -> None:
    given = admit(ServiceWish(user="bob"))
    assert given.unheeded(["user", "store"]) == ["store"]
    assert Entitlement(ignored=("slo",)).unheeded(["user"]) == ["user", "slo"]
