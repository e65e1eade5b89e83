"""Impossible problems are refused in one sentence with numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Device, Devices, even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.placement import Placement
from experts.placement.problem.plan_limits import Grouping, Move, Pin
from experts.placement.problem.problem import PlacementProblem


def loads_of(num_layers: int = 2, num_experts: int = 4) -> ExpertLoads:
    counts_LE = np.arange(1.0, 1 + num_layers * num_experts).reshape(num_layers, num_experts)
    return ExpertLoads(
        counts_SLE=counts_LE[None], layers=tuple(range(3, 3 + num_layers)), scenarios=("a",)
    )


def devices_of(*slots: int, memory: int | None = None, nodes: tuple[int, ...] = ()) -> Devices:
    return Devices(
        devices=tuple(
            Device(node=nodes[i] if nodes else 0, num_slots=count, memory_bytes=memory)
            for i, count in enumerate(slots)
        )
    )


def in_use(*ranks_of: tuple[int, ...]) -> Placement:
    return Placement(num_ranks=2, num_experts=4, ranks_of={3: ranks_of, 4: ranks_of})


HALVES = in_use((0,), (0,), (1,), (1,))

BAD: list[tuple[dict[str, Any], str]] = [
    ({"devices": devices_of(2, 1)}, r"3 slots on 2 devices cannot hold 4 experts: 1 more"),
    ({"devices": devices_of(5, 2)}, r"Device 0 has 5 slots, but there are only 4 experts"),
    ({"batch_size": 0}, r"batch_size must be 1 or more, got 0"),
    ({"top_k": 5}, r"top_k must be 1 to 4, the number of experts, got 5"),
    ({"balance": "activated"}, r"needs top_k"),
    (
        {"devices": devices_of(2, 2, memory=10)},
        r"Device 0 is limited to 10 bytes .* bytes_per_expert",
    ),
    ({"bytes_per_expert": 0}, r"bytes_per_expert must be 1 or more, got 0"),
    (
        {"devices": devices_of(2, 2, memory=39), "bytes_per_expert": 10},
        r"Device 0 needs 40 bytes for 2 slots in 2 layers of 10 bytes each, but has 39: give it 1",
    ),
    (
        {"devices": devices_of(2, 2, memory=39), "bytes_per_expert": 10, "fill": False},
        r"memory holds 6 copies of 10 bytes, but 4 experts in 2 layers need 8",
    ),
    (
        {"pins": (Pin(expert=0, device=2),)},
        r"expert 0 on device 2 in every layer: devices are 0 to 1",
    ),
    ({"pins": (Pin(expert=4, device=0),)}, r"expert 4 on device 0 .* experts are 0 to 3"),
    (
        {"pins": (Pin(expert=0, device=0, layer=9),)},
        r"in layer 9: the layer must be one of the 2 layers of the loads, 3 to 4",
    ),
    (
        {"pins": tuple(Pin(expert=e, device=1, layer=4) for e in (0, 1, 2))},
        r"Layer 4 pins 3 experts to device 1, which has 2 slots",
    ),
    (
        {"pins": (Pin(expert=0, device=0), Pin(expert=0, device=1))},
        r"Layer 3 has 4 slots but needs 5: 2 pinned copies and one of each other expert",
    ),
    (
        {"grouping": Grouping(num_groups=3)},
        r"num_groups .* must divide the 4 experts of a layer, got 3",
    ),
    (
        {"grouping": Grouping(num_groups=2, max_nodes_per_group=0)},
        r"max_nodes_per_group .* must be 1 or more, got 0",
    ),
    (
        {"devices": devices_of(3, 1, nodes=(0, 1)), "grouping": Grouping(num_groups=2)},
        r"Nodes of \[3, 1\] slots hold 1 whole groups of 2 experts, but there are 2",
    ),
    (
        {
            "devices": devices_of(2, 2, nodes=(0, 1)),
            "grouping": Grouping(num_groups=2),
            "pins": (Pin(expert=0, device=0, layer=3), Pin(expert=1, device=1, layer=3)),
        },
        r"Layer 3 pins experts of group 0 to nodes \[0, 1\], but max_nodes_per_group is 1",
    ),
    (
        {"move": Move(current=HALVES, max_copies_per_layer=-1)},
        r"max_copies_per_layer .* must be 0 or more, got -1",
    ),
    ({"move": Move(current=in_use((0,), (0,), (0,), (1,)))}, r"3 experts on device 0 in layer 3"),
    ({"move": Move(current=in_use((0,), (0,), (1,), ()))}, r"expert on no device in layer 3"),
    (
        {
            "devices": devices_of(3, 3),
            "move": Move(current=HALVES, max_copies_per_layer=1),
        },
        r"Layer 3 must get 2 copies \(0 pinned, 2 in slots to fill\), but max_copies_per_layer",
    ),
    (
        {
            "pins": (Pin(expert=3, device=0),),
            "move": Move(current=HALVES, max_copies_per_layer=0),
        },
        r"must get 1 copies \(1 pinned",
    ),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words[:30] for _, words in BAD])
def test_refused_with_the_numbers(change: dict[str, Any], words: str) -> None:
    parts: dict[str, Any] = {"loads": loads_of(), "devices": devices_of(2, 2)} | change
    with pytest.raises(PlacementError, match=words) as caught:
        PlacementProblem(**parts)
    assert str(caught.value).count("\n") == 0


def test_counts_that_are_none_are_refused() -> None:
    for bad, words in ((np.nan, "not a finite number"), (-1.0, "negative")):
        counts_SLE = np.ones((1, 1, 3))
        counts_SLE[0, 0, 2] = bad
        with pytest.raises(PlacementError, match=f"1 loads are {words}.*expert 2 in layer 7 of x"):
            ExpertLoads(counts_SLE=counts_SLE, layers=(7,), scenarios=("x",))


def test_counts_beyond_what_adds_up_are_refused() -> None:
    counts_SLE = np.full((1, 2, 3), 1.0)
    counts_SLE[0, 1] = 1e308
    with pytest.raises(PlacementError, match="loads of layer 9 of x add up to more than 1.8e"):
        ExpertLoads(counts_SLE=counts_SLE, layers=(7, 9), scenarios=("x",))


def test_memory_is_shared_over_the_layers() -> None:
    """5 copies for two layers: the layer with the hotter expert gets 3."""
    counts_SLE = np.array([[[1.0, 1, 1], [1.0, 1, 8]]])
    loads = ExpertLoads(counts_SLE=counts_SLE, layers=(0, 1), scenarios=("a",))
    problem = PlacementProblem(
        loads=loads,
        devices=Devices(
            devices=(
                Device(node=0, num_slots=3, memory_bytes=50),
                Device(node=0, num_slots=3, memory_bytes=10),
            )
        ),
        bytes_per_expert=10,
        fill=False,
    )
    slots_LD = problem.slots_by_layer()
    assert slots_LD.tolist() == [[2, 1], [3, 0]]


def test_slots_must_divide() -> None:
    with pytest.raises(PlacementError, match="9 slots .* 2 devices: remove 1 or add 1"):
        even_devices(2, 1, 9)
