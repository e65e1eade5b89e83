"""Builds an engine in one process or over many, as the configuration says."""

from __future__ import annotations

from moe_serve.cluster.build import build_cluster
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.model.load.model_tensors import LoadProgress


def build_any_engine(config: EngineConfig, progress: LoadProgress | None = None) -> BuiltEngine:
    """Loads the model here, or starts ranks that do."""
    build = build_cluster if config.cluster.is_disaggregated else build_engine
    return build(config, progress)
