"""Recommends a fleet in a few sentences, with comparisons and the confidence in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_serve.fleet.certify import Certified
from moe_serve.fleet.fleet_plan import FleetPlan
from moe_serve.fleet.roles import CellRatio
from moe_serve.simulate.costs.device import HeldOutError

Confidence = Literal["high", "medium", "low", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetVerdict:
    """`is_split_worth_it`: the cheapest fleet with expert ranks costs less than the cheapest
    without, among those that moe-serve serves; None if one of the two misses the limits.
    `are_roles_worth_it`: the same for cells for prompts and for answers, among all fleets."""

    best: str | None
    best_served: str | None
    is_split_worth_it: bool | None
    is_mix_worth_it: bool | None
    are_roles_worth_it: bool | None
    confidence: Confidence
    sentences: tuple[str, ...]


def fleet_verdict(plan: FleetPlan) -> FleetVerdict:
    """Compares the simulated fleets of a plan."""
    best, served = plan.best, plan.cheapest(lambda x: x.fleet.is_served)
    split = plan.cheapest(lambda x: x.fleet.is_served and _has_split(x))
    whole = plan.cheapest(lambda x: _is_plain(x) and not x.fleet.is_mixed)
    mixed = plan.cheapest(lambda x: x.fleet.is_mixed)
    alike = plan.cheapest(lambda x: not x.fleet.is_mixed)
    with_roles = plan.cheapest(lambda x: x.fleet.has_roles)
    without = plan.cheapest(lambda x: not x.fleet.has_roles)
    confidence, why = _confidence(plan, best)
    sentences = [_best(plan, best, served)]
    sentences += _versus("disaggregation", split, "whole models and expert parallelism", whole)
    if any(each.fleet.has_roles for each in plan.certified):
        sentences += _versus(
            "a split into prefill and decode cells", with_roles, "cells that do both", without
        )
        sentences += _ratio(plan)
    if len({each.fleet.is_mixed for each in plan.certified}) > 1:
        sentences += _versus("a mix of device types", mixed, "one type", alike)
    sentences += _one_device(plan)
    return FleetVerdict(
        best=None if best is None else best.fleet.name,
        best_served=None if served is None else served.fleet.name,
        is_split_worth_it=_is_cheaper(split, whole),
        is_mix_worth_it=_is_cheaper(mixed, alike),
        are_roles_worth_it=_is_cheaper(with_roles, without),
        confidence=confidence,
        sentences=(*sentences, why),
    )


def _has_split(each: Certified) -> bool:
    return any(group.kind.style == "split" for group in each.fleet.groups)


def _is_plain(each: Certified) -> bool:
    return not (_has_split(each) or each.fleet.has_roles)


def _is_cheaper(a: Certified | None, b: Certified | None) -> bool | None:
    return None if a is None or b is None else a.fleet.price < b.fleet.price


def _figures(each: Certified) -> str:
    count = each.fleet.num_devices
    return (
        f"{each.fleet.name} ({count} device{'s' * (count > 1)}, {each.fleet.price:.2f} an hour, "
        f"{each.attainment:.1%} within the limits)"
    )


def _best(plan: FleetPlan, best: Certified | None, served: Certified | None) -> str:
    limits = f"{plan.demand.attainment:.0%} of the requests within {plan.demand.slo}"
    if best is None:
        closest = max(plan.certified, key=lambda x: x.attainment)
        return f"no fleet of these devices keeps {limits}; the closest is {_figures(closest)}"
    text = f"the cheapest fleet with {limits} is {_figures(best)}"
    if best.fleet.is_served:
        return text
    if served is None:
        return f"{text}; moe-serve does not serve it, and nothing that it serves keeps the limits"
    more = served.fleet.price / best.fleet.price - 1
    return (
        f"{text}; moe-serve does not serve it: of what it serves, take {_figures(served)}, "
        f"{more:+.0%}"
    )


def _versus(a_name: str, a: Certified | None, b_name: str, b: Certified | None) -> Iterator[str]:
    if a is None and b is None:
        return
    if a is None:
        yield f"{a_name} is not worth it: no simulated fleet of this sort keeps the limits"
    elif b is None:
        yield f"only {a_name} keeps the limits"
    else:
        change = a.fleet.price / b.fleet.price - 1
        if change < 0:
            yield f"{a_name} costs {-change:.0%} less than {b_name}"
        else:
            yield (
                f"{a_name} is not worth it: {a.fleet.name} costs {change:.0%} more than "
                f"{b.fleet.name}"
            )


def _ratio(plan: FleetPlan) -> Iterator[str]:
    """States how many prefill cells the load takes for a decode cell, by the cheapest fleet."""
    found = [each for each in plan.certified if each.fleet.has_roles]
    best = next((each for each in found if each.meets), found[0])
    ratio, whole = CellRatio.of(best.fleet, plan.demand), plan.demand.whole
    prefill, decode = ratio.prefill.rates(whole), ratio.decode.rates(whole)
    yield (
        f"the load takes {ratio.ratio:.2g} {ratio.prefill.name} for one {ratio.decode.name}: a "
        f"request has {whole.computed:.0f} uncached prompt tokens and {whole.output:.0f} of its "
        f"answer, and a cell {prefill.prompt_tok_s:.0f} and {decode.output_tok_s:.0f} tokens/s"
    )


def _one_device(plan: FleetPlan) -> Iterator[str]:
    alone = plan.one_device
    if alone is None:
        yield f"one device cannot do it: {plan.why_not.rstrip('.')}"
    else:
        rate = alone.summary.requests_per_s
        yield (
            f"one device alone answers {rate:.2f} requests/s, {alone.attainment:.1%} of them "
            f"within the limits ({alone.fleet.name})"
        )


def _confidence(plan: FleetPlan, best: Certified | None) -> tuple[Confidence, str]:
    """Compares the best fleet's lead over the next other sort with the error of the costs."""
    errors = [e for each in plan.certified for e in _held_out(each)]
    if best is None or not errors:
        return "unknown", (
            "confidence: unknown, as these costs were not compared with measurements; measure the "
            "recommended layout before you buy"
        )
    median, worst = max(e.median for e in errors), max(e.worst for e in errors)
    other = plan.cheapest(lambda x: _sort_of(x) != _sort_of(best))
    lead = None if other is None else other.fleet.price / best.fleet.price - 1
    error = (
        f"on published figures that were held out, the costs were off by {median:.0%} (median) "
        f"and {worst:.0%} (worst)"
    )
    if lead is None:
        return "low", f"confidence: low, as nothing else keeps the limits; {error}"
    level: Confidence = "high" if lead > worst else "medium" if lead > median else "low"
    return level, (f"confidence: {level}; the next other sort costs {lead:.0%} more, and {error}")


def _held_out(each: Certified) -> Iterator[HeldOutError]:
    for group in each.fleet.groups:
        if group.kind.offer.held_out is not None:
            yield group.kind.offer.held_out


def _sort_of(each: Certified) -> tuple[tuple[str, str], ...]:
    return tuple((g.kind.offer.name, f"{g.kind.style} {g.kind.role}") for g in each.fleet.groups)
