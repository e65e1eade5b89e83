"""The adapters of a micro-batch: which rows have one, and what it adds to each layer for them.

An adapter never touches a row that is not its own. What it adds to a row depends on that row alone,
as all products are those of the kernel set. T rows, R rows with an adapter, K inputs, N outputs, E
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.virtual_experts import AdapterExperts
from moe_kernels.interface.kernels import ExpertBank, Linear
from moe_serve.model.step_plan import MicroBatch

AdapterKind = Literal["lora", "esft", "bitdelta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """An addition to a linear layer: (x A^T) B^T, of which B contains the scale. Sums are in fp32;
    x A^T is rounded to the model's dtype, as in PEFT."""

    a: Linear
    b: Linear

    def added(self, x_RK: Tensor, y_RN: Tensor) -> Tensor:
        """Returns y and the addition, rounded to y's dtype."""
        return self.b(self.a(x_RK), y_RN)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayer:
    """The parts of one layer. `linears` are keyed by the field of the attention: qkv, output,
    and of latent attention query_down, query, latent and output."""

    linears: Mapping[str, LowRank]
    experts: AdapterExperts | None = None
    mlp: ExpertBank | None = None  # in place of the shared expert, or of a dense layer's MLP


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, for weak references
class AdapterWeights:
    """The weights of one adapter, or the part of them that is here. They never change; `digest`
    names their content."""

    digest: bytes
    layers: tuple[AdapterLayer, ...]
    num_bytes: int
    kind: AdapterKind
    rank: int  # the largest of a LoRA; 0: it has none
    number: int = 0  # among the adapters of ranks, for virtual expert ids


class LoadedAdapters(Protocol):
    """The adapters that steps may use."""

    def weights(self, digest: bytes) -> AdapterWeights:
        """Returns the weights of the adapter that a slice names. A request that runs keeps them in
        memory."""
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
    """The additions to one layer of a micro-batch."""

    groups: tuple[tuple[RowGroup, AdapterLayer], ...]

    def linear(self, key: str, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """Adds to the result of a linear layer, which is overwritten."""
        for group, layer in self.groups:
            low_rank = layer.linears.get(key)
            if low_rank is not None:
                own = low_rank.added(group.select(x_TK), group.select(y_TN))
                y_TN = group.put(y_TN, own)
        return y_TN

    @property
    def experts(self) -> tuple[ExpertRows, ...]:
        """The groups with experts of their own."""
        return tuple(
            ExpertRows(group, layer.experts)
            for group, layer in self.groups
            if layer.experts is not None
        )

    @property
    def mlps(self) -> tuple[tuple[RowGroup, ExpertBank], ...]:
        """The groups with a shared expert, or an MLP of a dense layer, of their own."""
        return tuple((group, layer.mlp) for group, layer in self.groups if layer.mlp is not None)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The groups of a micro-batch."""

    groups: tuple[RowGroup, ...]

    def layer(self, layer: int) -> LayerAdditions:
        """Returns what the adapters add to a layer."""
        return LayerAdditions(tuple((group, group.adapter.layers[layer]) for group in self.groups))


def adapter_rows(
    batch: MicroBatch, adapters: LoadedAdapters, device: torch.device
) -> AdapterRows | None:
    """Groups the rows of a micro-batch by adapter; None: no row has one."""
    digests = dict.fromkeys(s.adapter for s in batch.slices if s.adapter)
    if not digests:
        return None
    counts = [len(s.token_ids) for s in batch.slices]
    owner_T = np.repeat(np.arange(len(counts)), counts)
    groups = []
    for digest in digests:
        rows = np.flatnonzero(np.isin(owner_T, _owned(batch, digest)))
        groups.append(RowGroup(_as_rows(rows, len(owner_T), device), adapters.weights(digest)))
    return AdapterRows(tuple(groups))


def _as_rows(rows: NDArray[np.int64], num_rows: int, device: torch.device) -> slice | Tensor | None:
    """Returns ascending numbers of rows in the cheapest form."""
    if len(rows) == num_rows:
        return None
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else torch.from_numpy(rows).to(device)


def _owned(batch: MicroBatch, digest: bytes) -> Sequence[int]:
    return [index for index, each in enumerate(batch.slices) if each.adapter == digest]
