"""The attention stage of steps with adapters. A whole fine-tune has an attention stage of its own;
its rows pass that one, and all others the base model's.

T rows of a micro-batch, R of them that want logits, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

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
        """Returns the fine-tunes that sequences of a micro-batch have, by digest."""
        if self._adapters is None:
            return {}
        own = {}
        for digest in dict.fromkeys(s.adapter for s in batch.slices if s.adapter):
            weights = self._adapters.weights(digest)
            if isinstance(weights, FineTune):
                own[digest] = weights
        return own

    def embed(self, inputs: StepInputs) -> Tensor:
        """See AttentionStage.embed."""
        if not isinstance(inputs, PartedInputs):
            return self._base.embed(inputs)
        return _joined(inputs.parts, [part.stage.embed(part.inputs) for part in inputs.parts])

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
        found = [_placed(*pair, len(hidden_TD)) for pair in zip(parts, routed, strict=True)]
        added = next((each for each in found if each is not None), None)  # to the base's experts
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
        if not isinstance(inputs, PartedInputs):
            return self._base.logits(hidden_TD, rows_R)
        places, outputs = [], []
        for part in inputs.parts:
            own_r = torch.isin(rows_R, part.rows).nonzero()[:, 0]
            if len(own_r):  # shards agree: they have the same plan
                places.append(own_r)
                outputs.append(part.stage.logits(hidden_TD, rows_R[own_r]))
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


def _placed(part: StagePart, routed: Routed, num_rows: int) -> RowAdditions | None:
    """Returns the additions to the experts of a part's rows, for all rows of the micro-batch."""
    if routed.additions is None:
        return None
    index_T = np.full(num_rows, -1, dtype=np.int64)
    index_T[part.rows.cpu().numpy()] = routed.additions.index_T
    return RowAdditions(index_T, routed.additions.additions)
