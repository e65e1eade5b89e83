"""An expert memory by hand: evictions, passes and errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from experts.memory.expert_memory import ExpertMemory
from experts.memory.memory_layer import MemoryLayer
from experts.memory.memory_policy import MemoryPolicy, MemoryPolicyName
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.reference.expert_mlp import routed_experts_reference
from moe_kernels.reference.torch_kernels import TorchKernels

NUM_LAYERS, NUM_EXPERTS, WIDTH = 3, 6, 8


class Store:
    """Random experts; those in `broken` cannot be read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def expert() -> ExpertWeights:
            return ExpertWeights(*torch.randn(3, WIDTH, WIDTH, generator=generator))

        self.experts = [[expert() for _ in range(NUM_EXPERTS)] for _ in range(NUM_LAYERS)]
        self.broken: set[tuple[int, int]] = set()
        self.read: list[tuple[int, int]] = []
        self.num_interrupts = 0

    def __call__(self, layer: int, expert: int) -> ExpertWeights:
        self.read.append((layer, expert))
        if self.num_interrupts:
            self.num_interrupts -= 1
            raise KeyboardInterrupt
        if (layer, expert) in self.broken:
            raise OSError(f"layers.{layer}.experts.{expert} cannot be read")
        return self.experts[layer][expert]


def memory_of(
    store: Store, num_slots: int, policy: MemoryPolicyName = "lru"
) -> tuple[ExpertMemory, list[MemoryLayer]]:
    sample = store.experts[0][0]
    slots = TorchKernels().expert_slots(
        sample, GatedActivation(), num_slots * sample.num_bytes, NUM_LAYERS * NUM_EXPERTS
    )
    assert slots.num_slots == num_slots, f"{slots.num_slots} slots"
    named = MemoryPolicy.named(policy)
    memory = ExpertMemory(slots, store, range(NUM_LAYERS), NUM_EXPERTS, named)
    return memory, [MemoryLayer(memory, i, range(NUM_EXPERTS)) for i in range(NUM_LAYERS)]


def run(layer: MemoryLayer, ids: Sequence[Sequence[int]]) -> Tensor:
    return layer.total(*rows(ids))


def rows(ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    ids_TK = torch.tensor(ids)
    generator = torch.Generator().manual_seed(2)
    x_TD = torch.randn(len(ids_TK), WIDTH, generator=generator)
    return x_TD, ids_TK, torch.rand(ids_TK.shape, generator=generator)


def test_lru_evicts_what_was_used_longest_ago() -> None:
    """Three slots hold 0, 1, 2, and 0 is used again; 3 takes the place of 1, and 1 that of 2."""
    store = Store()
    memory, (layer, *_) = memory_of(store, 3)
    for expert in (0, 1, 2, 0, 3, 1):
        run(layer, [[expert]])
    assert [expert for _, expert in store.read] == [0, 1, 2, 3, 1]
    run(layer, [[0, 3]])
    stats = memory.stats
    assert (stats.num_needed, stats.num_hits, stats.num_reads) == (8, 3, 5), f"{stats}"
    assert stats.resident_bytes == stats.budget_bytes == 3 * store.experts[0][0].num_bytes


def test_frequency_keeps_what_comes_again_and_again() -> None:
    """Expert 0 is used in every round, one of the others in between: LRU would lose 0 each time."""
    store = Store()
    _, (layer, *_) = memory_of(store, 2, "frequency")
    for turn in range(20):
        run(layer, [[0]])
        run(layer, [[1 + turn % 5]])
    assert store.read.count((0, 0)) == 1, "expert 0 stays"


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["lru", "frequency", "prefetch", "predicted", "next-layer"])
@pytest.mark.parametrize("num_slots", [2, 3, 7, 18])
def test_passes_change_no_bit(num_slots: int, policy: MemoryPolicyName) -> None:
    """A layer may need more experts than fit. The results equal those of the whole memory."""
    store, rng = Store(), np.random.default_rng(num_slots)
    _, whole = memory_of(store, NUM_LAYERS * NUM_EXPERTS)
    memory, layers = memory_of(store, num_slots, policy)
    for _ in range(12):
        for place, layer in enumerate(layers):
            count = int(rng.integers(1, 6))
            ids = np.sort([rng.choice(NUM_EXPERTS, 3, replace=False) for _ in range(count)])
            ids = np.where(rng.random(ids.shape) < 0.2, -1, ids).tolist()
            got_TD, want_TD = run(layer, ids), run(whole[place], ids)
            assert torch.equal(got_TD, want_TD), f"layer {place}, {num_slots} slots, {ids}"
            x_TD, ids_TK, weights_TK = rows(ids)
            weights_TK = weights_TK.where(ids_TK >= 0, 0.0)
            exact_TD = routed_experts_reference(
                x_TD, ids_TK.clamp(min=0), weights_TK, store.experts[place]
            )
            assert torch.allclose(got_TD.double(), exact_TD, atol=1e-3), f"layer {place}"
    stats = memory.stats
    assert stats.num_hits <= stats.num_needed and stats.num_row_hits <= stats.num_rows, f"{stats}"
    assert stats.num_passes >= stats.num_visits == 36, f"{stats}"
    memory.close()


