"""The experts of adapters on a rank, beside those of the base model, by virtual id.

    virtual id = number * E + e      expert e of the adapter with this number; 0: the base model

Virtual ids take the place of expert ids between ranks, so messages have the size that they have
without adapters. T rows, n of them with an adapter, K choices, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.expert_layer import ExpertLayer
from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.interface.kernels import ExpertBank

MAX_VIRTUAL_ID = 2**31 - 1  # ids are int32 between ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExperts:
    """The experts of a layer that an adapter replaces, or adds to.

    At most one of `bank` and `additions` is set; neither, if other ranks have all that it changes.
    """

    bank: ExpertBank | None  # those in place of the base model's that are held here
    is_own_E: Tensor  # bool [E + 1]: those that it changes; the last entry is for id -1
    additions: Any | None = None  # to those that are held here, from AdapterKernels


class MissingAdapterError(KeyError):
    """Rows came for an adapter that this rank has not loaded."""

    def __str__(self) -> str:
        return str(self.args[0])


class VirtualExperts:
    """The experts of all adapters that a rank holds. One thread uses them; any thread may put and
    drop adapters."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._layers: dict[int, Mapping[int, AdapterExperts]] = {}  # number -> layer

    def put(self, number: int, layers: Mapping[int, AdapterExperts]) -> None:
        """Takes the experts of an adapter, by layer; another set of them is replaced."""
        self._layers[number] = layers

    def drop(self, number: int) -> None:
        """Releases the experts of an adapter."""
        self._layers.pop(number, None)

    def virtual_ids(self, layer: int, ids_TK: Tensor, numbers_T: Tensor) -> Tensor:
        """Returns the virtual ids of choices that were made here. `numbers_T`: the adapter of each
        row; 0 or less: none.

        All choices of an adapter that is not loaded get one, so that `partial` fails for them.
        """
        first_TK = torch.zeros_like(ids_TK)
        for number in numbers_T.unique().tolist():
            layers = self._layers.get(number)
            own = None if layers is None else layers.get(layer)
            if number > 0 and (layers is None or own is not None):
                is_its_TK = (numbers_T == number)[:, None].expand_as(ids_TK)
                if own is not None:
                    is_its_TK = is_its_TK & own.is_own_E[ids_TK]
                first_TK[is_its_TK] = number * self._num_experts
        return ids_TK + first_TK

    def partial(
        self, layer: int, base: ExpertLayer, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """Returns the sums [T, D] in fp64 over the experts held here, those of `base` included; id
        -1 marks a choice held elsewhere.

        Raises MissingAdapterError.
        """
        num_experts = self._num_experts
        if not len(ids_TK) or int(ids_TK.max()) < num_experts:
            return base.partial(x_TD, ids_TK, weights_TK)
        numbers_TK = ids_TK // num_experts
        numbers = [number for number in numbers_TK.unique().tolist() if number > 0]
        held = [self._held(number, layer) for number in numbers]
        base_TK = torch.where(ids_TK < num_experts, ids_TK, ids_TK % num_experts)
        parts = list[tuple[Tensor, Tensor]]()
        for number, own in zip(numbers, held, strict=True):
            if own.bank is not None:
                is_its_TK = numbers_TK == number
                base_TK[is_its_TK] = -1
                rows_n = is_its_TK.any(dim=1).nonzero()[:, 0]
                own_nK = torch.where(is_its_TK, ids_TK - number * num_experts, -1)[rows_n]
                parts.append((rows_n, own.bank.partial(x_TD[rows_n], own_nK, weights_TK[rows_n])))
        owners_T = numbers_TK.amax(dim=1).cpu().numpy()  # a row has one adapter
        index_T = np.where(owners_T > 0, np.searchsorted(numbers, owners_T), -1)
        additions = RowAdditions.of(index_T, [own.additions for own in held])
        sum_TD = base.partial(x_TD, base_TK, weights_TK, additions)
        for rows_n, part_nD in parts:
            sum_TD.index_add_(0, rows_n, part_nD)
        return sum_TD

    def _held(self, number: int, layer: int) -> AdapterExperts:
        layers = self._layers.get(number)
        if layers is None:
            raise MissingAdapterError(f"adapter {number} is not loaded on this rank")
        own = layers.get(layer)
        if own is None or (own.bank is None and own.additions is None):
            raise MissingAdapterError(
                f"adapter {number} has no experts of layer {layer} on this rank"
            )
        return own
