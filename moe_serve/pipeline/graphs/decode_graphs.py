"""Runs decode steps of one micro-batch as recorded graphs, for a pipeline whose stages are local.

    pack (host) -> load (a few small copies) -> replay (embedding, all layers) -> head, not recorded

The head runs after the replay, only for the rows that want logits: its launches cost no time while
the device is busy, and recorded heads would hold [B, V] for every size. B rows of a recording, D
model width, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.graphs.graph_recorder import GraphRecorder, Recording
from moe_kernels.graphs.graph_sizes import GraphSize, GraphSizes
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.step_inputs import (
    StaticInputs,
    is_decode,
    make_static_inputs,
    num_keys,
)
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Sizes, memory and capture time of the recordings."""

    sizes: GraphSizes
    num_recordings: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        rows, contexts = (
            ", ".join(map(str, numbers)) for numbers in (self.sizes.rows, self.sizes.contexts)
        )
        return (
            f"{self.num_recordings} for {rows} rows x {contexts} keys a row "
            f"({self.num_bytes / 2**20:.0f} MiB, captured in {self.seconds:.1f} s)"
        )


class DecodeGraphs:
    """Records all sizes at construction, the largest first; `run` replays the steps that fit."""

    def __init__(
        self,
        pipeline: Pipeline,
        stage: AttentionStage,
        cache: KVCache,
        recorder: GraphRecorder,
        sizes: Iterable[GraphSize],
        max_positions: int,
    ) -> None:
        clock = time.monotonic()
        self._pipeline, self._stage = pipeline, stage
        self._graphs: dict[GraphSize, tuple[StaticInputs, Recording]] = {}
        sizes = sorted(sizes, reverse=True)
        with torch.inference_mode():
            self._hidden_BD = torch.zeros(
                sizes[0].num_rows, stage.spec.width, dtype=stage.dtype, device=cache.device
            )
            for size in sizes:
                static = make_static_inputs(size, cache, stage.spec, stage.kernels, max_positions)
                if static is not None:
                    self._graphs[size] = static, self._record(static, recorder)
        self._sizes = GraphSizes(self._graphs)
        seconds = time.monotonic() - clock
        self.stats = GraphStats(self._sizes, len(self._graphs), recorder.num_bytes, seconds)

    def _record(self, static: StaticInputs, recorder: GraphRecorder) -> Recording:
        def step() -> None:
            (hidden_BD,) = self._pipeline.pass_layers([static.inputs])
            self._hidden_BD[: len(hidden_BD)].copy_(hidden_BD)

        return recorder.record(step, lambda: (*static.tensors, self._hidden_BD))

    def run(self, plan: StepPlan) -> Tensor | None:
        """Returns the step's logits as `Pipeline.run` does; None if no recording has the step's
        size.
        """
        size = self._size_of(plan)
        if size is None:
            return None
        static, recording = self._graphs[size]
        packed = static.pack(plan.micro_batches[0].slices)
        static.load(packed)
        recording.replay()
        rows = static.inputs.logit_rows[: packed.num_logits]
        return self._stage.logits(self._hidden_BD, rows)

    def _size_of(self, plan: StepPlan) -> GraphSize | None:
        if len(plan.micro_batches) != 1 or not is_decode(plan.micro_batches[0]):
            return None
        (batch,) = plan.micro_batches
        return self._sizes.choose(len(batch.slices), num_keys(batch))


_log = logging.getLogger(__name__)


class GraphedPipeline:
    """A pipeline that replays decode steps from recordings and runs all other steps layer by layer.

    After a replay fails, that step and all later ones run layer by layer.
    """

    def __init__(self, pipeline: Pipeline, graphs: DecodeGraphs) -> None:
        self._pipeline = pipeline
        self._graphs: DecodeGraphs | None = graphs

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Computes a step -> the requested logits [R, V] in fp32, slice after slice."""
        logits = None
        # a replay cannot show the choices of each layer, and has no adapters
        if self._graphs is not None and plan.routes is None and not plan.has_adapters:
            try:
                logits = self._graphs.run(plan)
            except RuntimeError as error:
                # Running a step again is harmless: it writes the same keys and values.
                _log.warning("a CUDA graph failed; steps now run without graphs: %s", error)
                self._graphs = None
        return self._pipeline.run(plan) if logits is None else logits

    def clear_pages(self, pages: list[int]) -> None:
        self._pipeline.clear_pages(pages)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        self._pipeline.copy_pages(pairs)

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return self._pipeline.finite_pages(pages)
