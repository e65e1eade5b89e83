"""The additions of adapters to experts, in each set of kernels, beside the definition in fp64.

T rows, K choices per row, E experts, D model width, F expert width, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.adapters import AddingBank, Addition, ExpertAddition, RowAdditions
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation, Kernels
from moe_kernels.kernel_choice import KernelsName
from moe_kernels.reference.expert_mlp import routed_experts_reference
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels

E, K, D, F, T = 6, 2, 72, 40, 37
DTYPES = [torch.float32, torch.bfloat16]
Adapter = Mapping[int, ExpertAddition]


class Sample:
    """Random experts with biases, rows, and three adapters: of all experts with ranks of their own
    for each part, of two experts of which one shares A, and of one part of one expert."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(7), dtype
        sizes = ((F, D), (F, D), (D, F), (F,), (F,), (D,))
        self.weights = [ExpertWeights(*(self.random(*size) for size in sizes)) for _ in range(E)]
        self.x_TD = self.random(T, D)
        scores_TE = torch.rand(T, E, generator=self.generator)
        self.ids_TK = scores_TE.topk(K).indices.sort(dim=1).values
        self.ids_TK[3, 0] = self.ids_TK[5, 1] = -1
        self.weights_TK = torch.rand(T, K, generator=self.generator)
        shared = self.random(3, D)
        self.adapters: list[Adapter] = [
            {
                expert: ExpertAddition(
                    gate=self.addition(3, F, D),
                    up=self.addition(5, F, D),
                    down=self.addition(2, D, F),
                )
                for expert in range(E)
            },
            {
                1: ExpertAddition(
                    gate=Addition(shared, self.random(F, 3)), up=Addition(shared, self.random(F, 3))
                ),
                2: ExpertAddition(down=self.addition(20, D, F)),
            },
            {4: ExpertAddition(up=self.addition(17, F, D))},
        ]
        self.index_T = np.arange(T, dtype=np.int64) % 4 - 1  # each fourth row has none

    def random(self, *size: int) -> Tensor:
        return (0.3 * torch.randn(*size, generator=self.generator)).to(self.dtype)

    def addition(self, rank: int, num_outputs: int, num_inputs: int) -> Addition:
        return Addition(self.random(rank, num_inputs), self.random(num_outputs, rank))

    def sums(
        self,
        kernels: Kernels,
        held: Sequence[int] = range(E),
        rows: slice = slice(None),
    ) -> Tensor:
        """Returns the sums of a bank with some of the experts, and of their additions."""
        bank = kernels.experts(
            [each if e in held else None for e, each in enumerate(self.weights)], GatedActivation()
        )
        additions = RowAdditions(self.index_T[rows], prepared(kernels, self.adapters, held))
        ids_TK = torch.where(torch.isin(self.ids_TK, torch.tensor(held)), self.ids_TK, -1)
        assert isinstance(bank, AddingBank)
        return bank.added_partial(self.x_TD[rows], ids_TK[rows], self.weights_TK[rows], additions)


def prepared(kernels: Kernels, adapters: Sequence[Adapter], held: Sequence[int]) -> list[object]:
    return [
        kernels.adapters.expert_additions(
            {e: each for e, each in adapter.items() if e in held},
            torch.tensor([e in adapter for e in range(E)]),
        )
        for adapter in adapters
    ]


def merged(weights: Sequence[ExpertWeights], adapter: Adapter) -> list[ExpertWeights]:
    """Returns the experts with the additions, in fp64."""
    found = []
    for expert, each in enumerate(weights):
        own = adapter.get(expert, ExpertAddition())
        matrices = [
            weight.double() + (0 if part is None else part.b_NR.double() @ part.a_RK.double())
            for weight, part in ((each.gate, own.gate), (each.up, own.up), (each.down, own.down))
            if isinstance(weight, Tensor)
        ]
        gate, up, down = matrices
        found.append(ExpertWeights(gate, up, down, each.gate_bias, each.up_bias, each.down_bias))
    return found


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_the_merged_experts(name: KernelsName, dtype: torch.dtype) -> None:
    sample = Sample(dtype)
    found_TD = sample.sums(make_kernels(name, dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for index in (-1, 0, 1, 2):
        weights = merged(sample.weights, {} if index < 0 else sample.adapters[index])
        is_its_T = torch.from_numpy(sample.index_T == index)
        rows = sample.x_TD[is_its_T], sample.ids_TK[is_its_T], sample.weights_TK[is_its_T]
        wanted_RD = routed_experts_reference(*without_absent(*rows), weights)
        assert (found_TD[is_its_T] - wanted_RD).abs().max() < tolerance, f"{name}, {index=}"


def without_absent(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference knows no id -1: such a choice gets the weight 0."""
    return x_TD, ids_TK.clamp(min=0), weights_TK.where(ids_TK >= 0, 0.0)


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_in_every_batch_and_layout(
    name: KernelsName, dtype: torch.dtype
) -> None:
    sample, kernels = Sample(dtype), make_kernels(name, dtype)
    whole_TD = sample.sums(kernels)
    for row in range(0, T, 5):
        alone = sample.sums(kernels, rows=slice(row, row + 1))
        assert torch.equal(alone[0], whole_TD[row]), f"{name}, {row=}"
    parts = [sample.sums(kernels, held) for held in ((0, 2, 5), (1, 3, 4))]
    assert torch.equal(parts[0] + parts[1], whole_TD), f"{name}: two ranks"
    bank = kernels.experts(sample.weights, GatedActivation())
    plain_TD = bank.partial(sample.x_TD, sample.ids_TK, sample.weights_TK)
    is_base_T = torch.from_numpy(sample.index_T < 0)
    assert torch.equal(plain_TD[is_base_T], whole_TD[is_base_T]), f"{name}: rows without an adapter"


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_an_addition_that_is_not_here_is_an_error(name: KernelsName) -> None:
    """It must not pass as the base model's expert."""
    sample, kernels = Sample(torch.float32), make_kernels(name, torch.float32)
    bank = kernels.experts(sample.weights, GatedActivation())
    is_changed_E = torch.ones(E, dtype=torch.bool)
    lacking = kernels.adapters.expert_additions({0: sample.adapters[0][0]}, is_changed_E)
    index_T: NDArray[np.int64] = np.zeros(T, dtype=np.int64)
    assert isinstance(bank, AddingBank)
    rows = sample.x_TD, sample.ids_TK, sample.weights_TK
    with pytest.raises(AssertionError, match="which this rank does not hold"):
        bank.added_partial(*rows, RowAdditions(index_T, [lacking]))


def test_adapters_without_additions_are_left_out() -> None:
    index_T = np.array([0, -1, 1, 2])
    found = RowAdditions.of(index_T, [None, "a", "b"])
    assert found is not None and found.index_T.tolist() == [-1, -1, 0, 1]
    assert found.additions == ["a", "b"]
    assert RowAdditions.of(index_T, [None, None, None]) is None
