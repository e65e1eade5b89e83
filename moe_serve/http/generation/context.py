"""The objects that the routes share. `create_app` makes one context and passes it to each
router."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.kv_window import NO_KV_WINDOWS, KVWindowRules
from moe_serve.engine.sampling.grammar.gate import GrammarGate
from moe_serve.http.generation.assistant_formats import AssistantFormats
from moe_serve.http.generation.generation import GenerationService
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.generation.service_tiers import ServiceTiers
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.metrics.page import MetricsPage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The limits of the engine that a request is checked against."""

    max_model_len: int
    vocab_size: int
    ids_per_token: int = 0  # see `ServedModel`
    kv_windows: KVWindowRules = NO_KV_WINDOWS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    model: ServedModel
    config: ServerConfig
    metrics: ServerMetrics
    metrics_page: MetricsPage
    generations: GenerationService
    gate: GrammarGate  # for every constrained answer
    assistant: AssistantFormats
    tiers: ServiceTiers
    speculates: bool = False  # drafted tokens are verified
    separates_keys: bool = False  # requests with different API keys share no pages

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            max_model_len=self.model.max_model_len,
            vocab_size=self.generations.engine.vocab_size,
            ids_per_token=self.model.ids_per_token,
            kv_windows=self.model.kv_windows,
        )
