"""The attention stage of steps with adapters. A whole fine-tune has an attention stage of its own.
If the kernels support it (`AdapterWeights.prepared`), its rows pass the base model's layers with
all other rows; otherwise they pass its own stage.

T rows of a micro-batch, R of them that want logits, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.expert_stage import RoutedRows
from moe_kernels.interface.adapters import RowAdditions
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.adapter_rows import (
    AdapterRows,
    AdapterWeights,
    ExpertRows,
    LoadedAdapters,
    RowGroup,
    adapter_rows,
)
from moe_serve.model.stage.attention_stage import Advance, AttentionStage, Routed
from moe_serve.model.stage.step_inputs import StepInputs
from moe_serve.model.step_plan import MicroBatch, StepPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class FineTune(AdapterWeights):
    """An adapter that may change every part of the model. Its stage shares the matrices of the base
    model's, to which it adds."""

    stage: AttentionStage


@dataclass(frozen=True, slots=True)
class StagePart:
    """The rows of a micro-batch that pass one stage, and that stage's inputs."""

    stage: AttentionStage
    inputs: StepInputs
    rows: Tensor  # int64, places in the micro-batch, ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedInputs(StepInputs):
    """The inputs of a micro-batch with rows of a fine-tune."""

    parts: tuple[StagePart, ...]


class AdaptedStage:
    """An attention stage, and those of fine-tunes. `adapters`: those that rows may have."""

    def __init__(self, base: AttentionStage, adapters: LoadedAdapters | None) -> None:
        self._base, self._adapters = base, adapters

    @property
    def spec(self) -> ModelSpec:
        return self._base.spec

    @property
    def dtype(self) -> torch.dtype:
        return self._base.dtype

    def has_parts(self, plan: StepPlan) -> bool:
        """Returns whether rows of a step pass other stages than the base model's."""
        if self._adapters is None:
            return False
        return any(self._fine_tunes(batch) for batch in plan.micro_batches)

    def adapters(self, batch: MicroBatch) -> AdapterRows | None:
        """Returns the adapters of a micro-batch's rows, which all pass the base model's stage."""
        if self._adapters is None:
            for piece in batch.slices:
                assert not piece.adapter, "this pipeline has no adapters"
            return None
        device = self._base.embedding.device
        return adapter_rows(batch, self._adapters, self._base.kernels.adapters, device)

    def make_inputs(self, batch: MicroBatch, cache: KVCache, device: torch.device) -> StepInputs:
        """Makes the inputs of a micro-batch, with the adapters of its rows."""
        inputs, own = self._base.make_inputs(batch, cache, device), self._fine_tunes(batch)
        if not own:
            return replace(inputs, adapters=self.adapters(batch))
        counts = [len(s.token_ids) for s in batch.slices]
        owner_T = np.repeat(np.arange(len(counts)), counts)
        parts = []
        keys: tuple[bytes | None, ...] = (None, *own)
        for key in keys:
            places = [i for i, s in enumerate(batch.slices) if _stage_key(s.adapter, own) == key]
            if not places:
                continue
            some = replace(batch, slices=tuple(batch.slices[i] for i in places))
            rows = torch.from_numpy(np.flatnonzero(np.isin(owner_T, places))).to(device)
            stage, added = self._base, None
            if key is None:
                added = self.adapters(some)
            else:
                index_T = np.zeros(len(rows), dtype=np.int64)
                stage, added = own[key].stage, AdapterRows(index_T, [own[key]], None, device)
            made = stage.make_inputs(some, cache, device)
            parts.append(StagePart(stage, replace(made, adapters=added), rows))
        common = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        return PartedInputs(**common, parts=tuple(parts))

    def _fine_tunes(self, batch: MicroBatch) -> dict[bytes, FineTune]:
        """Returns the fine-tunes of a micro-batch's sequences that need their own stage, by
        digest."""
        if self._adapters is None:
            return {}
        own = {}
        for digest in dict.fromkeys(s.adapter for s in batch.slices if s.adapter):
            weights = self._adapters.weights(digest)
            if isinstance(weights, FineTune) and weights.prepared is None:
                own[digest] = weights
        return own

    def embed(self, inputs: StepInputs) -> Tensor:
        """See AttentionStage.embed."""
        if isinstance(inputs, PartedInputs):
            outputs = [self._embed(part.stage, part.inputs) for part in inputs.parts]
            return _joined(inputs.parts, outputs)
        return self._embed(self._base, inputs)

    def _embed(self, stage: AttentionStage, inputs: StepInputs) -> Tensor:
        hidden_TD = stage.embed(inputs)
        for group, tuned in _tuned_groups(inputs):
            if tuned.embedding is not stage.embedding:
                own_RD = tuned.embed_tokens(group.select(inputs.token_ids))
                hidden_TD = group.put(hidden_TD, own_RD)
        return hidden_TD

    def advance(self, layer: int, hidden_TD: Tensor, inputs: StepInputs, cache: KVCache) -> Advance:
        """See AttentionStage.advance."""
        if not isinstance(inputs, PartedInputs):
            return self._base.advance(layer, hidden_TD, inputs, cache)
        parts = inputs.parts
        done = [
            part.stage.advance(layer, hidden_TD.index_select(0, part.rows), part.inputs, cache)
            for part in parts
        ]
        hidden_TD = _joined(parts, [each.hidden_TD for each in done])
        routed = [each.routed for each in done if each.routed is not None]
        if not routed:
            return Advance(hidden_TD, None)

        def joined(of: Callable[[Routed], Tensor]) -> Tensor:
            return _joined(parts, [of(each) for each in routed])

        rows = RoutedRows(
            joined(lambda each: each.rows.x_TD),
            joined(lambda each: each.rows.expert_ids_TK),
            joined(lambda each: each.rows.weights_TK),
        )
        adapted = tuple(
            _within(part, each)
            for part, own in zip(parts, routed, strict=True)
            for each in own.adapted
        )
        added = _joined_additions(parts, routed, len(hidden_TD))
        x_TD = joined(lambda each: each.x_TD)
        return Advance(hidden_TD, Routed(x_TD, rows, adapted=adapted, additions=added))

    def shared(self, layer: int, x_TD: Tensor, inputs: StepInputs) -> Tensor | None:
        """See AttentionStage.shared."""
        if not isinstance(inputs, PartedInputs):
            return self._base.shared(layer, x_TD, inputs)
        outputs = [
            part.stage.shared(layer, x_TD.index_select(0, part.rows), part.inputs)
            for part in inputs.parts
        ]
        found = [out for out in outputs if out is not None]
        return _joined(inputs.parts, found) if found else None

    def logits(self, hidden_TD: Tensor, rows_R: Tensor, inputs: StepInputs) -> Tensor:
        """See AttentionStage.logits."""
        if isinstance(inputs, PartedInputs):
            heads = [each for p in inputs.parts for each in _heads(p.stage, p.inputs, p.rows)]
        elif _tuned_groups(inputs):
            rows_T = torch.arange(len(hidden_TD), device=hidden_TD.device)
            heads = _heads(self._base, inputs, rows_T)
        else:
            return self._base.logits(hidden_TD, rows_R)
        places, outputs = [], []
        for stage, rows_T in heads:
            own_r = torch.isin(rows_R, rows_T).nonzero()[:, 0]
            if len(own_r):  # shards agree: they have the same plan
                places.append(own_r)
                outputs.append(stage.logits(hidden_TD, rows_R[own_r]))
        if not outputs:
            return self._base.logits(hidden_TD, rows_R)
        return torch.cat(outputs)[torch.cat(places).argsort()]

    def add(self, hidden_TD: Tensor, out_TD: Tensor, more_TD: Tensor | None = None) -> Tensor:
        """See AttentionStage.add."""
        return self._base.add(hidden_TD, out_TD, more_TD)


