"""Demands, cells and packing: small cases that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.bench.figures.summary import Slo
from moe_serve.bench.workload.prompt_maker import Block, Slot
from moe_serve.errors import ConfigError
from moe_serve.fleet.cell_kinds import CellKind, cells_of, layouts_of
from moe_serve.fleet.demand import Demand, demand_of
from moe_serve.fleet.offer import Offer, read_fleet
from moe_serve.fleet.packing import LOAD, equal_cells, pack
from moe_serve.simulate.catalogue import find_model
from moe_serve.simulate.costs.model_shape import read_model_shape

SHAPE = read_model_shape(find_model("qwen3-30b"), "fp8")
SLO = Slo.parse("ttft=2s,tpot=50ms")


def slots(count: int, rate: float = 10.0) -> list[Slot]:
    """Returns requests of 100 or 1 000 tokens in turn, evenly spaced."""
    return [
        Slot(index=i, at_s=i / rate, prompt_tokens=(100, 1000)[i % 2], output_tokens=50)
        for i in range(count)
    ]


def demand(rate: float = 10.0) -> Demand:
    return demand_of(slots(200, rate), 0, SLO, 0.9, shares_prefixes=True)


def test_a_demand_has_the_rate_and_sizes_of_its_requests() -> None:
    found = demand()
    assert found.whole.rate == pytest.approx(10.0)
    assert (found.whole.prompt, found.whole.output, found.longest) == (550, 50, 1050)
    assert [bucket.most_prompt for bucket in found.buckets] == [100, 1000]
    assert sum(bucket.rate for bucket in found.buckets) == pytest.approx(10.0)


def test_shared_beginnings_are_computed_once() -> None:
    """The second request shares 60 of its 100 tokens with an earlier one, and the third 80."""
    blocks = [Block(key=key, num_tokens=n) for key, n in (("a", 60), ("b", 20), ("c", 20))]
    requests = [
        Slot(index=0, at_s=0, prompt_tokens=100, output_tokens=5, blocks=(blocks[0], blocks[1])),
        Slot(index=1, at_s=1, prompt_tokens=100, output_tokens=5, blocks=(blocks[0], blocks[2])),
        Slot(index=2, at_s=2, prompt_tokens=100, output_tokens=5, blocks=(blocks[0], blocks[1])),
    ]
    shared = demand_of(requests, 0, SLO, 0.9, shares_prefixes=True)
    assert shared.whole.computed == pytest.approx((100 + 40 + 20) / 3)
    alone = demand_of(requests, 0, SLO, 0.9, shares_prefixes=False)
    assert alone.whole.computed == 100


def test_demands_without_a_rate_are_refused() -> None:
    at_once = [replace(slot, at_s=0.0) for slot in slots(10)]
    with pytest.raises(ConfigError, match="requests that arrive over some time; got 10 within 0 s"):
        demand_of(at_once, 0, SLO, 0.9, shares_prefixes=False)
    with pytest.raises(ConfigError, match=r"attainment must be in \(0, 1\), got 1"):
        demand_of(slots(10), 0, SLO, 1.0, shares_prefixes=False)


def test_fleets_are_parsed() -> None:
    h100, h20 = read_fleet("h100:4@2.50, h20:2", SHAPE, None)
    assert (h100.name, h100.num_devices, h100.price) == ("h100-sxm", 4, 2.5)
    assert (h20.num_devices, h20.price, h20.memory_bytes) == (2, 1.0, 96_000_000_000)
    for text, message in (
        ("h100", "fleet cannot be 'h100'"),
        ("h100:0", "fleet cannot be"),
        ("h100:4,h100:2", "names h100-sxm twice"),
        ("h100:2000", r"devices must be in \[1, 1024\], got 2000"),
        ("tpu:4", "device 'tpu' is neither"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_fleet(text, SHAPE, None)


def test_layouts_use_at_most_the_devices() -> None:
    (offer,) = read_fleet("h100:6", SHAPE, None)
    layouts = list(layouts_of(offer))
    assert max(layout.num_devices for layout in layouts) == 6
    assert {(1, 0, 4), (2, 4, 1), (1, 2, 4), (6, 0, 1)} <= {
        (x.num_attention, x.num_experts, x.num_shards) for x in layouts
    }
    assert all(layout.num_attention == 1 or layout.num_experts for layout in layouts_of(
        replace(offer, calibrated_shards=(1,))
    ))  # fmt: skip


def kinds_of(offers: tuple[Offer, ...], wanted: Demand) -> list[CellKind]:
    """Returns the best cell of one device for each offer."""
    return [
        replace(
            max(cells_of(replace(offer, num_devices=1), wanted), key=lambda k: k.capacity),
            offer=offer,
        )
        for offer in offers
    ]


def test_cells_keep_the_limits_and_serve_less_under_tighter_ones() -> None:
    (offer,) = read_fleet("h100:1", SHAPE, None)
    tight = replace(demand(), slo=Slo.parse("ttft=2s,tpot=15ms"))
    loose_cell, tight_cell = (
        max(cells_of(offer, each), key=lambda k: k.capacity) for each in (demand(), tight)
    )
    assert loose_cell.step_s <= 0.05 and tight_cell.step_s <= 0.015
    assert loose_cell.max_num_seqs > tight_cell.max_num_seqs > 0
    assert loose_cell.capacity > tight_cell.capacity


def test_equal_cells_are_as_few_as_the_load_allows() -> None:
    offers = read_fleet("h100:64", SHAPE, None)
    wanted = demand(400.0)
    (kind,) = kinds_of(offers, wanted)
    fleet = equal_cells(kind, wanted)
    assert fleet is not None
    num = fleet.groups[0].num_cells
    assert num * kind.capacity * LOAD >= wanted.whole.rate > (num - 1) * kind.capacity * LOAD
    assert equal_cells(replace(kind, capacity=1.0), wanted) is None, "64 devices do not suffice"


def test_packing_takes_the_cheaper_type_and_then_the_other() -> None:
    """H20 at a tenth of the price are cheaper per request, but there are only two of them."""
    offers = read_fleet("h100:64@2.50,h20:2@0.25", SHAPE, None)
    h100, h20 = (kind.capacity for kind in kinds_of(offers, demand()))
    little, wanted = demand(h20), demand(LOAD * (2 * h100 + h20 / 2))
    few = pack(kinds_of(offers, little), little)
    assert few is not None and few.name == "2 x replica on h20"
    fleet = pack(kinds_of(offers, wanted), wanted)
    assert fleet is not None and fleet.is_mixed
    for k in range(len(wanted.buckets)):
        assert sum(group.shares[k] for group in fleet.groups) == pytest.approx(1.0)
    dear = read_fleet("h100:64@2.50,h20:2@25", SHAPE, None)
    alike = pack(kinds_of(dear, wanted), wanted)
    assert alike is not None and not alike.is_mixed and alike.price < 64 * 2.5
    both = pack(kinds_of(dear, wanted), wanted, must_mix=True)
    assert both is not None and both.is_mixed and both.price > alike.price


def test_packing_says_that_devices_do_not_suffice() -> None:
    wanted = demand(4000.0)
    assert pack(kinds_of(read_fleet("h100:1,h20:1", SHAPE, None), wanted), wanted) is None
