"""The adapters of a micro-batch: the rows that have one, and its additions to each layer.

An adapter never changes rows of others. Its addition to a row depends on that row alone, because
the kernel set computes all products. T rows, R rows with an adapter, K inputs, N outputs, E
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.expert_stage import RoutedRows
from experts.virtual_experts import AdapterExperts
from moe_kernels.interface.adapters import (
    AdaptedRows,
    AdapterKernels,
    AdapterParts,
    LowRank,
    RowAdditions,
)
from moe_kernels.interface.kernels import ExpertBank, RouterLinear
from moe_kernels.interface.routing import RouterShape
from moe_serve.model.step_plan import MicroBatch

AdapterKind = Literal["lora", "esft", "bitdelta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayer:
    """The parts of one layer. `linears` are keyed by the field of the attention: qkv, output,
    and of latent attention query_down, query, latent and output."""

    linears: Mapping[str, LowRank]
    experts: AdapterExperts | None = None
    mlp: ExpertBank | None = None  # in place of the shared expert, or of a dense layer's MLP
    mlp_additions: Any | None = None  # or an addition to the base model's, from AdapterKernels
    gate: RouterLinear | None = None  # of that shared expert; None: the base model's

    @property
    def parts(self) -> AdapterParts:
        """The same for the kernels."""
        own = self.experts
        return AdapterParts(
            linears=self.linears,
            own=None if own is None else own.bank,
            additions=None if own is None else own.additions,
            mlp=self.mlp,
            mlp_additions=self.mlp_additions,
        )


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, for weak references
class AdapterWeights:
    """The weights of one adapter, or the part of them that this process holds. They never change.
    `digest` identifies their content.
    """

    digest: bytes
    layers: tuple[AdapterLayer, ...]
    num_bytes: int
    kind: AdapterKind
    rank: int  # the largest of a LoRA; 0: it has none
    number: int = 0  # among the adapters of ranks, for virtual expert ids
    prepared: Any = None  # by the kernels, for `AdapterKernels.rows`; None: they have no such rows


class LoadedAdapters(Protocol):
    """The adapters that steps may use."""

    def weights(self, digest: bytes) -> AdapterWeights:
        """Returns the weights of the adapter that a slice names. A running request keeps them in
        memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a micro-batch that have one adapter: a run of rows, or int64 numbers of rows;
    None: all of them."""

    rows: slice | Tensor | None
    adapter: AdapterWeights

    def select(self, x_T: Tensor) -> Tensor:
        """Returns the group's rows of a tensor, which may be a view."""
        if self.rows is None:
            return x_T
        return x_T[self.rows] if isinstance(self.rows, slice) else x_T.index_select(0, self.rows)

    def put(self, x_T: Tensor, own_R: Tensor) -> Tensor:
        """Returns a tensor with the group's rows replaced. May write to `x_T`."""
        if self.rows is None:
            return own_R
        if isinstance(self.rows, slice):
            x_T[self.rows] = own_R
            return x_T
        return x_T.index_copy_(0, self.rows, own_R)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows of a group, and the experts that they have in place of the base model's."""

    group: RowGroup
    experts: AdapterExperts


