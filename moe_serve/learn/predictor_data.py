"""Opens a model for predictors: captures their training data, and reads the weights they need.

T tokens, L layers with routed experts, V vocabulary, K choices, D model width. Texts run layer by
layer and unfused, over whole documents, without requests or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.page_key import model_identity
from moe_serve.config.sections import CacheConfig, ModelConfig
from moe_serve.engine.execute.layer_routers import check_routers, layer_routers
from moe_serve.engine.opened_model import OpenedModel, model_folder
from moe_serve.learn.documents import TextPiece
from moe_serve.model.hub.hub_name import folder_model_name
from moe_serve.model.hub.named_model import local_model
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from routing_predictor.layers.router_residual import RouterWeights
from routing_predictor.traces.trace import PREFILL, RoutingTrace

CaptureProgress = Callable[[int, int], None]  # (tokens done, tokens in all)

_TOKENS_AT_ONCE = 4096
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLayers:
    """Hidden states and choices of the L layers for T tokens, document after document."""

    expert_ids_TLK: NDArray[np.int16]
    before_attention_LTD: Tensor  # the residual stream that enters each layer; fp16, CPU
    before_router_LTD: Tensor  # the same after the layer's attention, before its norm


class HiddenCapture:
    """A model run to capture its hidden states. Owns a cache of `max_tokens` tokens."""

    def __init__(self, stage: AttentionStage, experts: ExpertStage, max_tokens: int) -> None:
        self._stage, self._experts, self._max_tokens = stage, experts, max_tokens
        device = torch.device("cpu")
        page_size = CacheConfig().page_size
        num_pages = -(-max_tokens // page_size) * 2
        self._cache = KVCache(stage.spec, num_pages, page_size, stage.dtype, device)

    def batches(self, documents: Sequence[Tokens]) -> Iterator[list[int]]:
        """Yields indices of documents to run together: at most `max_tokens` tokens, but at least
        one document."""
        batch, size = list[int](), 0
        for index, document in enumerate(documents):
            if batch and size + len(document) > self._max_tokens:
                yield batch
                batch, size = [], 0
            batch.append(index)
            size += len(document)
        if batch:
            yield batch

    @torch.inference_mode()
    def run(self, documents: Sequence[Tokens], *, has_hidden: bool = True) -> CapturedLayers:
        """Passes documents through all layers. Each is read from its start."""
        stage, cache = self._stage, self._cache
        inputs = stage.make_inputs(as_batch(documents, cache.page_size), cache, cache.device)
        hidden_TD = stage.embed(inputs)
        ids, before, between = list[Tensor](), list[Tensor](), list[Tensor]()
        for layer in range(stage.spec.num_layers):
            entering_TD = hidden_TD.half() if has_hidden else None
            advance = stage.advance(layer, hidden_TD, inputs, cache)
            hidden_TD, routed = advance.hidden_TD, advance.routed
            if routed is None:
                continue
            ids.append(routed.rows.expert_ids_TK)
            if entering_TD is not None:
                before.append(entering_TD)
                between.append(hidden_TD.half())
            rows, experts = routed.rows, self._experts.layer(layer)
            out_TD = experts.total(rows.x_TD, rows.expert_ids_TK, rows.weights_TK)
            hidden_TD = stage.add(hidden_TD, out_TD, stage.shared(layer, routed.x_TD))
        return CapturedLayers(
            expert_ids_TLK=torch.stack(ids, 1).to(torch.int16).numpy(),
            before_attention_LTD=torch.stack(before) if before else torch.empty(0),
            before_router_LTD=torch.stack(between) if between else torch.empty(0),
        )


def as_batch(documents: Sequence[Tokens], page_size: int) -> MicroBatch:
    """Lays whole documents side by side on pages of their own, from page 1 on."""
    slices, page = [], 1
    for index, tokens in enumerate(documents):
        num_pages = -(-len(tokens) // page_size)
        slices.append(
            SequenceSlice(
                sequence_id=index,
                start=0,
                token_ids=tokens,
                page_table=tuple(range(page, page + num_pages)),
                num_logits=0,
            )
        )
        page += num_pages
    return MicroBatch(tuple(slices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The routing of texts, and the hidden states around it if requested."""

    trace: RoutingTrace
    before_attention_LTD: Tensor | None  # fp16, see HiddenCapture
    before_router_LTD: Tensor | None


class PredictorModel:
    """A checkpoint on the CPU, fetched first if it is named. Weights are read on first use."""

    def __init__(self, model: str | None, num_threads: int = 1) -> None:
        config = ModelConfig(path=local_model(model), device="cpu")
        self.folder: Path = model_folder(config)
        cpu = torch.device("cpu")
        self._loader = OpenedModel.open(self.folder, config, num_threads, cpu).loader
        self.spec = self._loader.spec
        self.name = folder_model_name(self.folder.resolve())
        self.identity = model_identity(self.folder).hex()
        self.layers = tuple(i for i, layer in enumerate(self.spec.layers) if layer.is_sparse)

    @property
    def max_piece(self) -> int:
        """The longest text, in tokens, that is read at once."""
        return min(self.spec.max_positions, _TOKENS_AT_ONCE)

    def embedding(self) -> Tensor:
        """Returns the embedding [V, D], as stored."""
        return self._loader.embedding()

    def routers(self) -> list[RouterWeights]:
        """Returns norm and router of each layer with routed experts. Raises ConfigError like
        `capture`."""
        check_routers(self.spec, self.name)
        return layer_routers(self._loader)

    def capture(
        self, pieces: Sequence[TextPiece], *, has_hidden: bool, progress: CaptureProgress
    ) -> Captured:
        """Runs texts through the model. Raises ConfigError if hidden states are requested but the
        model's routers cannot be predicted from them.
        """
        if has_hidden:
            check_routers(self.spec, self.name)
        stage = self._loader.attention_stage(self.max_piece)
        capture = HiddenCapture(stage, self._loader.expert_stage(), _TOKENS_AT_ONCE)
        texts = [piece.tokens for piece in pieces]
        total, done, parts = sum(map(len, texts)), 0, []
        for batch in capture.batches(texts):
            parts.append(capture.run([texts[i] for i in batch], has_hidden=has_hidden))
            done += len(parts[-1].expert_ids_TLK)
            progress(done, total)
        lengths = [len(text) for text in texts]
        trace = RoutingTrace(
            expert_ids_NLK=np.concatenate([part.expert_ids_TLK for part in parts]),
            request_N=np.repeat(np.arange(len(texts)), lengths).astype(np.int32),
            position_N=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
            phase_N=np.full(total, PREFILL, dtype=np.uint8),
            token_N=np.concatenate(texts).astype(np.int32),
            num_experts=self.spec.router.num_experts,
            layers=self.layers,
            request_ids=tuple(piece.request_id for piece in pieces),
            labels=tuple(piece.label for piece in pieces),
            model=self.name,
            model_identity=self.identity,
        )
        if not has_hidden:
            return Captured(trace=trace, before_attention_LTD=None, before_router_LTD=None)
        return Captured(
            trace=trace,
            before_attention_LTD=torch.cat([part.before_attention_LTD for part in parts], 1),
            before_router_LTD=torch.cat([part.before_router_LTD for part in parts], 1),
        )
