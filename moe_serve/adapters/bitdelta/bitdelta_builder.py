"""Builds the weights of a BitDelta adapter: an attention stage, and experts with signs."""

from __future__ import annotations

from moe_kernels.interface.signed_kernels import SignedKernels
from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.adapter_part import AdapterPart, LiveModel
from moe_serve.adapters.bitdelta.one_pass import prepare, with_mlps
from moe_serve.adapters.bitdelta.signed_experts import SignedExperts
from moe_serve.adapters.bitdelta.signed_stage import SignedStages
from moe_serve.adapters.bitdelta.tensors import (
    BitDeltaTensors,
    full_tensors,
    read_bitdelta,
    sign_modules,
)
from moe_serve.adapters.load_rests import LoadRests
from moe_serve.adapters.targets import AdapterTargets
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.manifest import feed_forward_table
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.adapted_stage import FineTune
from moe_serve.model.stage.adapter_rows import AdapterLayer, AdapterWeights


class BitDeltaBuilder:
    """Builds the part of BitDelta adapters that a process holds."""

    def __init__(
        self,
        loader: ModelLoader,
        targets: AdapterTargets,
        part: AdapterPart,
        live: LiveModel,
        rests: LoadRests,
    ) -> None:
        self._loader, self._part, self._live = loader, part, live
        self._modules, self._full = sign_modules(targets), full_tensors(loader)
        self._experts: SignedExperts | None = None
        self._stages: SignedStages | None = None
        if isinstance(loader.kernels, SignedKernels):
            self._experts = SignedExperts(loader, loader.kernels, rests)
            if live.attention is not None:
                self._stages = SignedStages(loader, loader.kernels, live, self._experts)

    def build(self, files: AdapterFiles) -> AdapterWeights:
        """Reads an adapter. Raises CheckpointError with the tensor or the field."""
        if self._experts is None:
            raise CheckpointError(
                f"{files.folder} is a BitDelta adapter, for which the kernels "
                f"{self._loader.kernels.name} have no products: use --kernels native, torch or "
                "triton."
            )
        return self.built(self.read(files))

    def read(self, files: AdapterFiles) -> BitDeltaTensors:
        """Checks an adapter's files. Raises CheckpointError."""
        return read_bitdelta(files, self._modules, self._full)

    def built(self, tensors: BitDeltaTensors) -> AdapterWeights:
        """Builds an adapter from its tensors. Raises CheckpointError."""
        assert self._experts is not None, "kernels with signs"
        files = tensors.files
        self._check_routers(tensors)
        layers, num_bytes = [], 0
        for layer in range(self._loader.spec.num_layers):
            held = self._part.experts
            own = None if held is None else held.get(layer, ())
            experts, expert_bytes = self._experts.routed(layer, tensors, own)
            layers.append(AdapterLayer(linears={}, experts=experts))
            num_bytes += expert_bytes
        if self._stages is None or not self._part.has_attention:
            return AdapterWeights(
                digest=files.digest,
                layers=tuple(layers),
                num_bytes=num_bytes,
                kind="bitdelta",
                rank=0,
            )
        stage, stage_bytes = self._stages.stage(tensors)
        base = self._stages.base
        common = with_mlps(layers, base, stage)
        prepared = prepare(self._loader.kernels.adapters, base, stage, common)
        return FineTune(
            digest=files.digest,
            layers=tuple(layers) if prepared is None else common,
            num_bytes=num_bytes + stage_bytes,
            kind="bitdelta",
            rank=0,
            stage=stage,
            prepared=prepared,
        )

    def _check_routers(self, tensors: BitDeltaTensors) -> None:
        """Raises CheckpointError for other routers, if expert ranks route with those of the base
        model."""
        if not self._live.is_routing:
            return
        loader = self._loader
        for layer in range(loader.spec.num_layers):
            table = feed_forward_table(loader.names, loader.spec, layer)
            for key in ("router", "router_bias", "selection_bias"):
                if key in table and table[key].name in tensors.full:
                    raise CheckpointError(
                        f"{tensors.files.folder} changes {table[key].name}, but expert ranks route "
                        "here: set cluster.router to 'attention'."
                    )
