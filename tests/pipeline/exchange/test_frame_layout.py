"""Both frame layouts on the CPU's links: sums, failures of either side, and foreign frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_serve.pipeline.exchange.frame_layout import CompactLayout, FrameLayout, MaskedLayout
from moe_serve.pipeline.frames.frame_header import Exchange, HeaderLog, WireError
from moe_serve.pipeline.links.data_group import DataGroup
from tests.support.pipeline.exchange_pair import (
    LAYERS,
    NUM_EXPERTS,
    expected,
    pair,
    routed,
    whole_step,
)

Make = Callable[[torch.device], FrameLayout]
LAYOUTS: dict[str, Make] = {
    "compact": CompactLayout,
    "staged": partial(CompactLayout, is_staged=True),
    "masked": MaskedLayout,
}
GROUPS: dict[str, Callable[..., DataGroup]] = {
    "shared": DataGroup,
    "gloo": partial(DataGroup, is_sharing=False),
}


@pytest.fixture(params=list(LAYOUTS))
def make_layout(request: pytest.FixtureRequest) -> Make:
    return LAYOUTS[request.param]


@pytest.mark.sampled
@pytest.mark.parametrize("link", list(GROUPS))
@pytest.mark.parametrize("num_experts", [1, 2, 4])
def test_sums(make_layout: Make, num_experts: int, link: str) -> None:
    with pair(make_layout, num_experts=num_experts, make_group=GROUPS[link]) as ranks:
        for number, rows in enumerate([[1], [5, 3], [130, 1, 7], [2, 2]]):
            whole_step(ranks, number, rows)


@pytest.mark.parametrize("link", list(GROUPS))
def test_an_attention_rank_that_fails_leaves_the_others_in_step(
    make_layout: Make, link: str
) -> None:
    with pair(make_layout, num_experts=2, make_group=GROUPS[link]) as ranks:
        transport = ranks.transport

        def fail() -> None:
            transport.dispatch(0, 0, routed(40, 1))
            transport.dispatch(0, 1, routed(3, 2))
            transport.combine(0, 0)
            transport.abandon()

        ranks.step(0, [40, 3], fail)
        whole_step(ranks, 1, [40, 3])


def test_an_expert_rank_that_fails_is_heard_of(make_layout: Make) -> None:
    """The failure is known by the end of the layer, or at the latest of the step."""
    with pair(make_layout, num_experts=2) as ranks:
        transport = ranks.transport
        ranks.stages[1].failing_layer = 1

        def act() -> None:
            for layer in LAYERS:
                transport.dispatch(layer, 0, routed(20, layer))
                transport.combine(layer, 0)
            transport.finish()

        def failing() -> None:
            with pytest.raises(WireError, match=r"step 0, layer 1.*expert-1 failed"):
                act()
            transport.abandon()

        ranks.step(0, [20], failing)
        assert ranks.loops[1].failure is not None
        assert "no such luck" in ranks.loops[1].failure
        ranks.stages[1].failing_layer = None
        whole_step(ranks, 1, [20, 1])


@pytest.mark.parametrize("link", list(GROUPS))
def test_what_is_foreseen_travels_with_the_rows(make_layout: Make, link: str) -> None:
    """Each micro-batch has its own; the last layer has none. A step that fails has no rows."""
    said = torch.tensor([7, 0, 255, 1], dtype=torch.uint8)
    with pair(
        make_layout, num_experts=2, make_group=GROUPS[link], num_foreseen=NUM_EXPERTS
    ) as ranks:
        transport = ranks.transport

        def act() -> None:
            for layer in LAYERS[:2]:
                for micro_batch, count in enumerate([30, 40]):
                    sent = routed(count, 5 * layer + micro_batch)
                    known = None if layer == 1 else said + micro_batch
                    transport.dispatch(layer, micro_batch, replace(sent, foreseen_E=known))
                    got = transport.combine(layer, micro_batch)
                    assert torch.equal(got, expected(layer, sent)), f"layer {layer}"
            transport.abandon()

        ranks.step(0, [30, 40], act)
        for stage in ranks.stages:
            known = [told for _, _, told in stage.foreseen if told is not None and any(told)]
            assert known == [[7, 0, 255, 1], [8, 1, 0, 2]], f"{stage.foreseen}"
            places = [(layer, micro_batch) for layer, micro_batch, _ in stage.foreseen]
            assert places == [(layer, micro_batch) for layer in LAYERS for micro_batch in (0, 1)]


def test_nothing_is_foreseen_where_nobody_says(make_layout: Make) -> None:
    with pair(make_layout, num_experts=1) as ranks:
        whole_step(ranks, 0, [3])
        assert ranks.stages[0].foreseen == []


def test_headers_are_checked_after_the_step() -> None:
    log = HeaderLog(torch.device("cpu"))
    exchanges = [Exchange(3, 9, layer, 0) for layer in LAYERS]
    log.begin(exchanges, 1)
    buffer = torch.zeros(256, dtype=torch.uint8)
    header = log.header(buffer)
    for exchange in exchanges[:2]:
        header.write(exchange, 4, 0)
        assert header.check(exchange, 4, "expert-0") == 4, "rows are those planned"
    log.check()
    assert header.check(exchanges[2], 4, "expert-0") == 4, "it is believed"
    with pytest.raises(WireError, match=r"layer 2.*expert-0 sent the frame of step 9, layer 1"):
        log.check()
    buffer[:64] = 0
    header.check(exchanges[2], 4, "expert-0")
    with pytest.raises(WireError, match="expert-0 sent data that is not a frame"):
        log.check()
    log.check()  # what was found is forgotten
