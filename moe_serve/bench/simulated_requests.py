"""Turns the requests of a workload into those of a simulation, and their results into records."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial

from moe_serve.bench.figures.request_record import REFUSED, RequestRecord
from moe_serve.bench.workload.prompt_maker import PromptMaker, Slot
from moe_serve.bench.workload.tier_mix import TierMix
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.service_terms import NO_SERVICE, Service, Targets
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest

_VOCABULARY = 2**31 - 1  # so that prompts share nothing by chance


def jobs_of(
    slots: Sequence[Slot], seed: int, tiers: TierMix | None = None, *, is_strict: bool = False
) -> Iterator[SimulatedRequest]:
    """Yields the requests of a workload for the simulator. `is_strict`: all requests of tiers with
    a target are."""
    maker = PromptMaker(kind="tokens", seed=seed, vocab_size=_VOCABULARY)
    for slot in slots:
        yield SimulatedRequest(
            index=slot.index,
            at_s=slot.at_s,
            num_output=slot.output_tokens,
            make_prompt=partial(_token_ids, maker, slot),
            service=_service(slot, tiers, is_strict),
            priority=0 if tiers is None else tiers.priority_of(slot.tier),
            session=slot.session,
        )


def _service(slot: Slot, tiers: TierMix | None, is_strict: bool) -> Service:
    if tiers is None:
        return Service(tenant=slot.tenant) if slot.tenant else NO_SERVICE
    return service_of(tiers.named(slot.tier), slot.tenant, is_strict=is_strict)


def service_of(tier: TierConfig, tenant: str, *, is_strict: bool) -> Service:
    """Returns the service that a tier gives to a request of a tenant."""
    return Service(
        tier=tier.name,
        weight=tier.weight,
        targets=Targets(
            ttft_s=tier.ttft_s, tpot_s=tier.tpot_s, e2e_s=tier.e2e_s, is_strict=is_strict
        ),
        is_sheddable=tier.is_sheddable,
        tenant=tenant,
    )


def _token_ids(maker: PromptMaker, slot: Slot) -> list[int]:
    ids = maker.prompt(slot)
    assert isinstance(ids, list) and isinstance(ids[0], int), "random token ids"
    return ids


def record_of(times: RequestTimes) -> RequestRecord:
    """Returns a simulated request as `bench` records one."""
    at = times.token_times
    gaps = array("d", [later - earlier for earlier, later in zip(at, at[1:], strict=False)])
    return RequestRecord(
        index=times.index,
        scheduled_s=times.due_s,
        started_s=times.due_s,
        end_s=times.end_s,
        first_s=at[0] if at else None,
        last_s=at[-1] if at else None,
        gaps_s=gaps,
        wanted_tokens=times.num_output,
        prompt_tokens=times.num_prompt,
        output_tokens=len(at),
        cached_tokens=times.num_cached,
        error=None if times.error is None else REFUSED if times.is_refused else "engine",
        detail=times.error or "",
        tier=times.service.tier,
        tenant=times.service.tenant,
        session=times.session,
        predicted_ttft_s=times.predicted_ttft_s,
    )
