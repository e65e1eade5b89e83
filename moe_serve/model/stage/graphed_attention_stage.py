"""The attention stage with a recording for every layer and size of a decode micro-batch.

For ranks whose layers are cut by a transport: there no graph can hold a whole step. What the stage
does between two visits to the experts is one replay, and so is the shared expert; everything else,
and every micro-batch that is not recorded, goes to the wrapped stage.

Callers see tensors of the micro-batch's own rows: padding stays inside. T rows of a micro-batch,
B rows of a recording, D model width, K choices per row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from experts.routed_rows import RoutedRows
from moe_kernels.graphs.graph_recorder import Recorder, Recording
from moe_kernels.graphs.graph_sizes import GraphSize, GraphSizes
from moe_kernels.graphs.row_graphs import RowGraphs
from moe_kernels.interface.kernels import Kernels
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention_stage import Advance, AttentionStage, Routed
from moe_serve.model.stage.static_inputs import (
    PackedInputs,
    StaticInputs,
    is_decode,
    make_static_inputs,
    num_keys,
)
from moe_serve.model.stage.step_inputs import StepInputs
from moe_serve.model.step_plan import MicroBatch


@dataclass(frozen=True, slots=True)
class GraphedInputs(StepInputs):
    """A micro-batch that is replayed: the tensors are its own rows', `packed` is the padded whole.

    It has no attention plan of its own.
    """

    size: GraphSize
    packed: PackedInputs


@dataclass(slots=True)
class _Graph:
    """The recordings of one size; `loaded` is the micro-batch that its inputs hold now."""

    static: StaticInputs
    layers: list[Recording] = field(default_factory=list)
    loaded: GraphedInputs | None = None


class _Rows:
    """What all recordings read and write beside their inputs: the first rows of these."""

    def __init__(self, spec: ModelSpec, num_rows: int, dtype: torch.dtype, device: torch.device):
        shape_BK = (num_rows, spec.router.shape.top_k)
        self.hidden_BD, self.out_BD, self.x_BD, self.sent_BD = (
            torch.zeros(num_rows, spec.width, dtype=dtype, device=device) for _ in range(4)
        )
        self.ids_BK = torch.zeros(shape_BK, dtype=torch.int64, device=device)
        self.weights_BK = torch.zeros(shape_BK, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.hidden_BD, self.out_BD, self.x_BD, self.sent_BD, self.ids_BK, self.weights_BK
        )  # fmt: skip

    def store(self, advance: Advance) -> None:
        """A recording's last act."""
        count, routed = len(advance.hidden_TD), advance.routed
        self.out_BD[:count].copy_(advance.hidden_TD)
        if routed is None:
            return
        self.x_BD[:count].copy_(routed.x_TD)
        if routed.rows.x_TD is not routed.x_TD:
            self.sent_BD[:count].copy_(routed.rows.x_TD)
        self.ids_BK[:count].copy_(routed.rows.expert_ids_TK)
        self.weights_BK[:count].copy_(routed.rows.weights_TK)

    def advance(self, count: int, is_sparse: bool, is_weighing_inputs: bool) -> Advance:
        """The first rows of what was stored, copied: the next replay stores there again."""
        hidden_TD = self.out_BD[:count].clone()
        if not is_sparse:
            return Advance(hidden_TD, None)
        x_TD = self.x_BD[:count].clone()
        sent_TD = self.sent_BD[:count].clone() if is_weighing_inputs else x_TD
        ids_TK, weights_TK = self.ids_BK[:count].clone(), self.weights_BK[:count].clone()
        return Advance(hidden_TD, Routed(x_TD, RoutedRows(sent_TD, ids_TK, weights_TK)))


