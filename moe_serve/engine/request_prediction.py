"""The request predictor of a served model."""

from __future__ import annotations

from pathlib import Path

from moe_serve.cache.model_identity import model_identity
from moe_serve.errors import ConfigError
from moe_serve.model.loader import ModelLoader
from routing_predictor.errors import RoutingError
from routing_predictor.predictor_file import load_request_predictor
from routing_predictor.request_mlp import PrefixPredictor


def open_request_predictor(
    folder: Path, loader: ModelLoader, model: Path, placement_version: str = ""
) -> PrefixPredictor:
    """Reads the predictor, and of the checkpoint in `model` the embedding table only.

    Raises ConfigError for a predictor of another model or placement.
    """
    try:
        return load_request_predictor(
            folder.expanduser(),
            model_identity=model_identity(model).hex(),
            embedding_VD=loader.embedding(),
            placement_version=placement_version,
            model=model.resolve().name,
        )
    except RoutingError as error:
        raise ConfigError(f"{error}.") from None
