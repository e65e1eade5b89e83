"""A step through the layers, micro-batch by micro-batch.

    layer 0: attend(0) dispatch(0)  attend(1) dispatch(1)   layer 1: combine(0) attend(0) ...

With one micro-batch the stages take turns; with more, a micro-batch's attention runs while the
others are with the experts. The same code serves every layout: only the transport differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.graphed_attention_stage import GraphedAttentionStage
from moe_serve.model.stage.step_inputs import StepInputs
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.exchange.next_layer import NextLayer
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline import NO_LAYER, Stage
from moe_serve.pipeline.transport import Transport

AnyStage = AttentionStage | GraphedAttentionStage


class _Flight:
    """One micro-batch on its way through the layers."""

    def __init__(self, inputs: StepInputs, stage: AnyStage) -> None:
        self.inputs = inputs
        self.hidden_TD = stage.embed(inputs)
        self.layer_away: int | None = None  # whose rows are with the experts
        self.shared_TD: Tensor | None = None  # that layer's shared expert


class Pipeline:
    """Runs step plans on one attention rank and whatever experts its transport reaches."""

    def __init__(
        self,
        stage: AnyStage,
        transport: Transport,
        cache: KVCache,
        device: torch.device,
        log: StageLog | None = None,
        tap: RouteTap | None = None,
        next_layer: NextLayer | None = None,
    ) -> None:
        """`next_layer`: says what rows will need, to experts that need not all be in memory."""
        self._stage, self._transport, self._cache, self._device = stage, transport, cache, device
        self._log = StageLog() if log is None else log  # which begins and ends steps
        self._tap = RouteTap(stage.spec.router.num_experts) if tap is None else tap
        self._next_layer = next_layer

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Compute a step -> the wanted logits [R, V] in fp32, slice after slice.

        Afterwards the cache holds the keys and values of every token of the step.
        """
        since, aside_s, parts = time.perf_counter(), 0.0, list[Tensor]()
        self._tap.begin(plan)
        inputs = (
            self._stage.make_inputs(batch, self._cache, self._device)
            for batch in plan.micro_batches
        )
        for index, flight in enumerate(self._landed(inputs)):
            clock, start = time.perf_counter(), self._log.now()
            self._log.enter(Stage.LOGITS, NO_LAYER, index)
            parts.append(self._stage.logits(flight.hidden_TD, flight.inputs.logit_rows))
            self._log.add(Stage.LOGITS, NO_LAYER, index, len(parts[-1]), start)
            aside_s += time.perf_counter() - clock
        self._log.passed_layers(since, aside_s)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pass_layers(self, inputs: Sequence[StepInputs]) -> list[Tensor]:
        """Embedding and all layers -> the residual stream [T, D] of each micro-batch."""
        return [flight.hidden_TD for flight in self._landed(inputs)]

    def _landed(self, inputs: Iterable[StepInputs]) -> Iterator[_Flight]:
        """Each micro-batch as soon as it has left the last layer. Inputs are taken, and what the
        caller does with one micro-batch is done, while others are with the experts."""
        self._transport.reset()
        flights = []
        for index, each in enumerate(inputs):
            flights.append(_Flight(each, self._stage))
            self._fly(0, index, flights[-1])
        for layer in range(1, self._stage.spec.num_layers):
            for index, flight in enumerate(flights):
                self._land(index, flight)
                self._fly(layer, index, flight)
        for index, flight in enumerate(flights):
            self._land(index, flight)
            yield flight
        self._transport.finish()

    def clear_pages(self, pages: list[int]) -> None:
        """Zero pages that a failed request may have left NaNs in."""
        if pages:
            self._cache.clear(pages)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages, (from, to) each: a sequence goes on where another one's page leaves off."""
        if pairs:
            self._cache.copy(pairs)

    def finite_pages(self, pages: list[int]) -> list[bool]:
        """For each page, whether what it holds is finite in every layer."""
        return self._cache.finite(pages) if pages else []

    def _fly(self, layer: int, index: int, flight: _Flight) -> None:
        """A layer's attention; its rows leave for the experts, unless the layer is dense."""
        log, rows = self._log, flight.hidden_TD.shape[0]
        start = log.now()
        log.enter(Stage.ATTENTION, layer, index)
        advance = self._stage.advance(layer, flight.hidden_TD, flight.inputs, self._cache)
        start = log.add(Stage.ATTENTION, layer, index, rows, start)
        flight.hidden_TD = advance.hidden_TD
        routed = advance.routed
        if routed is None:
            return
        self._tap.take(index, routed.rows)
        log.enter(Stage.DISPATCH, layer, index)
        if self._next_layer is not None:
            ids_TK = routed.rows.expert_ids_TK
            foreseen_E = self._next_layer.of(layer, index, flight.hidden_TD, ids_TK)
            routed = replace(routed, foreseen_E=foreseen_E)
        self._transport.dispatch(layer, index, routed)
        start = log.add(Stage.DISPATCH, layer, index, rows, start)
        flight.layer_away = layer
        flight.shared_TD = self._stage.shared(layer, routed.x_TD)
        if flight.shared_TD is not None:
            log.add(Stage.SHARED, layer, index, rows, start)

    def _land(self, index: int, flight: _Flight) -> None:
        """Add the experts' sum to the residual stream."""
        if flight.layer_away is None:
            return
        layer, out_TD = flight.layer_away, self._transport.combine(flight.layer_away, index)
        start = self._log.now()
        self._log.enter(Stage.COMBINE, layer, index)
        flight.hidden_TD = self._stage.add(flight.hidden_TD, out_TD, flight.shared_TD)
        flight.layer_away = flight.shared_TD = None
        self._log.add(Stage.COMBINE, layer, index, out_TD.shape[0], start)
