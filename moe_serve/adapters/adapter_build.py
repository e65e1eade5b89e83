"""Builds an adapter's weights, in the form that steps use, from the matrices of its files.

A LoRA of attention stays two small matrices. A LoRA of experts is merged into copies of these
experts, as the kernels of experts have no place for an addition before the activation; so it has
the bits, and takes the memory, of a fine-tune of whole experts (ESFT).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_kernels.interface.kernels import ExpertBank, ExpertWeights
from moe_serve.adapters.adapter import AdapterKind
from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.esft import read_esft
from moe_serve.adapters.low_rank import make_low_rank
from moe_serve.adapters.peft_config import read_peft_config
from moe_serve.adapters.peft_lora import LowRankMatrices, read_lora
from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.manifest import feed_forward_table
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.adapter_rows import AdapterExperts, AdapterLayer, AdapterWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAdapter:
    """The weights, and what a list of adapters says about them."""

    weights: AdapterWeights
    kind: AdapterKind
    rank: int


BuildAdapter = Callable[[AdapterFiles], BuiltAdapter]


@dataclass(slots=True)
class _LayerParts:
    """Holds the changes of an adapter in one layer, by part."""

    attention: dict[str, LowRankMatrices] = field(default_factory=dict)
    mlp: dict[str, Tensor] = field(default_factory=dict)  # whole matrices, or additions
    experts: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def put(self, target: AdaptedMatrix, matrix: Tensor) -> None:
        """Takes the matrix of an expert or MLP, or the addition to it."""
        parts = self.mlp if target.kind == "mlp" else self.experts.setdefault(target.expert, {})
        parts[target.part] = matrix


class AdapterBuilder:
    """Builds adapters of one base model."""

    def __init__(self, loader: ModelLoader, max_rank: int) -> None:
        self._loader, self._max_rank = loader, max_rank
        self._targets = AdapterTargets(loader)
        self._base = loader.live_experts()

    def build(self, files: AdapterFiles) -> BuiltAdapter:
        """Reads an adapter's matrices. Raises CheckpointError with the tensor or the field."""
        layers = [_LayerParts() for _ in range(self._loader.spec.num_layers)]
        rank = 0
        if files.is_lora:
            config = read_peft_config(files.config_path, files.config, self._max_rank)
            for matrices in read_lora(files, config, self._targets):
                target, rank = matrices.target, max(rank, len(matrices.a_RK))
                if target.kind == "attention":
                    layers[target.layer].attention[target.part] = matrices
                else:
                    layers[target.layer].put(target, matrices.delta())
        else:
            for target, matrix in read_esft(files, self._targets).items():
                layers[target.layer].put(target, matrix)
        built = [self._layer(*item, files) for item in enumerate(layers)]
        weights = AdapterWeights(
            digest=files.digest,
            layers=tuple(layer for layer, _ in built),
            num_bytes=sum(num_bytes for _, num_bytes in built),
        )
        return BuiltAdapter(weights=weights, kind="lora" if files.is_lora else "esft", rank=rank)

    def _layer(
        self, layer: int, parts: _LayerParts, files: AdapterFiles
    ) -> tuple[AdapterLayer, int]:
        linears, num_bytes = make_low_rank(self._loader, layer, parts.attention)
        experts = {
            expert: self._changed(
                self._base.read(layer, expert), changes, files, f"experts of layer {layer}"
            )
            for expert, changes in sorted(parts.experts.items())
        }
        mlp = self._mlp(layer, parts.mlp, files)
        for each in (*experts.values(), *(() if mlp is None else (mlp,))):
            num_bytes += each.num_bytes
        return AdapterLayer(
            linears=linears,
            experts=self._experts(experts) if experts else None,
            mlp=None if mlp is None else self._bank([mlp]),
        ), num_bytes

    def _mlp(
        self, layer: int, changes: Mapping[str, Tensor], files: AdapterFiles
    ) -> ExpertWeights | None:
        if not changes:
            return None
        table = feed_forward_table(self._loader.names, self._loader.spec, layer)
        owner = "shared." if "router" in table else "dense."
        own = {k.removeprefix(owner): v for k, v in table.items() if k.startswith(owner)}
        return self._changed(self._base.dense(own), changes, files, f"the MLP of layer {layer}")

    def _experts(self, experts: Mapping[int, ExpertWeights]) -> AdapterExperts:
        num_experts = self._loader.spec.router.num_experts
        is_own_E = torch.zeros(num_experts + 1, dtype=torch.bool)
        is_own_E[torch.tensor(sorted(experts))] = True
        bank = self._bank([experts.get(expert) for expert in range(num_experts)])
        return AdapterExperts(bank=bank, is_own_E=is_own_E.to(self._loader.device))

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


def _split(changes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the changes with gate and up apart."""
    fused = changes.get("gate_up")
    if fused is None:
        return changes
    gate, up = fused.chunk(2)
    return {**changes, "gate": gate, "up": up}