class GraphedAttentionStage:
    """As `AttentionStage`, to the pipeline."""

    def __init__(
        self,
        stage: AttentionStage,
        cache: KVCache,
        recorder: Recorder,
        sizes: Iterable[GraphSize],
        max_positions: int,
    ) -> None:
        """Record every layer in every size that the kernels have a plan for, the largest first."""
        self.spec: ModelSpec = stage.spec
        self.kernels: Kernels = stage.kernels
        self._stage, self._cache = stage, cache
        self._graphs: dict[GraphSize, _Graph] = {}
        sizes = sorted(sizes, reverse=True)
        with torch.inference_mode():
            self._rows = _Rows(self.spec, sizes[0].num_rows, stage.dtype, cache.device)
            for size in sizes:
                static = make_static_inputs(size, cache, self.spec, self.kernels, max_positions)
                if static is not None:
                    self._graphs[size] = self._record(static, recorder)
            self._sizes = GraphSizes(self._graphs)
            self._shared = self._record_shared(recorder)

    def _record(self, static: StaticInputs, recorder: Recorder) -> _Graph:
        graph, hidden_BD = _Graph(static), self._rows.hidden_BD[: static.size.num_rows]

        def step_of(layer: int) -> Callable[[], None]:
            def step() -> None:
                self._rows.store(self._stage.advance(layer, hidden_BD, static.inputs, self._cache))

            return step

        for layer in range(self.spec.num_layers):
            fixed = recorder.record(step_of(layer), lambda: (*static.tensors, *self._rows.tensors))
            graph.layers.append(fixed)
        return graph

    def _record_shared(self, recorder: Recorder) -> RowGraphs | None:
        def function_of(layer: int) -> Callable[[Tensor], Tensor]:
            def shared(x_BD: Tensor) -> Tensor:
                out_BD = self._stage.shared(layer, x_BD)
                assert out_BD is not None, f"layer {layer} has no shared expert"
                return out_BD

            return shared

        functions: dict[Hashable, Callable[[Tensor], Tensor]] = {
            layer: function_of(layer) for layer in self._stage.layers_with_shared_expert
        }
        if not functions or not self._graphs:
            return None
        inputs_BD = torch.zeros_like(self._rows.x_BD[: self._sizes.rows[-1]])
        out_BD = torch.zeros_like(inputs_BD, dtype=torch.float32)
        return RowGraphs(functions, self._sizes.rows, (inputs_BD,), out_BD, recorder)

    def make_inputs(self, batch: MicroBatch, cache: KVCache, device: torch.device) -> StepInputs:
        """For a replay, if the micro-batch is decode of a recorded size."""
        assert cache is self._cache, "recordings read and write the cache that they were made with"
        size = self._sizes.choose(len(batch.slices), num_keys(batch)) if is_decode(batch) else None
        if size is None:
            return self._stage.make_inputs(batch, cache, device)
        static = self._graphs[size].static
        packed = static.pack(batch.slices)
        packed = replace(packed, numbers=packed.numbers.to(device, non_blocking=True))
        own = static.own_inputs(packed)
        return GraphedInputs(
            own.token_ids, own.positions, own.kv_rows, own.logit_rows, own.attention, size, packed
        )

    def embed(self, inputs: StepInputs) -> Tensor:
        return self._stage.embed(inputs)

    def advance(self, layer: int, hidden_TD: Tensor, inputs: StepInputs, cache: KVCache) -> Advance:
        """A layer up to its routed experts."""
        if not isinstance(inputs, GraphedInputs):
            return self._stage.advance(layer, hidden_TD, inputs, cache)
        graph, count = self._graphs[inputs.size], len(hidden_TD)
        if graph.loaded is not inputs:
            graph.static.load(inputs.packed)
            graph.loaded = inputs
        self._rows.hidden_BD[:count].copy_(hidden_TD)
        graph.layers[layer].replay()
        is_sparse = self.spec.layers[layer].is_sparse
        return self._rows.advance(count, is_sparse, self.spec.router.is_weighing_inputs)

    def shared(self, layer: int, x_TD: Tensor) -> Tensor | None:
        if self._shared is None or layer not in self._stage.layers_with_shared_expert:
            return self._stage.shared(layer, x_TD)
        out_TD = self._shared.run(layer, x_TD)
        return self._stage.shared(layer, x_TD) if out_TD is None else out_TD

    def add(self, hidden_TD: Tensor, out_TD: Tensor, more_TD: Tensor | None = None) -> Tensor:
        return self._stage.add(hidden_TD, out_TD, more_TD)

    def logits(self, hidden_TD: Tensor, rows: Tensor) -> Tensor:
        return self._stage.logits(hidden_TD, rows)
