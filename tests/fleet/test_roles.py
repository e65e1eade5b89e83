"""Fleets with prefill and decode cells: their numbers, their simulation, and the verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.bench.figures.summary import Slo
from moe_serve.config.cells import CellRole
from moe_serve.fleet.cell_kinds import cells_with_role, decode_cells_of, prefill_cells_of
from moe_serve.fleet.certify import certify
from moe_serve.fleet.demand import demand_of
from moe_serve.fleet.offer import read_fleet
from moe_serve.fleet.packing import LOAD, Fleet, Group
from moe_serve.fleet.roles import CellRatio, fleets_with_roles
from tests.fleet.test_packing import SHAPE, SLO, demand, slots

PREFILL: CellRole = "prefill"
DECODE: CellRole = "decode"
OFFERS = read_fleet("h100:8@2.50,h20:8@0.90", SHAPE, None)


def test_cells_of_a_role_do_the_whole_load_with_as_few_as_its_tokens_take() -> None:
    wanted = demand(60.0)
    prefill_kinds, decode_kinds = (
        [kind for offer in OFFERS for kind in cells_with_role(offer, wanted, role)]
        for role in (PREFILL, DECODE)
    )
    fleets = list(fleets_with_roles(prefill_kinds, decode_kinds, OFFERS, wanted))
    assert any(fleet.is_mixed for fleet in fleets) and any(fleet.is_served for fleet in fleets)
    for fleet in fleets:
        assert [group.kind.role for group in fleet.groups] == ["prefill", "decode"]
        for group in fleet.groups:
            load = wanted.whole.rate / group.kind.capacity / LOAD
            assert group.num_cells - 1 < load <= group.num_cells + 1e-6
            assert group.num_devices <= 8 and group.kind.offer.name in fleet.name
        found = CellRatio.of(fleet, wanted)
        prefill, decode = fleet.groups
        assert found.ratio == pytest.approx(decode.kind.capacity / prefill.kind.capacity)


def test_decode_cells_have_larger_batches_and_prefill_cells_smaller_chunks_under_limits() -> None:
    offer, loose = replace(OFFERS[1], num_devices=1), demand(60.0)
    tight = replace(loose, slo=Slo.parse("ttft=300ms,tpot=15ms"))
    batches = [max(k.max_num_seqs for k in decode_cells_of(offer, x)) for x in (loose, tight)]
    chunks = [min(k.max_batched_tokens for k in prefill_cells_of(offer, x)) for x in (loose, tight)]
    assert batches[0] > batches[1] and chunks[0] > chunks[1]


def test_a_fleet_with_roles_is_certified_under_one_coordinator() -> None:
    wanted = demand_of(slots(60, 60.0), 0, SLO, 0.9, shares_prefixes=True)
    offer = replace(OFFERS[0], num_devices=2)
    prefill = max(prefill_cells_of(offer, wanted), key=lambda k: k.capacity)
    decode = max(decode_cells_of(offer, wanted), key=lambda k: k.capacity)
    shares = (1.0,) * len(wanted.buckets)
    done = certify(
        Fleet(groups=tuple(Group(kind=k, num_cells=1, shares=shares) for k in (prefill, decode))),
        wanted,
    )
    assert done.summary.num_ok == len(wanted.slots) and done.late_role in ("prefill", "decode")
    assert done.fleet.price == 2.5 * done.fleet.num_devices