def test_what_cannot_be_read_fails_its_step_alone() -> None:
    store = Store()
    store.broken = {(0, 2), (1, 1)}  # before there is a thread that fills empty slots
    memory, (layer, *_) = memory_of(store, 4, "prefetch")
    with pytest.raises(OSError, match=r"layers.0.experts.2 cannot"):
        run(layer, [[1, 2, 3]])
    want_TD = run(layer, [[1, 3]])
    assert want_TD.isfinite().all()
    store.broken.clear()
    assert run(layer, [[1, 2, 3]]).isfinite().all(), "it is tried again"
    memory.close()


def test_rows_for_strangers_are_a_bug_and_takeovers_come_and_go() -> None:
    memory, _ = memory_of(Store(), 2)
    memory.hold(0, range(NUM_EXPERTS), is_held=False)
    layer = MemoryLayer(memory, 0, [0, 1])
    with pytest.raises(AssertionError, match=r"experts \[4\], which are not here"):
        run(layer, [[0, 4]])

    def unread() -> None:
        raise AssertionError("a takeover reads nothing")

    layer.take(unread, [4, 5])  # type: ignore[arg-type]
    assert layer.held == {0, 1, 4, 5} and run(layer, [[0, 4]]).isfinite().all()
    with pytest.raises(AssertionError, match=r"experts \[1\] are held already"):
        layer.take(unread, [1, 2])  # type: ignore[arg-type]
    layer.drop_added()
    with pytest.raises(AssertionError, match=r"experts \[4\], which are not here"):
        run(layer, [[0, 4]])


def test_a_hint_is_read_ahead() -> None:
    """Experts of two layers are hinted, and the thread has read them when their rows come."""
    store = Store()
    memory, layers = memory_of(store, 4, "prefetch")
    for _ in range(30):  # history: experts 0 and 1 of layer 0, and no others
        run(layers[0], [[0, 1]])
    hint_LE = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    hint_LE[1, 2:4] = hint_LE[2, 4:6] = 1.0
    memory.hint(hint_LE)
    wanted, waited = {(1, 2), (1, 3), (2, 4), (2, 5)}, threading.Event()
    for _ in range(6000):
        if wanted <= set(store.read):
            break
        waited.wait(0.01)
    assert wanted <= set(store.read), f"read {store.read}"
    before = memory.stats
    run(layers[1], [[2, 3]])
    since = memory.stats - before
    assert since.num_needed == since.num_hits + since.num_late == since.num_prefetch_hits == 2
    memory.hint(None)
    memory.close()


def test_what_is_foreseen_is_read_ahead() -> None:
    """Foreseen experts of the next layer are read whatever their history, and counted when their
    rows come."""
    store = Store()
    memory, layers = memory_of(store, 4, "next-layer")
    for _ in range(30):  # four slots for these
        run(layers[0], [[0, 1]])
        run(layers[1], [[0, 1]])
    foreseen_E = np.array([0, 0, 255, 250, 100, 0], dtype=np.uint8)
    memory.foresee(0, 0, foreseen_E)
    run(layers[0], [[0, 1]])
    wanted, waited = {(1, 2), (1, 3)}, threading.Event()
    for _ in range(6000):
        if wanted <= set(store.read):
            break
        waited.wait(0.01)
    assert wanted <= set(store.read) and (1, 4) not in store.read, f"read {store.read}"
    before = memory.stats
    memory.foresee(1, 0, None)
    run(layers[1], [[2, 4]])
    since = memory.stats - before
    assert (since.num_foretold, since.num_foreseen) == (2, 1), f"{since}"
    assert since.num_prefetch_hits == since.num_hits + since.num_late == 1, f"{since}"
    memory.foresee(2, 0, np.zeros(NUM_EXPERTS, np.uint8))
    assert memory.stats.num_foretold == before.num_foretold + 2, "zeros say nothing"
    memory.close()


def test_others_do_not_listen() -> None:
    memory, layers = memory_of(Store(), 4, "predicted")
    for _ in range(2):
        memory.foresee(0, 0, np.full(NUM_EXPERTS, 255, np.uint8))
        run(layers[0], [[0]])
        memory.foresee(1, 0, None)
        run(layers[1], [[0]])
    assert memory.stats.num_foretold == 0
    memory.close()


def test_its_thread_ends_with_the_memory() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "expert-memory"}

    before = threads()  # of other tests, which may end meanwhile
    memory, layers = memory_of(Store(), 2, "predicted")
    run(layers[0], [[0, 1]])
    (own,) = threads() - before
    del memory, layers
    own.join(60)
    assert not own.is_alive(), "the thread keeps nothing alive"


def test_an_interrupted_read_leaves_no_slot_behind() -> None:
    """Ctrl-C interrupts the thread that runs stages while it reads."""
    store = Store()
    memory, (layer, *_) = memory_of(store, 2)
    expected = run(layer, [[0, 1]])
    store.num_interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        run(layer, [[2]])
    assert torch.equal(run(layer, [[0, 1]]), expected)
    run(layer, [[2]])
    assert memory.stats.resident_bytes == memory.stats.budget_bytes
