"""Additions of one bit per weight in the Triton set: the values of the torch set, and rows that do
not depend on each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.gpu.align.api import align
from moe_kernels.gpu.grouped_gemm.api import _places
from moe_kernels.interface.adapters import AdapterParts, AddingBank, LayerTune, RowAdditions
from moe_kernels.interface.kernels import ExpertBank, ExpertWeights, GatedActivation
from moe_kernels.interface.sign_matrix import SignedExpert
from moe_kernels.interface.signed_kernels import SignedBank, SignedKernels
from moe_kernels.kernel_choice import KernelsName, choose_kernels
from tests.support.kernels.kernel_sets import ids_of
from tests.support.kernels.signs import random, signed

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
NUM_EXPERTS, NUM_ROWS = 4, 9
OWNERS = np.array([0, 1, -1, 1, 0, -1, 1, 1, 0])
IDS = ids_of(NUM_ROWS, 2, NUM_EXPERTS, "any")


def kernels_of(name: KernelsName, dtype: torch.dtype, device: torch.device) -> SignedKernels:
    made = choose_kernels(device, dtype, name)
    assert isinstance(made, SignedKernels)
    return made


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_outputs", "width"), [(8, 20), (70, 64)])
def test_a_linear_layer(
    dtype: torch.dtype, num_outputs: int, width: int, device: torch.device, rows_are_alike: None
) -> None:
    weight = (random(num_outputs, width) / width**0.5).to(device, dtype)
    x, residual = (random(19, n, seed=n).to(device, dtype) for n in (width, num_outputs))
    for by_row in (False, True):
        added = signed(num_outputs, width, 3, by_row=by_row).to(device)
        found = {}
        for name in ("torch", "triton"):
            kernels = choose_kernels(device, dtype, name)
            assert isinstance(kernels, SignedKernels)
            layer = kernels.signed_linear(kernels.linear(weight), added)
            found[name] = layer(x, residual)
        out = found["triton"]
        assert torch.allclose(out, found["torch"], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        rows = [layer(x[i : i + 1], residual[i : i + 1]) for i in (0, 17)]
        assert torch.equal(torch.cat(rows), out[[0, 17]]), "a row depends on its batch"
        assert len(layer(x[:0], residual[:0])) == 0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_linear_layer_with_rows_of_many_adapters(
    dtype: torch.dtype, device: torch.device, rows_are_alike: None
) -> None:
    """One adapter has no signs here. Other rows keep their bits."""
    kernels = choose_kernels(device, dtype, "triton")
    assert isinstance(kernels, SignedKernels)
    base = kernels.linear((random(24, 36) / 6).to(device, dtype))
    layers = [
        kernels.signed_linear(base, signed(24, 36, seed, by_row=seed == 1).to(device))
        for seed in (1, 2)
    ]
    tunes = [LayerTune(signs={"qkv": layer}) for layer in layers]
    adapters = [[AdapterParts(tune=tune)] for tune in (tunes[0], None, tunes[1])]
    owners = np.array([2, 0, -1, 1, 0, 2, 2, -1, 0])
    x = random(len(owners), 36, seed=7).to(device, dtype)
    prepared = [kernels.adapters.adapter(each) for each in adapters]
    out = kernels.adapters.rows(owners, prepared).add(0, "qkv", x, base(x))
    alone = {0: layers[0](x), 2: layers[1](x)}
    for row, owner in enumerate(owners.tolist()):
        assert torch.equal(out[row], alone.get(owner, base(x))[row]), f"row {row} of {owner}"


def experts_of(width: int, hidden: int, dtype: torch.dtype) -> list[ExpertWeights]:
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    return [
        ExpertWeights(
            *((random(*s, seed=9 * e + i) / s[1] ** 0.5).to(dtype) for i, s in enumerate(shapes))
        )
        for e in range(NUM_EXPERTS)
    ]


def signs_of_experts(width: int, hidden: int) -> list[SignedExpert]:
    return [
        SignedExpert(
            gate=signed(hidden, width, 100 + e) if e % 2 else None,
            up=signed(hidden, width, 200 + e, by_row=e == 3),
            down=signed(width, hidden, 300 + e),
        )
        for e in range(NUM_EXPERTS)
    ]


def banks(
    kernels: SignedKernels, dtype: torch.dtype, width: int, hidden: int
) -> tuple[ExpertBank, list[object]]:
    """Returns a bank, and the additions of two adapters; the second changes half of the experts."""
    base = kernels.experts(experts_of(width, hidden, dtype), GatedActivation())  # type: ignore[attr-defined]
    added = signs_of_experts(width, hidden)
    is_changed = torch.tensor([True, False, False, True])
    first = kernels.expert_signs(dict(enumerate(added)), torch.ones(NUM_EXPERTS).bool())
    return base, [first, kernels.expert_signs({0: added[3], 3: added[1]}, is_changed)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_experts_in_one_pass(dtype: torch.dtype, rows_are_alike: None) -> None:
    """Rows of two adapters and of none: the values of torch, and the bits of each row alone."""
    width, hidden, cpu = 36, 20, torch.device("cpu")
    rows = random(NUM_ROWS, width, seed=5).to(dtype), IDS, torch.full((NUM_ROWS, 2), 0.5)
    out: dict[str, Tensor] = {}
    for name in ("torch", "triton"):
        base, signs = banks(kernels_of(name, dtype, cpu), dtype, width, hidden)
        assert isinstance(base, AddingBank)
        out[name] = base.added_partial(*rows, RowAdditions(OWNERS, signs))
    limit = TOLERANCE[dtype]
    assert torch.allclose(out["triton"], out["torch"], atol=limit, rtol=limit)
    alone = [*(SignedBank(base, each).partial(*rows) for each in signs), base.partial(*rows)]
    for row, owner in enumerate(OWNERS):
        assert torch.equal(out["triton"][row], alone[owner][row]), f"row {row} of {owner}"
    for row in (0, 2, 3):
        own = slice(row, row + 1)
        single = base.added_partial(*(t[own] for t in rows), RowAdditions(OWNERS[own], signs))
        assert torch.equal(single[0], out["triton"][row]), f"row {row} depends on its batch"


def test_an_addition_that_is_not_here() -> None:
    """A choice of an expert that the adapter changes elsewhere adds nothing: never the base's."""
    dtype, cpu = torch.float32, torch.device("cpu")
    kernels = kernels_of("triton", dtype, cpu)
    base, _ = banks(kernels, dtype, 32, 16)
    is_changed = torch.tensor([True, True, False, False])
    part = kernels.expert_signs({1: signs_of_experts(32, 16)[1]}, is_changed)
    ids = torch.tensor([[0, 1], [-1, 1], [0, -1]])
    x = random(1, 32, seed=5).expand(3, -1)
    assert isinstance(base, AddingBank)
    added = RowAdditions(np.array([0, 0, 0]), [part])
    out = base.added_partial(x, ids, torch.full((3, 2), 0.5), added)
    assert torch.equal(out[0], out[1])
    assert out[0].any() and not out[2].any()


def test_places_of_slots() -> None:
    alignment = align(torch.tensor([[0, 2], [1, 2], [2, 9]] * 20), 4, 16)
    places, slots = _places(alignment), alignment.sorted_slots
    assert slots is not None
    known = [slot for slot in range(120) if slot % 6 != 5]
    assert slots[places[known]].tolist() == known
