"""Rounds the matrices of one layer after the other, on texts or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.interface.kernels import ExpertBank
from moe_kernels.interface.quantised_matrix import as_floats
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import Stored
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.load.weight_reader import WeightSource, open_checkpoint
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.quantize.expert_calibration import (
    ExpertCalibration,
    ExpertReport,
    GptqSettings,
    round_mlp,
)
from moe_serve.quantize.layer_runs import HiddenStates, base_bank, layer_stage
from moe_serve.quantize.quantise_plan import INT8_ROWS, PlannedLayer, PlannedMatrix
from moe_serve.quantize.rounded_matrix import RoundedMatrix
from moe_serve.quantize.rtn import rounded
from moe_serve.quantize.substituted_weights import RoundedExperts, SubstitutedWeights


@dataclass(frozen=True, slots=True)
class RoundedLayer:
    """The rounded matrices of a layer by name, and how each routed expert was rounded."""

    layer: int
    planned: PlannedLayer
    matrices: Mapping[str, RoundedMatrix]
    experts: tuple[ExpertReport, ...]


class LayerQuantizer:
    """Opens a checkpoint twice: as it is (`base`), and with the rounded matrices of one layer."""

    def __init__(self, folder: Path, num_threads: int, max_positions: int) -> None:
        self.base = ModelLoader(folder, num_threads=num_threads)
        self.max_positions = max_positions
        self._rounded: dict[str, RoundedMatrix] = {}

        def substituted(folder: Path, config: HFConfig) -> WeightSource:
            return SubstitutedWeights(open_checkpoint(folder, config), self._rounded)

        self._changed = ModelLoader(folder, num_threads=num_threads, open_weights=substituted)
        self._experts = self.base.live_experts()

    def round(
        self,
        layer: int,
        planned: PlannedLayer,
        states: HiddenStates | None = None,
        settings: GptqSettings | None = None,
    ) -> RoundedLayer:
        """Rounds a layer to nearest, or, if given `states` and `settings`, for these inputs.

        `states` are taken through the layer, with its rounded matrices.
        """
        self._rounded.clear()
        for matrix in planned.attention:
            self._rounded[matrix.name] = self._nearest(matrix)
        reports: list[ExpertReport] = []
        if states is None or settings is None:
            self._round_to_nearest(layer, planned)
        else:
            stage = layer_stage(self._changed, layer, self.max_positions)
            states.attend(stage)
            reports = self._round_for_inputs(layer, planned, states, stage, settings)
        result = RoundedLayer(layer, planned, dict(self._rounded), tuple(reports))
        if states is not None and settings is not None:
            states.feed_forward(self.stage(result), self.bank(result))
        return result

    def head(self, matrix: PlannedMatrix) -> RoundedMatrix:
        """Rounds the output head."""
        return self._nearest(matrix)

    def with_head(self, name: str, head: RoundedMatrix) -> ModelLoader:
        """Returns a loader whose head is the rounded one."""
        self._rounded.clear()
        self._rounded[name] = head
        return self._changed

    def stage(self, result: RoundedLayer) -> AttentionStage:
        """Loads a rounded layer's attention, router and dense MLP."""
        self._rounded.clear()
        self._rounded.update(result.matrices)
        return layer_stage(self._changed, result.layer, self.max_positions)

    def bank(self, result: RoundedLayer) -> ExpertBank | None:
        """Loads a rounded layer's routed experts; None for a dense layer."""
        if not result.planned.experts:
            return base_bank(self.base, result.layer)
        experts = RoundedExperts(
            self._experts,
            result.layer,
            result.planned.experts,
            dict(result.matrices),
            self.base.dtype,
        )
        return self.base.kernels.experts(experts, self.base.spec.activation)

    def _nearest(self, matrix: PlannedMatrix) -> RoundedMatrix:
        return rounded(self._read(matrix), matrix.storage, self.base.dtype)

    def _read(self, matrix: PlannedMatrix) -> Tensor:
        return self.base.tensor(Stored(matrix.name, matrix.shape))

    def _round_to_nearest(self, layer: int, planned: PlannedLayer) -> None:
        for matrix in planned.mlp.values():
            self._rounded[matrix.name] = self._nearest(matrix)
        for expert, names in enumerate(planned.experts):
            weights = self._experts.read(layer, expert)
            parts = (weights.gate, weights.up, weights.down)
            for matrix, weight in zip(names.matrices, parts, strict=True):
                floats = as_floats(weight, torch.float32)
                self._rounded[matrix.name] = rounded(floats, matrix.storage, self.base.dtype)

    def _round_for_inputs(
        self,
        layer: int,
        planned: PlannedLayer,
        states: HiddenStates,
        stage: AttentionStage,
        settings: GptqSettings,
    ) -> list[ExpertReport]:
        inputs, activation = states.expert_inputs(stage), self.base.spec.activation
        for matrix in planned.mlp.values():
            self._rounded[matrix.name] = self._nearest(matrix)
        storage = next((matrix.storage for matrix in planned.mlp.values()), INT8_ROWS)
        if storage.group:
            weights = {key: self._read(matrix).float() for key, matrix in planned.mlp.items()}
            found = round_mlp(weights, inputs.x_TD, activation, storage, settings.scale_dtype)
            self._rounded.update({planned.mlp[key].name: each for key, each in found.items()})
        reports: list[ExpertReport] = []
        if planned.experts and inputs.routed is not None:
            calibration = ExpertCalibration(inputs.routed, activation, settings)
            for expert, names in enumerate(planned.experts):
                weights_of = self._experts.read(layer, expert)
                matrices, report = calibration.round(expert, weights_of, names)
                self._rounded.update(matrices)
                reports.append(report)
        return reports