def _stage_key(digest: bytes, own: dict[bytes, FineTune]) -> bytes | None:
    """Returns the fine-tune that a sequence has; None: the base model's stage computes it."""
    return digest if digest in own else None


def _joined(parts: Sequence[StagePart], outputs: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all parts in the order of the micro-batch."""
    if len(outputs) == 1:
        return outputs[0]
    num_rows = sum(len(out) for out in outputs)
    whole = outputs[0].new_empty(num_rows, *outputs[0].shape[1:])
    for part, out in zip(parts, outputs, strict=True):
        whole.index_copy_(0, part.rows, out)
    return whole


def _within(part: StagePart, each: ExpertRows) -> ExpertRows:
    """Returns rows of a part as rows of the micro-batch."""
    inner = each.group.rows
    rows = part.rows if inner is None else part.rows[inner]
    return ExpertRows(RowGroup(rows, each.group.adapter), each.experts)


def _joined_additions(
    parts: Sequence[StagePart], routed: Sequence[Routed], num_rows: int
) -> RowAdditions | None:
    """Returns the additions to the experts of all parts' rows, for the rows of the micro-batch."""
    index_T, additions = np.full(num_rows, -1, dtype=np.int64), list[Any]()
    for part, each in zip(parts, routed, strict=True):
        if each.additions is not None:
            inner_T = each.additions.index_T
            own_T = np.where(inner_T < 0, -1, inner_T + len(additions))
            index_T[part.rows.cpu().numpy()] = own_T
            additions += each.additions.additions
    return RowAdditions(index_T, additions) if additions else None


def _tuned_groups(inputs: StepInputs) -> list[tuple[RowGroup, AttentionStage]]:
    """Returns the rows of fine-tunes that pass the layers with other rows, and their stages."""
    groups = () if inputs.adapters is None else inputs.adapters.groups
    return [
        (group, group.adapter.stage)
        for group in groups
        if isinstance(group.adapter, FineTune) and group.adapter.prepared is not None
    ]


def _heads(
    stage: AttentionStage, inputs: StepInputs, rows_T: Tensor
) -> list[tuple[AttentionStage, Tensor]]:
    """Returns the stages whose final norms and heads the rows use, with their rows."""
    found, is_other_T = [], torch.ones(len(rows_T), dtype=torch.bool, device=rows_T.device)
    for group, tuned in _tuned_groups(inputs):
        if tuned.head is not stage.head or tuned.final_norm is not stage.final_norm:
            found.append((tuned, group.select(rows_T)))
            is_other_T[slice(None) if group.rows is None else group.rows] = False
    return [*found, (stage, rows_T[is_other_T])]
