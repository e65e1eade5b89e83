"""Opens the next-layer predictor of a served model, for expert memories that use one."""

from __future__ import annotations

from pathlib import Path

from moe_serve.cache.page_key import model_identity
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.execute.layer_routers import check_routers, layer_routers
from moe_serve.engine.routes.placement_version import placement_version
from moe_serve.errors import ConfigError
from moe_serve.model.hub.hub_name import folder_model_name
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.spec import ModelSpec
from moe_serve.pipeline.exchange.next_layer import NextLayer
from routing_predictor.layers.recall_guard import GuardLimits, RecallGuard
from routing_predictor.predictor_file import load_layer_predictors, read_predictor_card
from routing_predictor.traces.card import PredictorKind
from routing_predictor.traces.routing_error import PredictorError

_POLICY = "next-layer"
_KIND = PredictorKind.NEXT_LAYER


def has_next_layer(config: EngineConfig) -> bool:
    """Returns whether the expert memory is limited and its policy uses a next-layer predictor."""
    model = config.model
    return model.expert_memory_bytes is not None and model.expert_memory_policy == _POLICY


def num_foreseen(config: EngineConfig, spec: ModelSpec) -> int:
    """Returns the number of experts whose need in the next layer attention ranks send with a
    layer's rows; 0 if they send none."""
    return spec.router.num_experts if has_next_layer(config) else 0


def check_next_layer(config: EngineConfig, folder: Path, spec: ModelSpec) -> None:
    """Checks the predictor before anything is loaded. `folder` is the checkpoint's. Raises
    ConfigError if the policy needs a predictor that is missing, or that is for another model or
    placement."""
    if not has_next_layer(config):
        return
    name = folder_model_name(folder.resolve())
    try:
        check_routers(spec, name)
        card = read_predictor_card(_predictors(config), _KIND)
        version = placement_version(config.cluster)
        card.check_fits(model_identity(folder).hex(), version, name)
    except (ConfigError, PredictorError) as error:
        raise _error(error) from None


def open_next_layer(config: EngineConfig, folder: Path, loader: ModelLoader) -> NextLayer | None:
    """Loads the predictor and the norms and routers it needs; None if the policy uses none. Raises
    ConfigError like `check_next_layer`, and for a damaged predictor."""
    if not has_next_layer(config):
        return None
    check_next_layer(config, folder, loader.spec)
    routers = layer_routers(loader)
    try:
        predictors = load_layer_predictors(
            _predictors(config),
            _KIND,
            routers,
            model_identity=model_identity(folder).hex(),
            placement_version=placement_version(config.cluster),
        )
    except PredictorError as error:
        raise _error(error) from None
    limits = GuardLimits(min_recall=config.predictor.min_recall, window=2000, min_measured=128)
    guard = RecallGuard(limits, "the next-layer predictor")
    layers, top_k = [router.layer for router in routers], loader.spec.router.top_k
    return NextLayer(predictors.to(loader.device), layers, top_k, guard)


def _predictors(config: EngineConfig) -> Path:
    path = config.predictor.path
    if path is None:
        raise PredictorError("predictor.path is null: give a folder with a next-layer predictor")
    return Path(path).expanduser()


def _error(error: Exception) -> ConfigError:
    text = str(error).removesuffix(".")
    return ConfigError(f"model.expert_memory_policy is {_POLICY!r}, but {text}.")
