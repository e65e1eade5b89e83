"""A micro-batch as tensors: the inputs of the attention stage besides the residual stream, made for
one step, or made once for a recorded decode step and refilled for every step.

A step with fewer rows than the recording is padded with copies of the row that sees the fewest
keys: same token, same position, same pages to read. A copy computes the same as that row, chooses
experts that are loaded anyway, and costs the least attention. Only its writes differ: they go to
the cache's scratch page, which is never read.

B rows, Hkv key/value heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.graphs.graph_sizes import GraphSize
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    DecodeRoom,
    FixedAttention,
    StepRows,
)
from moe_kernels.interface.kernels import Kernels
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.adapter_rows import AdapterRows
from moe_serve.model.step_plan import MicroBatch, SequenceSlice


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs: T tokens, R rows that want logits.

    Made once per step and micro-batch, on the device.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    kv_rows: Tensor  # int64 [T * Hkv], see KVCache.rows
    logit_rows: Tensor  # int64 [R]
    attention: Mapping[AttentionShape, Any]  # the kernels' own plan of each layer shape
    adapters: AdapterRows | None = None  # None: all rows are the base model's


def make_step_inputs(
    batch: MicroBatch, cache: KVCache, spec: ModelSpec, kernels: Kernels, device: torch.device
) -> StepInputs:
    """Lays out a micro-batch for the device: a few numpy arrays per step, none per token."""
    slices = batch.slices
    starts = np.array([s.start for s in slices], dtype=np.int64)
    keys = np.array([s.key_start for s in slices], dtype=np.int64)
    counts = np.array([len(s.token_ids) for s in slices], dtype=np.int64)
    offsets = np.cumsum(counts) - counts
    tokens = np.concatenate([s.token_ids for s in slices])
    positions = np.arange(len(tokens)) - np.repeat(offsets - starts, counts)
    logit_rows = np.concatenate(
        [
            np.arange(offset + count - s.num_logits, offset + count)
            for s, offset, count in zip(slices, offsets, counts, strict=True)
        ]
    )
    tables = [s.page_table for s in slices]
    kv_rows = cache.rows(tables, keys.tolist(), counts.tolist())
    drops_keys = bool((keys != starts).any())
    step = StepRows(counts, keys, tables, cache.page_size, drops_keys)
    return StepInputs(
        token_ids=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        kv_rows=torch.from_numpy(kv_rows).to(device),
        logit_rows=torch.from_numpy(logit_rows).to(device),
        attention={
            shape: kernels.plan_attention(step, shape, device)
            for shape in dict.fromkeys(layer.attention for layer in spec.layers)
        },
    )


# in 8-byte numbers: every part begins at a multiple of 16 bytes, as a separate tensor would
_ALIGNED = 2


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """A step laid out on the host in the layout of `StaticInputs` on the device."""

    numbers: Tensor  # int64
    attention: Mapping[AttentionShape, Any]
    num_rows: int  # excluding padding
    num_logits: int


class StaticInputs:
    """Holds the inputs of a recorded step: `inputs`, whose tensors keep their addresses."""

    def __init__(
        self,
        size: GraphSize,
        cache: KVCache,
        attention: Mapping[AttentionShape, FixedAttention],
    ) -> None:
        self.size, self._cache, self._attention = size, cache, attention
        rows = size.num_rows
        self._parts = [
            -(-count // _ALIGNED) * _ALIGNED
            for count in (rows, rows, rows * cache.num_kv_heads, rows)
        ]
        self._numbers = torch.zeros(sum(self._parts), dtype=torch.int64, device=cache.device)
        self._plans: dict[AttentionShape, Any] = {}
        self.inputs = self._views(self._numbers, rows, rows)
        self.load(self.pack(()))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a recording reads."""
        own = [self.inputs.token_ids, self.inputs.positions, self.inputs.kv_rows]
        return own + [tensor for fixed in self._attention.values() for tensor in fixed.tensors]

    def pack(self, slices: Sequence[SequenceSlice]) -> PackedInputs:
        """Lays out a decode step on the host: one token of each slice, and padding."""
        num_rows, num_padded = len(slices), self.size.num_rows - len(slices)
        assert num_padded >= 0, f"{num_rows} rows do not fit into {self.size.num_rows}"
        assert all(len(s.token_ids) == 1 for s in slices), (
            "a decode step has one token per sequence"
        )
        rows = [*slices, *[self._padding(slices)] * num_padded]
        starts = np.array([s.start for s in rows], dtype=np.int64)
        keys = np.array([s.key_start for s in rows], dtype=np.int64)
        pages = np.full(len(rows), self._cache.scratch_page, dtype=np.int64)
        page_size = self._cache.page_size
        pages[:num_rows] = [s.page_table[s.key_start // page_size] for s in slices]
        wanted = np.flatnonzero([s.num_logits for s in slices])
        numbers = self._packed_numbers(
            np.array([s.token_ids[0] for s in rows], dtype=np.int64),
            starts,
            self._cache.rows_at(pages, keys % page_size),
            wanted,
        )
        ones = np.ones(len(rows), dtype=np.int64)
        drops_keys = bool((keys != starts).any())
        step = StepRows(ones, keys, [s.page_table for s in rows], page_size, drops_keys)
        plans = {shape: fixed.pack(step) for shape, fixed in self._attention.items()}
        return PackedInputs(numbers, plans, num_rows, len(wanted))

    def load(self, packed: PackedInputs) -> None:
        """Loads a packed step into `inputs`, in place and without waiting for the device."""
        self._numbers.copy_(packed.numbers, non_blocking=True)
        for shape, fixed in self._attention.items():
            fixed.load(packed.attention[shape])
            self._plans[shape] = fixed.plan

    def _views(self, numbers: Tensor, num_rows: int, num_logits: int) -> StepInputs:
        token_ids, positions, kv_rows, logit_rows = numbers.split(self._parts)
        return StepInputs(
            token_ids=token_ids[:num_rows],
            positions=positions[:num_rows],
            kv_rows=kv_rows[: num_rows * self._cache.num_kv_heads],
            logit_rows=logit_rows[:num_logits],
            attention=self._plans,
        )

    def _padding(self, slices: Sequence[SequenceSlice]) -> SequenceSlice:
        """Returns the row that padding copies; without slices, a token in the scratch page."""
        if slices:
            return min(slices, key=lambda s: s.key_start)
        return SequenceSlice(-1, 0, np.zeros(1, dtype=np.int64), (self._cache.scratch_page,), 0)

    def _packed_numbers(self, *parts: NDArray[np.int64]) -> Tensor:
        """Packs numbers into a new buffer: a transfer may still use the previous one."""
        packed = torch.zeros(
            len(self._numbers), dtype=torch.int64, pin_memory=self._cache.device.type == "cuda"
        )
        for section, part in zip(packed.split(self._parts), parts, strict=True):
            section.numpy()[: len(part)] = part
        return packed


def make_static_inputs(
    size: GraphSize,
    cache: KVCache,
    spec: ModelSpec,
    kernels: Kernels,
    max_positions: int,
) -> StaticInputs | None:
    """Makes inputs for all steps of this size; None if the kernels have no plan for them."""
    room = DecodeRoom(size=size, max_positions=max_positions, page_size=cache.page_size)
    attention = {}
    for shape in dict.fromkeys(layer.attention for layer in spec.layers):
        fixed = kernels.fixed_attention(room, shape, cache.device)
        if fixed is None:
            return None
        attention[shape] = fixed
    return StaticInputs(size, cache, attention)


def is_decode(batch: MicroBatch) -> bool:
    """Returns whether every sequence has exactly one token to compute, in all layers."""
    return all(len(s.token_ids) == 1 and s.layers is None for s in batch.slices)


def num_keys(batch: MicroBatch) -> int:
    """Returns the total number of keys that a decode step's rows see, as in `GraphSizes.choose`."""
    return sum(s.key_start + 1 for s in batch.slices)