@dataclass(frozen=True, slots=True)
class LayerAdditions:
    """The additions to one layer of a micro-batch. `to_mlp`: those to a shared expert, or to a
    dense layer's MLP; None: there are none. `rows`: all adapters, as the kernels take them; None:
    they have no such rows, and none of the adapters is a fine-tune."""

    groups: tuple[tuple[RowGroup, AdapterLayer], ...]
    to_mlp: RowAdditions | None = None
    rows: AdaptedRows | None = None
    layer: int = 0

    def linear(self, key: str, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """Adds to the result of a linear layer, which is overwritten."""
        if self.rows is not None:
            return self.rows.add(self.layer, key, x_TK, y_TN)
        for group, layer in self.groups:
            low_rank = layer.linears.get(key)
            if low_rank is not None:
                own = low_rank.added(group.select(x_TK), group.select(y_TN))
                y_TN = group.put(y_TN, own)
        return y_TN

    def normed(self, norm: str, x_TD: Tensor, y_TD: Tensor, eps: float) -> Tensor:
        """Returns normed rows, those of fine-tunes with their own norms. See AdaptedRows."""
        rows = self.rows
        return y_TD if rows is None else rows.normed(self.layer, norm, x_TD, y_TD, eps)

    def lifted(self, up: str, x_THK: Tensor, y_THN: Tensor) -> Tensor:
        """Returns the result of an up-projection, that of fine-tunes with their own ones."""
        rows = self.rows
        return y_THN if rows is None else rows.lifted(self.layer, up, x_THK, y_THN)

    def planned(
        self, plan: Any, norms: tuple[Tensor | None, Tensor | None], sinks_H: Tensor | None = None
    ) -> Any:
        """Returns a plan of attention with the norms and sinks of fine-tunes. See AdaptedRows."""
        rows = self.rows
        return plan if rows is None else rows.planned(self.layer, plan, norms, sinks_H)

    def routed(self, shape: RouterShape, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Replaces the choices of fine-tunes with their own routers."""
        if self.rows is not None:
            self.rows.routed(self.layer, shape, x_TD, ids_TK, weights_TK)

    @property
    def experts(self) -> tuple[ExpertRows, ...]:
        """The groups with experts of their own."""
        return tuple(
            ExpertRows(group, layer.experts)
            for group, layer in self.groups
            if layer.experts is not None
        )

    @property
    def mlps(self) -> tuple[tuple[RowGroup, AdapterLayer], ...]:
        """The groups with a shared expert, or an MLP of a dense layer, of their own."""
        return tuple(each for each in self.groups if each[1].mlp is not None)


class AdapterRows:
    """The adapters of a micro-batch's rows: as groups, and as the kernels take them.

    `prepared`: the latter; None: the kernels have no such rows.
    """

    def __init__(
        self,
        index_T: NDArray[np.int64],
        adapters: Sequence[AdapterWeights],
        kernels: AdapterKernels | None,
        device: torch.device,
    ) -> None:
        """`index_T`: the number of each row's adapter among `adapters`, or -1."""
        self._index_T, self._adapters, self._device = index_T, adapters, device
        self._groups: tuple[RowGroup, ...] | None = None
        prepared = [each.prepared for each in adapters]
        self.prepared: AdaptedRows | None = None
        if kernels is not None and None not in prepared:
            self.prepared = kernels.rows(index_T, prepared)

    @property
    def groups(self) -> tuple[RowGroup, ...]:
        """The groups, which a step that is one call never needs."""
        if self._groups is None:
            self._groups = tuple(self._group(*item) for item in enumerate(self._adapters))
        return self._groups

    def _group(self, index: int, adapter: AdapterWeights) -> RowGroup:
        rows = np.flatnonzero(self._index_T == index)
        return RowGroup(_as_rows(rows, len(self._index_T), self._device), adapter)

    def layer(self, layer: int) -> LayerAdditions:
        """Returns what the adapters add to a layer."""
        groups = tuple((group, group.adapter.layers[layer]) for group in self.groups)
        found = [each.layers[layer].mlp_additions for each in self._adapters]
        to_mlp = RowAdditions.of(self._index_T, found)
        return LayerAdditions(groups, to_mlp, self.prepared, layer)

    def to_experts(self, layer: int) -> RowAdditions | None:
        """Returns the additions to a layer's routed experts; None: there are none."""
        experts = [each.layers[layer].experts for each in self._adapters]
        found = [None if each is None else each.additions for each in experts]
        return RowAdditions.of(self._index_T, found)


def adapter_rows(
    batch: MicroBatch,
    adapters: LoadedAdapters,
    kernels: AdapterKernels | None,
    device: torch.device,
) -> AdapterRows | None:
    """Finds the adapters of a micro-batch's rows; None: no row has one."""
    numbers = {b"": -1}
    for piece in batch.slices:
        numbers.setdefault(piece.adapter, len(numbers) - 1)
    if len(numbers) == 1:
        return None
    of_slices = [numbers[piece.adapter] for piece in batch.slices]
    counts = [len(piece.token_ids) for piece in batch.slices]
    index_T = np.repeat(np.array(of_slices, dtype=np.int64), counts)
    held = [adapters.weights(digest) for digest in numbers if digest]
    return AdapterRows(index_T, held, kernels, device)


def _as_rows(rows: NDArray[np.int64], num_rows: int, device: torch.device) -> slice | Tensor | None:
    """Returns ascending numbers of rows in the cheapest form."""
    if len(rows) == num_rows:
        return None
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else torch.from_numpy(rows).to(device)


def with_virtual_ids(
    rows: RoutedRows, adapted: Sequence[ExpertRows], num_experts: int
) -> RoutedRows:
    """Returns rows for expert ranks, in which the choices [T, K choices] of adapters' own experts
    have virtual ids (`experts/virtual_experts.py`)."""
    ids_TK = rows.expert_ids_TK
    own_AE = torch.stack([each.experts.is_own_E for each in adapted])
    numbers = [each.group.adapter.number for each in adapted]
    index_T = ids_TK.new_full((len(ids_TK),), -1)
    for index, each in enumerate(adapted):
        index_T = each.group.put(index_T, torch.full_like(each.group.select(index_T), index))
    is_own_TK = own_AE[index_T[:, None], ids_TK] & (index_T >= 0)[:, None]
    first_T = num_experts * torch.tensor(numbers, device=ids_TK.device)[index_T]
    return replace(rows, expert_ids_TK=torch.where(is_own_TK, ids_TK + first_T[:, None], ids_TK))


def adapter_numbers(ids_TK: Tensor, adapted: Sequence[ExpertRows]) -> Tensor:
    """Returns the number of each row's adapter [T, K] in place of its choices, for expert ranks
    that route; 0: the row has none."""
    numbers_TK = torch.zeros_like(ids_TK)
    for each in adapted:
        group = each.group
        number = torch.full_like(group.select(numbers_TK), group.adapter.number)
        numbers_TK = group.put(numbers_TK, number)
    return numbers_TK
