"""Opens a model for predictors: captures their training data, and reads the weights they need.

T tokens, L layers with routed experts, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_serve.cache.model_identity import model_identity
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.execute.layer_routers import check_routers, layer_routers
from moe_serve.engine.opened_model import OpenedModel, model_folder
from moe_serve.learn.documents import Piece
from moe_serve.learn.hidden_capture import HiddenCapture
from routing_predictor.layers.router_residual import RouterWeights
from routing_predictor.traces.trace import PREFILL, RoutingTrace

CaptureProgress = Callable[[int, int], None]  # (tokens done, tokens in all)

_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The routing of texts, and the hidden states around it if requested."""

    trace: RoutingTrace
    before_attention_LTD: Tensor | None  # fp16, see HiddenCapture
    before_router_LTD: Tensor | None


class PredictorModel:
    """A checkpoint on the CPU. Weights are read on first use."""

    def __init__(self, model: str | None, num_threads: int = 1) -> None:
        config = ModelConfig(path=model, device="cpu")
        self.folder: Path = model_folder(config)
        cpu = torch.device("cpu")
        self._loader = OpenedModel.open(self.folder, config, num_threads, cpu).loader
        self.spec = self._loader.spec
        self.name = self.folder.resolve().name
        self.identity = model_identity(self.folder).hex()
        self.layers = tuple(i for i, layer in enumerate(self.spec.layers) if layer.is_sparse)

    @property
    def max_piece(self) -> int:
        """The longest text, in tokens, that is read at once."""
        return min(self.spec.max_positions, _TOKENS_AT_ONCE)

    def embedding(self) -> Tensor:
        """Return the embedding [V, D], as stored."""
        return self._loader.embedding()

    def routers(self) -> list[RouterWeights]:
        """Return norm and router of each layer with routed experts. Raises ConfigError like
        `capture`."""
        check_routers(self.spec, self.name)
        return layer_routers(self._loader)

    def capture(
        self, pieces: Sequence[Piece], *, has_hidden: bool, progress: CaptureProgress
    ) -> Captured:
        """Run texts through the model. Raises ConfigError if hidden states are requested but the
        model's routers cannot be predicted from them."""
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
