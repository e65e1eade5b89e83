"""Runs all layers of a step in one call of the kernels, where nothing has to happen between them.

It is used where all experts are in this process and stay, and every layer's parts are in the call:
see `stack_refusal`. T tokens, R rows that want logits, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_kernels.interface.layer_stack import LayerStack, StackResult, StackRows
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.stage.adapter_rows import AdapterRows
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.step_plan import MicroBatch
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import NO_LAYER, Stage


@dataclass(frozen=True, slots=True)
class StackedLayers:
    """The call, and for each layer if it has routed experts and if it has a shared one."""

    call: LayerStack
    is_sparse: tuple[bool, ...]
    is_shared: tuple[bool, ...]

    @classmethod
    def of(
        cls, stage: AttentionStage, experts: ExpertStage, cache: KVCache
    ) -> StackedLayers | None:
        """Returns the layers as one call over a cache; None if they cannot be one."""
        sparse = experts.sparse_layers
        banks = {layer: experts.layer(layer).whole_bank for layer in sparse}
        if experts.memory is not None or None in banks.values():
            return None  # experts come and go, or a layer's lie in several banks
        layers = range(stage.spec.num_layers)
        call = stage.stacked([banks.get(layer) for layer in layers], cache)
        if call is None:
            return None
        return cls(
            call,
            tuple(layer in sparse for layer in layers),
            tuple(layer in sparse and stage.has_mlp(layer) for layer in layers),
        )

    def run(
        self,
        batch: MicroBatch,
        log: StageLog,
        *,
        has_choices: bool,
        layers: tuple[int, int] | None = None,
        hidden_TD: Tensor | None = None,
        adapters: AdapterRows | None = None,
    ) -> StackResult:
        """Computes a step of one micro-batch. `has_choices`: return the routers' choices too.
        `adapters`: of its rows.

        With `layers`, it computes these layers only, [first, end), from the residual stream before
        them. Logits exist behind the last layer."""
        assert adapters is None or adapters.prepared is not None, "adapters of these kernels"
        rows = StackRows()
        for piece in batch.slices:
            table, dropped = piece.page_table, piece.num_dropped
            rows.add(piece.start, piece.token_ids, table, piece.num_logits, dropped)
        start = log.now()
        log.enter(Stage.STEP, at_layer=lambda: self.call.at_layer)
        result = self.call(
            rows,
            has_choices=has_choices,
            has_times=log.is_on,
            layers=layers,
            hidden_TD=hidden_TD,
            adapters=None if adapters is None else adapters.prepared,
        )
        if result.times is not None:
            self._note(result, log, start, 0 if layers is None else layers[0])
        return result

    def _note(self, result: StackResult, log: StageLog, start: int, first: int) -> None:
        """Records the stages of layers from `first` on, which began at `start`."""
        assert result.times is not None, "the step was timed"
        num_rows = len(result.hidden_TD)
        for layer, times in enumerate((result.times + start).tolist(), first):
            began, front, routed, shared, end = times
            log.add(Stage.ATTENTION, layer, 0, num_rows, began, front)
            if self.is_sparse[layer]:
                log.add(Stage.DISPATCH, layer, 0, num_rows, front, routed)
            if self.is_shared[layer]:
                log.add(Stage.SHARED, layer, 0, num_rows, routed, shared)
            log.add(Stage.COMBINE, layer, 0, num_rows, shared, end)
        if first + len(result.times) == len(self.is_sparse):
            log.add(Stage.LOGITS, NO_LAYER, 0, len(result.logits_RV), log.end)


def hidden_of_logits(batch: MicroBatch, hidden_TD: Tensor) -> Tensor:
    """Returns the rows of the residual stream behind a micro-batch's logits, [R, D]."""
    rows: list[int] = []
    end = 0
    for piece in batch.slices:
        end += len(piece.token_ids)
        rows.extend(range(end - piece.num_logits, end))
    if len(rows) == len(hidden_TD):
        return hidden_TD
    return hidden_TD.index_select(0, torch.tensor(rows, dtype=torch.int64))
