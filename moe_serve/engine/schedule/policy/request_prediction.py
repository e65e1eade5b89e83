"""The request predictor of a served model."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_serve.cache.model_identity import model_identity
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families import family_of
from moe_serve.model.load.weight_reader import open_checkpoint
from routing_predictor.predictor_file import load_request_predictor
from routing_predictor.requests.request_mlp import PrefixPredictor
from routing_predictor.traces.errors import PredictorError


def open_request_predictor(
    folder: Path, model: Path, placement_version: str = ""
) -> PrefixPredictor:
    """Reads the predictor, and of the checkpoint in `model` the embedding table only.

    Raises ConfigError for a predictor that is damaged, or of another model or placement.
    """
    config = HFConfig.read(model)
    text = config.text()
    spec, reader = family_of(config).read_spec(text), open_checkpoint(model, text)
    name = family_of(config).names_in(reader.has).embedding
    try:
        return load_request_predictor(
            folder.expanduser(),
            model_identity=model_identity(model).hex(),
            embedding_VD=reader.read(name, (spec.vocab_size, spec.width), torch.float32),
            placement_version=placement_version,
            model=model.resolve().name,
        )
    except PredictorError as error:
        raise ConfigError(f"{error}.") from None
    finally:
        reader.done(name)
