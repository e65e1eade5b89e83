"""Provides a model's routers to the predictors that work between layers."""

from __future__ import annotations

from moe_serve.errors import ConfigError
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.spec import ModelSpec
from routing_predictor.layers.router_residual import RouterWeights


def layer_routers(loader: ModelLoader) -> list[RouterWeights]:
    """Returns norm and router of each layer with routed experts, in fp32, on the loader's
    device."""
    spec = loader.spec
    return [
        RouterWeights(
            layer=layer,
            norm_D=weights["moe_norm"].float(),
            norm_eps=spec.norm_eps,
            weight_ED=weights["router"],
            bias_E=weights.get("router_bias"),
        )
        for layer, each in enumerate(spec.layers)
        if each.is_sparse
        for weights in [loader.router_weights(layer)]
    ]


def check_routers(spec: ModelSpec, name: str) -> None:
    """Checks that the model's routers choose the k largest logits, as predictors between layers
    know logits only. Raises ConfigError for other routers; `name` is the model folder's name."""
    router = spec.router
    if router.has_selection_bias or router.shape.num_groups > 1:
        why = "a bias of the choice" if router.has_selection_bias else "groups of experts"
        raise ConfigError(
            f"{name} ({spec.family}) has routers with {why}, but next-layer and "
            "pre-attention predictors predict only the logits of a router: train and "
            "evaluate a request predictor."
        )
