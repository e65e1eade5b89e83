"""Runs an attention rank's part of a layer as one call: from the experts' sums to the next rows.
Where all ranks are on one host, the layers of a step are one call, with the messages between them.

    wait for sums | add them, next attention and router, fill in frames | send | shared expert

The second part is the call. It has the bits of the same parts run one by one. T rows, D model
width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.interface.rank_kernels import (
    AttentionTurn,
    FrameShape,
    RankKernels,
    TurnLayer,
    TurnStep,
    WrongFrameError,
)
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.stage.adapted_stage import PartedInputs
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.groups.micro_batch_state import MicroBatchState
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import Stage

StepLayer = tuple[int, TurnLayer, int, Any | None]  # see RankKernels.turn_step


@dataclass(frozen=True, slots=True)
class BoundLayers:
    """The layers that one call can run if they are consecutive. `places`: the index of each."""

    call: TurnStep
    places: Mapping[int, int]
    num_layers: int
    has_shared: bool

    @classmethod
    def of(
        cls, stage: AttentionStage, calls: RankKernels, layers: Sequence[StepLayer]
    ) -> BoundLayers:
        return cls(
            calls.turn_step(layers),
            {layer[0]: place for place, layer in enumerate(layers)},
            len(stage.layers),
            any(layer[3] is not None for layer in layers),
        )

    def run_from(self, first: int) -> list[int]:
        """Returns the layers from `first` on that one call can run."""
        rest = range(first, self.num_layers)
        return list(itertools.takewhile(self.places.__contains__, rest))

    def empty_shared(self, hidden_TD: Tensor) -> Tensor | None:
        """Returns memory for the output of a shared expert, if there is one."""
        return torch.empty_like(hidden_TD, dtype=torch.float32) if self.has_shared else None


class RankTurns:
    """Runs the layers of a pipeline whose transport is a data group.

    A layer runs in parts instead if it is dense, if a policy chooses copies of its experts, if
    some rows take part in some layers only, and if rows have adapters.
    """

    def __init__(
        self,
        stage: AttentionStage,
        cache: KVCache,
        transport: GroupTransport,
        calls: RankKernels,
        shape: FrameShape,
        log: StageLog,
        tap: RouteTap,
    ) -> None:
        self._stage, self._cache, self._transport = stage, cache, transport
        self._calls, self._shape, self._log, self._tap = calls, shape, log, tap
        shapes = [layer.attention for layer in stage.spec.layers]
        self._shapes = list(dict.fromkeys(shapes))
        self._shape_of = [self._shapes.index(shape) for shape in shapes]  # by layer
        self._split: RowSplit | None = None  # that the copies and layers below are of
        self._copies: dict[int, Any | None] = {}
        self._lanes = transport.native_lanes(calls)
        self._layers: BoundLayers | None = None  # made when they are first used

    @classmethod
    def of(
        cls,
        stage: AttentionStage,
        cache: KVCache,
        transport: GroupTransport,
        log: StageLog,
        tap: RouteTap,
    ) -> RankTurns | None:
        """Returns None if the kernels have no such call, or do not write frames of this kind."""
        calls, shape = stage.kernels.rank_calls(), transport.frame_shape()
        if calls is None or shape is None:
            return None
        return cls(stage, cache, transport, calls, shape, log, tap)

    def run(self, layer: int, index: int, state: MicroBatchState) -> bool:
        """Adds the sums of the layer before, and runs a layer until its rows are sent. Returns
        False if this is not possible here; then nothing was done."""
        following = self._following(layer, state)
        if following is None:
            return False
        log, away, turn = self._log, state.layer_away, self._turn(state)
        sums = None if away is None else self._sums(away, index)
        frames = self._transport.empty_frames(layer, index)
        start = log.now()
        log.enter(Stage.ATTENTION, layer, index)
        rows = [frame.address for frame in frames]
        key = self._transport.key(layer, index)
        try:
            sizes = turn.run(following, key, rows, sums, state.shared_TD)
        except WrongFrameError as error:
            assert away is not None, "only sums can be wrong"
            raise self._transport.wrong_frame(away, index, error.rank) from None
        log.enter(Stage.DISPATCH, layer, index)
        self._transport.send_frames(layer, index, frames, sizes)
        if log.is_on:
            start = self._note(turn, layer, index, away, start)
        self._tap.take(index, turn.expert_ids_TK, turn.weights_TK)
        state.hidden_TD, state.layer_away, state.is_away_by_turn = turn.hidden_TD, layer, True
        state.shared_TD = self._stage.shared(layer, turn.x_TD)
        if state.shared_TD is not None:
            log.add(Stage.SHARED, layer, index, turn.num_rows, start)
        return True

    def run_step(self, first: int, states: Sequence[MicroBatchState]) -> int:
        """Runs as many layers as possible, from `first` on, as one call with the messages between
        them. Returns the number of exchanges whose rows were sent: those of all micro-batches in a
        layer, then those of the next layer. Raises PeerLostError."""
        if not self._lanes.is_usable or self._tap.is_on:
            return 0
        for state in states:
            is_away = state.is_away_by_turn and state.layer_away == first - 1
            if not is_away or self._following(first, state) is None:
                return 0
        if self._layers is None:
            self._layers = BoundLayers.of(self._stage, self._calls, self._step_layers())
        bound, num_batches = self._layers, len(states)
        layers, place = bound.run_from(first), bound.places.get(first, 0)
        if not layers:
            return 0
        turns = [self._turn(state) for state in states]
        shared = [bound.empty_shared(state.hidden_TD) for state in states]
        end, error = self._lanes.run(
            lambda lanes: bound.call(
                place,
                len(layers),
                first - 1,
                turns,
                [state.plans for state in states],
                lanes,
                self._transport.step_key(first),
                [state.shared_TD for state in states],
                shared,
            ),
            lambda: bound.call.place,
            layers,
            num_batches,
            lambda done: self._transport.leg(  # the sums that are waited for
                first - 1 + done // num_batches, done % num_batches
            ),
        )
        for index, (state, turn) in enumerate(zip(states, turns, strict=True)):
            num_passed = end.done // num_batches + (index < end.done % num_batches)
            if num_passed:
                last = state.layer_away = first + num_passed - 1
                state.hidden_TD = turn.hidden_TD
                state.shared_TD = shared[index] if self._stage.has_mlp(last) else None
                self._transport.expect(last, index, turn.counts)
        self._transport.sent(end.done)
        if error is not None:
            raise error
        return end.done

    def _step_layers(self) -> list[StepLayer]:
        """Returns the layers that a call of several may run."""
        found = []
        for layer, weights in enumerate(self._stage.layers):
            front, copies, mlp = self._stage.front(layer), None, weights.mlp
            if front is None or (mlp is not None and mlp.gate is not None):
                continue  # a dense layer has no copies of experts
            split = self._transport.split
            if split is not None and self._shape.num_ranks > 1:
                copies = self._copies_of(layer, split)
                if copies is None:
                    continue
            turn = TurnLayer(front, self._cache.layers[layer], None, copies)
            bank = None if mlp is None else mlp.bank
            found.append((layer, turn, self._shape_of[layer], bank))
        return found

    def finish(self, index: int, state: MicroBatchState) -> None:
        """Adds the sums of a layer whose rows `run` has sent."""
        turn, layer = state.turn, state.layer_away
        assert turn is not None and layer is not None, "rows are away"
        sums, start = self._sums(layer, index), self._log.now()
        self._log.enter(Stage.COMBINE, layer, index)
        try:
            turn.add(sums, state.shared_TD)
        except WrongFrameError as error:
            raise self._transport.wrong_frame(layer, index, error.rank) from None
        state.hidden_TD = turn.hidden_TD
        state.layer_away = state.shared_TD = None
        state.is_away_by_turn = False
        self._log.add(Stage.COMBINE, layer, index, turn.num_rows, start)

    def _following(self, layer: int, state: MicroBatchState) -> TurnLayer | None:
        """Returns what a turn needs to know of a layer; None if it is not for a turn."""
        if state.pieces is not None:  # it may have no inputs yet
            return None
        front = self._stage.front(layer)
        has_adapters = state.inputs.adapters is not None or isinstance(state.inputs, PartedInputs)
        if front is None or has_adapters:
            return None
        if state.layer_away is not None and not state.is_away_by_turn:
            return None
        split = self._transport.split
        if split is not self._split:
            self._split, self._copies, self._layers = split, {}, None
        copies = None
        if split is not None and self._shape.num_ranks > 1:
            copies = self._copies_of(layer, split)
            if copies is None:
                return None
        if not state.plans:  # a shape takes long to look up
            state.plans = [state.inputs.attention[shape] for shape in self._shapes]
        plan = state.plans[self._shape_of[layer]]
        return TurnLayer(front, self._cache.layers[layer], plan, copies)

    def _copies_of(self, layer: int, split: RowSplit) -> Any | None:
        if layer not in self._copies:
            table = split.copies(layer)
            self._copies[layer] = None if table is None else self._calls.copies(table)
        return self._copies[layer]

    def _turn(self, state: MicroBatchState) -> AttentionTurn:
        turn, inputs = state.turn, state.inputs
        if turn is None:
            turn = state.turn = self._calls.turn(
                self._shape,
                state.hidden_TD,
                inputs.positions,
                inputs.kv_rows,
                keeps_choices=self._tap.is_on,
            )
        turn.hidden_TD = state.hidden_TD
        return turn

    def _sums(self, layer: int, index: int) -> list[int | None]:
        frames = self._transport.await_frames(layer, index)
        return [None if frame is None else frame.address for frame in frames]

    def _note(
        self, turn: AttentionTurn, layer: int, index: int, away: int | None, start: int
    ) -> int:
        """Records the stages of a turn that began at `start`; returns the end of the last one."""
        log, num_rows = self._log, turn.num_rows
        summed, attended, _ = (start + each for each in turn.times)
        if away is not None:
            log.add(Stage.COMBINE, away, index, num_rows, start, summed)
        log.add(Stage.ATTENTION, layer, index, num_rows, summed, attended)
        return log.add(Stage.DISPATCH, layer, index, num_rows, attended)
