"""Layers whose outputs are computed in parts by several processes and then combined.

T rows, N outputs, K inputs, D model width, F width of a hidden layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.interface.attention_shape import AttentionShape, QKNormWeights
from moe_kernels.interface.kernels import Kernels, Linear, SplitMLP
from moe_kernels.interface.kv_form import KVPages
from moe_serve.model.stage.adapter_rows import LayerAdditions
from moe_serve.model.stage.attention import Attention, GroupedQueryAttention
from moe_serve.model.stage.step_inputs import StepInputs
from moe_serve.model.stage.tensor_shard import TensorShard, column_borders


class Gather(Protocol):
    """Exchanges columns among the shards of an attention stage; all shards call the same methods in
    the same order.
    """

    @property
    def shard(self) -> TensorShard: ...

    def everywhere(self, part_TN: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Exchanges this shard's columns -> those of all shards, side by side."""
        ...

    def at_leader(self, part_TN: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Does the same for the first shard alone; the other shards get their own columns back."""
        ...


def widths_of(width: int, count: int) -> tuple[int, ...]:
    """Returns the number of columns of each shard."""
    return tuple(end - start for start, end in pairwise(column_borders(width, count)))


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """Implements Linear; `part` has the columns of this shard."""

    part: Linear
    width: int
    gather: Gather

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        shard = self.gather.shard
        if residual_TN is not None:
            residual_TN = residual_TN[:, shard.columns(self.width)].contiguous()
        part_TN = self.part(x_TK, residual_TN)
        return self.gather.everywhere(part_TN, widths_of(self.width, shard.count))


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """Implements Linear for logits, which only the first shard needs."""

    part: Linear
    width: int
    gather: Gather

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        assert residual_TN is None, "logits are not added to the residual stream"
        widths = widths_of(self.width, self.gather.shard.count)
        return self.gather.at_leader(self.part(x_TK), widths)


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """Implements Attention; `part` has the heads of this shard."""

    part: Attention
    gather: Gather

    def __call__(
        self,
        x_TD: Tensor,
        inputs: StepInputs,
        pages: KVPages,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        attended = self.part(x_TD, inputs, pages, additions)
        widths = (attended.shape[1],) * self.gather.shard.count
        return self.gather.everywhere(attended, widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNormedQKV:
    """Implements Linear for queries and keys that are normed over all heads together.

    It gathers them and continues with this shard's part. `part` has its rows of q, then k, then v.
    """

    kernels: Kernels
    part: Linear
    shape: AttentionShape  # shape of the shard
    norm: QKNormWeights  # weights of the whole rows
    gather: Gather

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        assert residual_TN is None, "queries are not added to the residual stream"
        shape, shard = self.shape, self.gather.shard
        q_width, k_width = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
        qkv = self.part(x_TK)
        rest = qkv.shape[1] - q_width - k_width
        q, k, v = qkv.split([q_width, k_width, rest], dim=1)
        copies = shard.count * k_width // len(self.norm.k)  # copies of each key head
        every_q = self.gather.everywhere(q, (q_width,) * shard.count)
        every_k = self.gather.everywhere(k, (k_width,) * shard.count)
        if copies > 1:
            every_k = every_k.unflatten(1, (-1, copies, k_width))[:, :, 0].flatten(1)
        every_q = self.kernels.rms_norm(every_q, self.norm.q, shape.norm_eps)
        every_k = self.kernels.rms_norm(every_k, self.norm.k, shape.norm_eps)
        own_q = every_q[:, shard.index * q_width :][:, :q_width]
        own_k = every_k[:, shard.index // copies * k_width :][:, :k_width]
        return torch.cat((own_q, own_k, v), dim=1)


def with_row_norm(
    heads: GroupedQueryAttention, norm: QKNormWeights, gather: Gather
) -> GroupedQueryAttention:
    """Returns a shard's heads whose queries and keys are normed over the heads of all shards.

    `norm`: the weights of the whole rows.
    """
    qkv = RowNormedQKV(
        kernels=heads.kernels, part=heads.qkv, shape=heads.shape, norm=norm, gather=gather
    )
    return replace(heads, qkv=qkv)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredMLP:
    """Implements the part of ExpertBank that DenseMLP uses, for one expert: gathers the hidden
    layer, then the output.
    """

    part: SplitMLP
    hidden_width: int
    width: int
    gather: Gather

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._whole(x_TD, weights_TK, None)

    def added_partial(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, added: RowAdditions
    ) -> Tensor:
        """Implements AddingBank; `added` has the columns of this shard."""
        return self._whole(x_TD, weights_TK, added).double()

    def _whole(self, x_TD: Tensor, weights_TK: Tensor, added: RowAdditions | None) -> Tensor:
        count = self.gather.shard.count
        hidden_TF = self.gather.everywhere(
            self.part.hidden(x_TD, added), widths_of(self.hidden_width, count)
        )
        out_TD = self.part.output(hidden_TF, weights_TK, added)
        return self.gather.everywhere(out_TD, widths_of(self.width, count))
