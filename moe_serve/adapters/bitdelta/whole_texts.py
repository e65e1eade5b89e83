"""Reads whole texts with a model through whose scales gradients flow.

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.reference.gradient_kernels import FittedScales, GradientKernels
from moe_serve.adapters.adapter_part import WHOLE, LiveModel
from moe_serve.adapters.bitdelta.bitdelta_builder import BitDeltaBuilder
from moe_serve.adapters.bitdelta.tensors import BitDeltaTensors
from moe_serve.adapters.load_rests import LoadRests
from moe_serve.adapters.targets import AdapterTargets
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.adapted_stage import FineTune
from moe_serve.model.stage.adapter_rows import AdapterLayer
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.step_plan import MicroBatch, SequenceSlice

_PAGE_SIZE = 16


class WholeTexts:
    """A model in fp32 that reads whole texts from their start and keeps no KV cache."""

    def __init__(
        self,
        stage: AttentionStage,
        experts: ExpertStage,
        most_tokens: int,
        layers: Sequence[AdapterLayer] | None = None,
    ) -> None:
        """`layers`: the changes of an adapter."""
        self._stage, self._experts, self._layers = stage, experts, layers
        self._device = stage.embedding.device
        num_pages = -(-most_tokens // _PAGE_SIZE)
        self._cache = KVCache(stage.spec, num_pages, _PAGE_SIZE, torch.float32, self._device)
        self._pages = tuple(range(1, num_pages + 1))  # one for all texts, as no cache is written

    def logits(self, texts: Sequence[NDArray[np.int64]]) -> Tensor:
        """Returns the logits of all tokens, text after text, [T, V]."""
        stage = self._stage
        slices = [
            SequenceSlice(i, 0, tokens, self._pages[: -(-len(tokens) // _PAGE_SIZE)], 0)
            for i, tokens in enumerate(texts)
        ]
        inputs = stage.make_inputs(MicroBatch(tuple(slices)), self._cache, self._device)
        hidden_TD = stage.embed(inputs)
        for layer in range(stage.spec.num_layers):
            done = stage.advance(layer, hidden_TD, inputs, self._cache)
            hidden_TD, routed = done.hidden_TD, done.routed
            if routed is None:
                continue
            rows = routed.rows
            choices = rows.x_TD, rows.expert_ids_TK, rows.weights_TK
            added = self._additions(layer, len(rows.x_TD))
            out_TD = self._experts.layer(layer).partial(*choices, added).float()
            hidden_TD = stage.add(hidden_TD, out_TD, stage.shared(layer, routed.x_TD))
        return stage.logits(hidden_TD, torch.arange(len(hidden_TD), device=self._device))

    def _additions(self, layer: int, num_rows: int) -> RowAdditions | None:
        own = None if self._layers is None else self._layers[layer].experts
        if own is None or own.additions is None:
            return None
        return RowAdditions(np.zeros(num_rows, dtype=np.int64), [own.additions])


def open_model(folder: Path, most_tokens: int) -> WholeTexts:
    """Opens a checkpoint."""
    none = FittedScales(torch.zeros(1), torch.ones(1))
    loader = gradient_loader(folder, none)
    return WholeTexts(loader.attention_stage(most_tokens), loader.expert_stage(), most_tokens)


def open_adapted(loader: ModelLoader, tensors: BitDeltaTensors, most_tokens: int) -> WholeTexts:
    """Opens a base model with an adapter whose scales are indices into those of the kernels."""
    base = loader.attention_stage(most_tokens)
    live = LiveModel(attention=base)
    built = BitDeltaBuilder(loader, AdapterTargets(loader), WHOLE, live, LoadRests()).built(tensors)
    assert isinstance(built, FineTune), "the process has all of the model"
    return WholeTexts(built.stage, loader.expert_stage(), most_tokens, built.layers)


def gradient_loader(folder: Path, scales: FittedScales) -> ModelLoader:
    """Returns a loader of a checkpoint in fp32, with kernels through which gradients flow."""
    loader = ModelLoader(
        folder,
        dtype=torch.float32,
        kernels="torch",
        expert_weights="dequantised",
        linear_weights="dequantised",
    )
    loader.kernels = GradientKernels(scales)
    return loader
