"""The adapters of a micro-batch: which rows have one, and what it adds to each layer for them.

An adapter never touches a row that is not its own. What it adds to a row depends on that row alone,
as all products are those of the kernel set. T rows, R rows with an adapter, K inputs, N outputs, E
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_kernels.interface.kernels import ExpertBank, Linear
from moe_serve.model.step_plan import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """An addition to a linear layer: scale * (x A^T) B^T. Sums are in fp32; both products are
    rounded to the model's dtype, as in PEFT."""

    a: Linear
    b: Linear
    scale_N: Tensor  # fp32

    def added(self, x_RK: Tensor, y_RN: Tensor) -> Tensor:
        """Return y and the addition, rounded to y's dtype."""
        addition_RN = self.b(self.a(x_RK)).float() * self.scale_N
        return (y_RN.float() + addition_RN).to(y_RN.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExperts:
    """The experts of a layer that an adapter has in place of the base model's."""

    bank: ExpertBank
    is_own_E: Tensor  # bool [E + 1]; the last entry is for id -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayer:
    """The parts of one layer. `linears` are keyed by the field of the attention: qkv, output,
    and of latent attention query_down, query, latent and output."""

    linears: Mapping[str, LowRank]
    experts: AdapterExperts | None = None
    mlp: ExpertBank | None = None  # in place of the shared expert, or of a dense layer's MLP


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, for weak references
class AdapterWeights:
    """The weights of one adapter. They never change; `digest` names their content."""

    digest: bytes
    layers: tuple[AdapterLayer, ...]
    num_bytes: int


class LoadedAdapters(Protocol):
    """The adapters that steps may use."""

    def weights(self, digest: bytes) -> AdapterWeights:
        """Return the weights of an adapter, which a request that runs keeps in memory."""
        ...


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a micro-batch that have one adapter; None: all of them."""

    rows_R: Tensor | None  # int64
    adapter: AdapterWeights

    def select(self, x_T: Tensor) -> Tensor:
        """Return the group's rows of a tensor."""
        return x_T if self.rows_R is None else x_T.index_select(0, self.rows_R)

    def put(self, x_T: Tensor, own_R: Tensor) -> Tensor:
        """Return a tensor with the group's rows replaced. May write to `x_T`."""
        return own_R if self.rows_R is None else x_T.index_copy_(0, self.rows_R, own_R)


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
        """Add to the result of a linear layer, which is overwritten."""
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
        """Return what the adapters add to a layer."""
        return LayerAdditions(tuple((group, group.adapter.layers[layer]) for group in self.groups))


def adapter_rows(
    batch: MicroBatch, adapters: LoadedAdapters, device: torch.device
) -> AdapterRows | None:
    """Group the rows of a micro-batch by adapter; None: no row has one."""
    digests = dict.fromkeys(s.adapter for s in batch.slices if s.adapter)
    if not digests:
        return None
    counts = [len(s.token_ids) for s in batch.slices]
    owner_T = np.repeat(np.arange(len(counts)), counts)
    groups = []
    for digest in digests:
        rows = np.flatnonzero(np.isin(owner_T, _owned(batch, digest)))
        is_all = len(rows) == len(owner_T)
        rows_R = None if is_all else torch.from_numpy(rows).to(device)
        groups.append(RowGroup(rows_R, adapters.weights(digest)))
    return AdapterRows(tuple(groups))


def _owned(batch: MicroBatch, digest: bytes) -> Sequence[int]:
    return [index for index, each in enumerate(batch.slices) if each.adapter == digest]
