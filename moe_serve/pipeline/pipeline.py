"""Runs a step through the layers, micro-batch by micro-batch.

    layer 0: attend(0) dispatch(0)  attend(1) dispatch(1)   layer 1: combine(0) attend(0) ...

With one micro-batch the stages alternate; with more, a micro-batch's attention runs while the
experts compute the others. The same code serves every layout: only the transport differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.stage.adapted_stage import AdaptedStage
from moe_serve.model.stage.adapter_rows import LoadedAdapters
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.step_inputs import StepInputs
from moe_serve.model.step_plan import MicroBatch, StepPlan
from moe_serve.pipeline.exchange.next_layer import NextLayer
from moe_serve.pipeline.exchange.step_shape import exchange_order
from moe_serve.pipeline.groups.micro_batch_state import MicroBatchState, SegmentedState
from moe_serve.pipeline.groups.parked_states import ParkedStates
from moe_serve.pipeline.groups.segments import SegmentRows
from moe_serve.pipeline.rank_turns import RankTurns
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.stacked_layers import StackedLayers, hidden_of_logits
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import NO_LAYER, Stage
from moe_serve.pipeline.transport import Transport


class Pipeline:
    """Runs step plans on one attention rank and on the experts that its transport reaches."""

    def __init__(
        self,
        stage: AttentionStage,
        transport: Transport,
        cache: KVCache,
        device: torch.device,
        log: StageLog | None = None,
        tap: RouteTap | None = None,
        next_layer: NextLayer | None = None,
        parked: ParkedStates | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """`next_layer`: predicts needed experts if not all are held in memory. `parked`: states
        that outlive this pipeline. `adapters`: those that rows may have."""
        self._stage = AdaptedStage(stage, adapters)
        self._transport, self._cache, self._device = transport, cache, device
        self._log = StageLog() if log is None else log  # its owner begins and ends steps
        self._tap = RouteTap(stage.spec.router.num_experts) if tap is None else tap
        self._next_layer = next_layer
        self.parked = ParkedStates() if parked is None else parked
        self.stacked: StackedLayers | None = None  # if set, runs steps of one micro-batch
        self.turns: RankTurns | None = None  # if set, runs layers whose experts are on other ranks
        self.device = device
        self.keeps_hidden = False  # in steps that ask for guesses
        self.hidden_RD: Tensor | None = None  # the last step's states behind its logits, if kept
        self.keeps_every_row = False
        self.hidden_TD: Tensor | None = None  # the last step's states of all its rows, if kept

    def run(self, plan: StepPlan) -> Tensor:
        """Computes a step -> the requested logits [R, V] in fp32, slice after slice.

        Afterwards the cache holds the keys and values of every token of the step, in the layers
        in which it takes part. Raises ParkedStateError.
        """
        self._tap.begin(plan)
        self.parked.begin(plan)
        if self.stacked is None or len(plan.micro_batches) > 1 or self._stage.has_parts(plan):
            return self._run_by_layer(plan)
        since, (batch,) = time.perf_counter(), plan.micro_batches
        if batch.is_grouped:
            return self._run_segments(self.stacked, plan, since)
        result = self.stacked.run(
            batch,
            self._log,
            has_choices=plan.routes is not None,
            adapters=self._stage.adapters(batch),
        )
        self._tap.take_stacked(result)
        self._log.passed_layers(since, 0.0)
        has_hidden = self.keeps_hidden and plan.num_guesses > 0
        self.hidden_RD = hidden_of_logits(batch, result.hidden_TD) if has_hidden else None
        self.hidden_TD = result.hidden_TD if self.keeps_every_row else None
        return result.logits_RV

    @torch.inference_mode()
    def _run_segments(self, stacked: StackedLayers, plan: StepPlan, since: float) -> Tensor:
        """Runs a step of one micro-batch as one call per segment."""
        (batch,), logits, hidden = plan.micro_batches, self._no_logits(), self._no_hidden()
        rows = SegmentRows(batch, self._stage.spec.num_layers, self.parked)
        for segment in rows.segments:
            if not segment.batch.slices:
                continue
            result = stacked.run(
                segment.batch,
                self._log,
                has_choices=plan.routes is not None,
                layers=(segment.first, segment.end),
                hidden_TD=rows.join(segment),
                adapters=self._stage.adapters(segment.batch),
            )
            self._tap.take_stacked(result, segment.batch.slices)
            rows.leave(segment, result.hidden_TD)
            if segment is rows.segments[-1]:
                logits, hidden = result.logits_RV, result.hidden_TD
        self._log.passed_layers(since, 0.0)
        last = rows.segments[-1].batch
        has_hidden = self.keeps_hidden and plan.num_guesses > 0
        self.hidden_RD = hidden_of_logits(last, hidden) if has_hidden else None
        self.hidden_TD = None
        return logits

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self._stage.spec.vocab_size, device=self._device)

    def _no_hidden(self) -> Tensor:
        return torch.empty(0, self._stage.spec.width, dtype=self._stage.dtype, device=self._device)

    def _state(self, batch: MicroBatch) -> MicroBatchState:
        """Returns the state of a micro-batch before the first layer."""
        if batch.is_grouped:
            rows = SegmentRows(batch, self._stage.spec.num_layers, self.parked)
            return SegmentedState(rows, self._inputs, self._stage)
        inputs = self._inputs(batch)
        return MicroBatchState(inputs, self._stage.embed(inputs))

    @torch.inference_mode()
    def _run_by_layer(self, plan: StepPlan) -> Tensor:
        since, aside_s, parts = time.perf_counter(), 0.0, list[Tensor]()
        hidden, every_row = list[Tensor](), list[Tensor]()
        states = (self._state(batch) for batch in plan.micro_batches)
        for index, state in enumerate(self._finished(states)):
            clock, start = time.perf_counter(), self._log.now()
            self._log.enter(Stage.LOGITS, NO_LAYER, index)
            logit_rows = state.end()
            if logit_rows is None:
                parts.append(self._no_logits())
                continue
            parts.append(self._stage.logits(state.hidden_TD, logit_rows, state.inputs))
            self._log.add(Stage.LOGITS, NO_LAYER, index, len(parts[-1]), start)
            if self.keeps_hidden and plan.num_guesses:
                hidden.append(state.hidden_TD.index_select(0, logit_rows))
            if self.keeps_every_row:
                every_row.append(state.hidden_TD)
            aside_s += time.perf_counter() - clock
        self._log.passed_layers(since, aside_s)
        self.hidden_RD = torch.cat(hidden) if hidden else None
        self.hidden_TD = torch.cat(every_row) if len(every_row) > 1 else next(iter(every_row), None)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _inputs(self, batch: MicroBatch) -> StepInputs:
        return self._stage.make_inputs(batch, self._cache, self._device)

    def pass_layers(self, inputs: Sequence[StepInputs]) -> list[Tensor]:
        """Runs the embedding and all layers, and returns the residual stream [T, D] of each
        micro-batch."""
        states = (MicroBatchState(each, self._stage.embed(each)) for each in inputs)
        return [state.hidden_TD for state in self._finished(states)]

    def _finished(self, begun: Iterable[MicroBatchState]) -> Iterator[MicroBatchState]:
        """Yields each micro-batch once it has left the last layer.

        States are consumed, and the caller's work on a yielded micro-batch runs, while the experts
        compute other micro-batches.
        """
        self._transport.reset()
        states = []
        for index, each in enumerate(begun):
            states.append(each)
            self._pass(0, index, each)
        following = exchange_order(range(1, self._stage.spec.num_layers), len(states))
        done = 0
        while done < len(following):
            layer, index = following[done]
            if index == 0 and self.turns is not None:
                done += (num_passed := self.turns.run_step(layer, states))
                if num_passed:
                    continue
            self._pass(layer, index, states[index])
            done += 1
        for index, state in enumerate(states):
            self._finish(index, state)
            yield state
        self._transport.finish()

    def clear_pages(self, pages: list[int]) -> None:
        """Zeroes pages that may hold NaNs of a failed request."""
        if pages:
            self._cache.clear(pages)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages given as (from, to), so that a sequence can continue from another one's
        page.
        """
        if pairs:
            self._cache.copy(pairs)

    def finite_pages(self, pages: list[int]) -> list[bool]:
        """Returns for each page whether its contents are finite in every layer."""
        return self._cache.finite(pages) if pages else []

    def _pass(self, layer: int, index: int, state: MicroBatchState) -> None:
        """Ends the layer before, and starts this one: as one call, or in parts."""
        if self.turns is None or not self.turns.run(layer, index, state):
            self._finish(index, state)
            self._start(layer, index, state)

    def _start(self, layer: int, index: int, state: MicroBatchState) -> None:
        """Runs a layer's attention and sends its rows to the experts, unless the layer is dense."""
        if not state.enter(layer):
            return
        log, rows = self._log, state.hidden_TD.shape[0]
        start = log.now()
        log.enter(Stage.ATTENTION, layer, index)
        advance = self._stage.advance(layer, state.hidden_TD, state.inputs, self._cache)
        start = log.add(Stage.ATTENTION, layer, index, rows, start)
        state.hidden_TD = advance.hidden_TD
        routed = advance.routed
        if routed is None:
            return
        self._tap.take(index, routed.rows.expert_ids_TK, routed.rows.weights_TK, state.pieces)
        log.enter(Stage.DISPATCH, layer, index)
        if self._next_layer is not None:
            ids_TK = routed.rows.expert_ids_TK
            foreseen_E = self._next_layer.of(layer, index, state.hidden_TD, ids_TK)
            routed = replace(routed, foreseen_E=foreseen_E)
        self._transport.dispatch(layer, index, routed)
        start = log.add(Stage.DISPATCH, layer, index, rows, start)
        state.layer_away = layer
        state.shared_TD = self._stage.shared(layer, routed.x_TD, state.inputs)
        if state.shared_TD is not None:
            log.add(Stage.SHARED, layer, index, rows, start)

    def _finish(self, index: int, state: MicroBatchState) -> None:
        """Adds the experts' sum to the residual stream."""
        if state.layer_away is None:
            return
        if state.is_away_by_turn:
            assert self.turns is not None, "rows were sent by a turn"
            return self.turns.finish(index, state)
        layer, out_TD = state.layer_away, self._transport.combine(state.layer_away, index)
        start = self._log.now()
        self._log.enter(Stage.COMBINE, layer, index)
        state.hidden_TD = self._stage.add(state.hidden_TD, out_TD, state.shared_TD)
        state.layer_away = state.shared_TD = None
        self._log.add(Stage.COMBINE, layer, index, out_TD.shape[0], start)
