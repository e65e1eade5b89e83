"""A pipeline whose decode steps are replayed: the choice between a recording and the layers."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.graphs.decode_graphs import DecodeGraphs
from moe_serve.pipeline.pipeline import Pipeline

_log = logging.getLogger(__name__)


class GraphedPipeline:
    """As `Pipeline`, to the engine. A replay that fails is the last one: that step and all later
    ones run layer by layer."""

    def __init__(self, pipeline: Pipeline, graphs: DecodeGraphs) -> None:
        self._pipeline = pipeline
        self._graphs: DecodeGraphs | None = graphs

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Compute a step -> the wanted logits [R, V] in fp32, slice after slice."""
        logits = None
        if self._graphs is not None and plan.routes is None:  # a replay shows no layer
            try:
                logits = self._graphs.run(plan)
            except RuntimeError as error:
                # Running a step again is harmless: it writes the same keys and values.
                _log.warning("a CUDA graph failed, steps run without from now on: %s", error)
                self._graphs = None
        return self._pipeline.run(plan) if logits is None else logits

    def clear_pages(self, pages: list[int]) -> None:
        self._pipeline.clear_pages(pages)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        self._pipeline.copy_pages(pairs)

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return self._pipeline.finite_pages(pages)
