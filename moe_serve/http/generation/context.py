"""The objects that the routes share. `create_app` makes one context and passes it to each
router."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.sampling.grammar.gate import GrammarGate
from moe_serve.http.generation.assistant_formats import AssistantFormats
from moe_serve.http.generation.generation import GenerationService
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.metrics.page import MetricsPage


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    model: ServedModel
    config: ServerConfig
    metrics: ServerMetrics
    metrics_page: MetricsPage
    generations: GenerationService
    gate: GrammarGate  # for every constrained answer
    assistant: AssistantFormats
