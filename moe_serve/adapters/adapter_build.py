"""Builds an adapter's weights, in the form that steps use, from the matrices of its files.

A LoRA of attention stays two small matrices. So does a LoRA of experts (routed or shared) and of
dense MLPs, if the kernels can add it before the activation. Otherwise, or if the configuration says
so, it is merged into copies of the experts: these have the bits of a fine-tune of whole experts
(ESFT), and take as much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experts.virtual_experts import AdapterExperts
from moe_kernels.interface.kernels import ExpertBank, ExpertWeights, Kernels
from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.adapter_part import WHOLE, AdapterPart, LiveModel
from moe_serve.adapters.bitdelta.bitdelta_builder import BitDeltaBuilder
from moe_serve.adapters.esft import read_esft
from moe_serve.adapters.expert_additions import AdditionMaker
from moe_serve.adapters.load_rests import LoadRests
from moe_serve.adapters.low_rank import make_low_rank
from moe_serve.adapters.peft_config import read_peft_config
from moe_serve.adapters.peft_lora import LowRankMatrices, read_lora
from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.model.checkpoint.manifest import feed_forward_table
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.adapter_rows import AdapterLayer, AdapterWeights

BuildAdapter = Callable[[AdapterFiles], AdapterWeights]


@dataclass(slots=True)
class _LayerParts:
    """Holds the changes of an adapter in one layer, by part."""

    attention: dict[str, LowRankMatrices] = field(default_factory=dict)
    mlp: dict[str, Tensor] = field(default_factory=dict)  # whole matrices, or matrices to merge
    mlp_additions: dict[str, LowRankMatrices] = field(default_factory=dict)
    experts: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # without matrices: away
    additions: dict[int, dict[str, LowRankMatrices]] = field(default_factory=dict)  # likewise

    def put(self, target: AdaptedMatrix, matrix: Tensor | None) -> None:
        """Takes the matrix of an expert or MLP, or the addition to it; None: it is not held."""
        is_expert = target.kind == "expert"
        parts = self.experts.setdefault(target.expert, {}) if is_expert else self.mlp
        if matrix is not None:
            parts[target.part] = matrix

    def add(self, target: AdaptedMatrix, added: LowRankMatrices | None) -> None:
        """Keeps an addition that is not merged; None: this process does not hold the expert."""
        is_expert = target.kind == "expert"
        parts = self.additions.setdefault(target.expert, {}) if is_expert else self.mlp_additions
        if added is not None:
            parts[target.part] = added


class AdapterBuilder:
    """Builds the part of a base model's adapters that a process holds."""

    def __init__(
        self,
        loader: ModelLoader,
        config: AdapterConfig,
        part: AdapterPart = WHOLE,
        live: LiveModel | None = None,
    ) -> None:
        """`live`: the loaded base model, which BitDelta adapters share."""
        self._loader, self._max_rank, self._part = loader, config.max_rank, part
        self._is_merging = is_merging(config, loader.kernels)
        self._targets = AdapterTargets(loader)
        self._base = loader.live_experts()
        self.rests = LoadRests()
        self._bitdelta = BitDeltaBuilder(
            loader, self._targets, part, live or LiveModel(), self.rests
        )

    def build(self, files: AdapterFiles) -> AdapterWeights:
        """Reads an adapter's matrices. Raises CheckpointError with the tensor or the field."""
        self.rests.start_load()
        if files.is_bitdelta:
            return self._bitdelta.build(files)
        layers = [_LayerParts() for _ in range(self._loader.spec.num_layers)]
        rank = 0
        if files.is_lora:
            config = read_peft_config(files.config_path, files.config, self._max_rank)
            for target, added in read_lora(files, config, self._targets, self._part.wants):
                rank = rank if added is None else max(rank, len(added.a_RK))
                self._put(layers[target.layer], target, added)
                self.rests()
        else:
            for target, matrix in read_esft(files, self._targets, self._part.wants).items():
                layers[target.layer].put(target, matrix)
        built = [self._layer(*item, files) for item in enumerate(layers)]
        parts, kernels = tuple(layer for layer, _ in built), self._loader.kernels.adapters
        return AdapterWeights(
            digest=files.digest,
            layers=parts,
            prepared=kernels.adapter([each.parts for each in parts]),
            num_bytes=sum(num_bytes for _, num_bytes in built),
            kind="lora" if files.is_lora else "esft",
            rank=rank,
        )

    def _put(
        self, parts: _LayerParts, target: AdaptedMatrix, added: LowRankMatrices | None
    ) -> None:
        if target.kind == "attention":
            if added is not None:
                parts.attention[target.part] = added
        elif self._is_merging:
            parts.put(target, None if added is None else added.delta())
        else:
            parts.add(target, added)

    def _layer(
        self, layer: int, parts: _LayerParts, files: AdapterFiles
    ) -> tuple[AdapterLayer, int]:
        self.rests()
        linears, num_bytes = make_low_rank(self._loader, layer, parts.attention, self._part.shard)
        experts = {
            expert: self._changed(
                self._base.read(layer, expert), changes, files, f"experts of layer {layer}"
            )
            for expert, changes in sorted(parts.experts.items())
            if changes
        }
        mlp = self._mlp(layer, parts.mlp, files)
        for each in (*experts.values(), *(() if mlp is None else (mlp,))):
            num_bytes += each.num_bytes
        own = self._experts(parts.experts, experts) if parts.experts else None
        if parts.additions:
            own = self._added(parts.additions)
            num_bytes += 0 if own.additions is None else own.additions.num_bytes
        bank = None if mlp is None else self._bank([mlp])
        to_mlp = self._added_to_mlp(parts.mlp_additions) if parts.mlp_additions else None
        num_bytes += 0 if to_mlp is None else to_mlp.num_bytes
        made = AdapterLayer(linears=linears, experts=own, mlp=bank, mlp_additions=to_mlp)
        return made, num_bytes

    def _mlp(
        self, layer: int, changes: Mapping[str, Tensor], files: AdapterFiles
    ) -> ExpertWeights | None:
        if not changes:
            return None
        table = feed_forward_table(self._loader.names, self._loader.spec, layer)
        owner = "shared." if "router" in table else "dense."
        own = {k.removeprefix(owner): v for k, v in table.items() if k.startswith(owner)}
        return self._changed(self._base.dense(own), changes, files, f"the MLP of layer {layer}")

    def _experts(self, own: Collection[int], held: Mapping[int, ExpertWeights]) -> AdapterExperts:
        """`own`: all experts that the adapter has; `held`: those that are here."""
        num_experts = self._loader.spec.router.num_experts
        bank = self._bank([held.get(expert) for expert in range(num_experts)]) if held else None
        return AdapterExperts(bank=bank, is_own_E=self._marked(own))

    def _added(self, additions: Mapping[int, Mapping[str, LowRankMatrices]]) -> AdapterExperts:
        """Returns the additions to a layer's experts. `additions` has all, some without matrices,
        as they are not here."""
        kernels = self._loader.kernels.adapters
        maker = AdditionMaker(self._loader.device, self._loader.dtype)
        held = {}
        for expert, each in additions.items():
            if each:
                held[expert] = maker.expert(each)
                self.rests()
        is_own_E = self._marked(additions)
        made = kernels.expert_additions(held, is_own_E[:-1], self.rests) if held else None
        return AdapterExperts(bank=None, is_own_E=is_own_E, additions=made)

    def _added_to_mlp(self, changes: Mapping[str, LowRankMatrices]) -> Any:
        """Returns the additions to the shared expert or dense MLP, in the columns of this shard."""
        kernels = self._loader.kernels.adapters
        made = AdditionMaker(self._loader.device, self._loader.dtype).expert(changes)
        return kernels.expert_additions(
            {0: self._part.shard.addition(made)}, torch.ones(1, dtype=torch.bool)
        )

    def _marked(self, experts: Collection[int]) -> Tensor:
        """Returns bool [E + 1], true for these experts."""
        is_own_E = torch.zeros(self._loader.spec.router.num_experts + 1, dtype=torch.bool)
        is_own_E[torch.tensor(sorted(experts))] = True
        return is_own_E.to(self._loader.device)

    def _bank(self, experts: list[ExpertWeights | None]) -> ExpertBank:
        return self._loader.kernels.experts(experts, self._loader.spec.activation)

    def _changed(
        self,
        base: ExpertWeights,
        changes: Mapping[str, Tensor],
        files: AdapterFiles,
        what: str,
    ) -> ExpertWeights:
        """Returns an expert with other matrices (ESFT), or with additions to them (LoRA)."""
        gate, up, down = base.gate, base.up, base.down
        if not (isinstance(gate, Tensor) and isinstance(up, Tensor) and isinstance(down, Tensor)):
            raise CheckpointError(
                f"{files.folder} changes {what}, which are packed in few bits here: set "
                "model.expert_weights to 'dequantised' (--expert-weights)."
            )
        self.rests()
        own = _split(changes)
        parts = []
        for key, matrix in (("gate", gate), ("up", up), ("down", down)):
            change = own.get(key)
            if change is None:
                parts.append(matrix.clone())
            elif files.is_lora:
                parts.append((matrix.float() + change.to(matrix.device)).to(matrix.dtype))
            else:
                parts.append(change.to(matrix.device, matrix.dtype))
        biases = (base.gate_bias, base.up_bias, base.down_bias)
        return ExpertWeights(
            *(part.contiguous() for part in parts),
            *(None if bias is None else bias.clone() for bias in biases),
        )


def is_merging(config: AdapterConfig, kernels: Kernels) -> bool:
    """Returns whether LoRAs of experts are merged. Raises ConfigError."""
    is_possible = kernels.adapters.adds_to_experts
    if config.expert_lora == "added" and not is_possible:
        raise ConfigError(
            f"adapters.expert_lora is 'added', but the kernels ({kernels.name}) cannot add a LoRA "
            "to experts: use 'merged' or 'auto'."
        )
    return config.expert_lora == "merged" or not is_possible


def _split(changes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the changes with gate and up apart."""
    fused = changes.get("gate_up")
    if fused is None:
        return changes
    gate, up = fused.chunk(2)
    return {**changes, "gate": gate, "up": up}
