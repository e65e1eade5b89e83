"""Experts that move in and out of slots give the bits of a bank that holds them for good."""

from __future__ import annotations

from collections.abc import KeysView

import pytest
import torch

from experts.expert_layer import LayerBanks
from experts.memory.slot_table import ExpertKey
from experts.slot_room import SlotRoom
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation, Kernels
from moe_kernels.kernel_choice import choose_kernels

LAYERS, E, D, F, T, K = (1, 3), 6, 32, 32, 20, 2


def expert(seed: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    return ExpertWeights(matrix(F, D), matrix(F, D), matrix(D, F))


WEIGHTS = {(layer, e): expert(10 * layer + e) for layer in LAYERS for e in range(E)}


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose_kernels(torch.device("cpu"), torch.float32, request.param, 1)


def rows(held: set[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x, choices of held experts or -1, and weights."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(T, D, generator=generator)
    some = torch.tensor([*sorted(held), -1])
    ids_TK = some[torch.randint(len(some), (T, K), generator=generator)]
    return x_TD, ids_TK, torch.rand(T, K, generator=generator)


def test_the_same_bits_before_and_after_switches(kernels: Kernels) -> None:
    activation = GatedActivation()
    room = SlotRoom(kernels.expert_slots(WEIGHTS[1, 0], activation, 2**62, 8), LAYERS, E)
    banks = {layer: LayerBanks(E, D, torch.device("cpu")) for layer in LAYERS}
    held = {1: {0, 1, 2}, 3: {3, 4, 5}}
    for layer, ids in held.items():
        for e in ids:
            room.stage(layer, e, WEIGHTS[layer, e])
    room.switch(held)
    for layer, ids in held.items():
        banks[layer].put_room(room.banks[layer], ids)

    def check(now: dict[int, set[int]]) -> None:
        for layer, ids in now.items():
            whole = kernels.experts([WEIGHTS[layer, e] for e in range(E)], activation)
            given = rows(ids)
            assert torch.equal(banks[layer].partial(*given), whole.partial(*given))
            assert torch.equal(banks[layer].total(*given), whole(*given))
            assert banks[layer].held == ids
        room.check_integrity()

    check(held)
    for changes in ({1: {0, 1, 4}}, {1: {5, 4}, 3: {0, 3, 4, 5}}, {3: {0}}):
        for layer, ids in changes.items():
            for e in ids - held[layer]:
                room.stage(layer, e, WEIGHTS[layer, e])
        check(held)  # what is staged changes nothing
        room.switch(changes)
        for layer, ids in changes.items():
            banks[layer].own(ids)
        held |= changes
        check(held)
    assert room.num_free == 8 - sum(map(len, held.values()))


def test_dropped_and_missing(kernels: Kernels) -> None:
    room = SlotRoom(kernels.expert_slots(WEIGHTS[1, 0], GatedActivation(), 2**62, 2), LAYERS, E)
    room.stage(1, 0, WEIGHTS[1, 0])
    room.stage(1, 1, WEIGHTS[1, 1])
    with pytest.raises(AssertionError, match="no slot of 2 is free"):
        room.stage(1, 2, WEIGHTS[1, 2])
    room.drop_staged()
    assert room.num_free == 2
    with pytest.raises(AssertionError, match="1 experts are not here"):
        room.switch({1: {0}})
    room.check_integrity()


def test_a_switch_looks_at_what_is_staged_under_the_lock(kernels: Kernels) -> None:
    """Another thread may stage an expert, and a dictionary that grows while it is read raises."""
    room = SlotRoom(kernels.expert_slots(WEIGHTS[1, 0], GatedActivation(), 2**62, 2), LAYERS, E)
    looks = list[bool]()

    class Watched(dict[ExpertKey, int]):
        def keys(self) -> KeysView[ExpertKey]:  # type: ignore[override]
            looks.append(room._lock.locked())
            return super().keys()

    room._staged = Watched()
    room.stage(1, 0, WEIGHTS[1, 0])
    room.switch({1: {0}})
    assert looks and all(looks)
    room.check_integrity()


def test_taken_over_and_given_back(kernels: Kernels) -> None:
    """A lost rank's experts are in a bank of their own, and a switch gives them back."""
    activation = GatedActivation()
    room = SlotRoom(kernels.expert_slots(WEIGHTS[1, 0], activation, 2**62, 2), (1,), E)
    banks = LayerBanks(E, D, torch.device("cpu"))
    room.stage(1, 0, WEIGHTS[1, 0])
    room.switch({1: {0}})
    banks.put_room(room.banks[1], {0})
    only = [WEIGHTS[1, e] if e == 4 else None for e in range(E)]
    banks.take(lambda: kernels.experts(only, activation), {4})
    whole = kernels.experts([WEIGHTS[1, e] for e in range(E)], activation)
    given = rows({0, 4})
    assert torch.equal(banks.partial(*given), whole.partial(*given))
    room.stage(1, 3, WEIGHTS[1, 3])
    room.switch({1: {3}})
    banks.own({3})
    given = rows({3})
    assert banks.held == {3} and torch.equal(banks.partial(*given), whole.partial(*given))
