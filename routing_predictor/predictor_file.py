"""A folder of predictors: KIND.safetensors with the weights in fp16, KIND.json with the card.

L layers with routed experts, E experts, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from routing_predictor.card import PredictorCard, PredictorKind, read_card, write_card
from routing_predictor.errors import PredictorError
from routing_predictor.layer_data import predicted_pairs
from routing_predictor.pools import PrefixPools
from routing_predictor.request_mlp import PrefixPredictor, RequestMLP
from routing_predictor.router_residual import RouterResidual, RouterWeights
from routing_predictor.train_layers import LayerPredictors


def write_predictor(folder: Path, card: PredictorCard, module: nn.Module) -> None:
    """Both files, the card last. The same weights and card give the same bytes."""
    tensors: dict[str, NDArray[Any]] = {
        name: tensor.detach().half().numpy() for name, tensor in module.state_dict().items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{card.kind}.safetensors").write_bytes(save(tensors))
        write_card(card, folder / f"{card.kind}.json")
    except OSError as error:
        raise PredictorError(f"{folder} cannot be written: {error.strerror}") from None


def read_predictor_card(folder: Path, kind: PredictorKind) -> PredictorCard:
    """Raises PredictorError."""
    card = read_card(folder / f"{kind.value}.json")
    if card.kind != kind.value:
        raise PredictorError(f"{folder / kind.value}.json is the card of a {card.kind} predictor")
    return card


def load_request_predictor(
    folder: Path,
    *,
    model_identity: str,
    embedding_VD: Tensor,
    placement_version: str = "",
    model: str = "",
) -> PrefixPredictor:
    """The request predictor of a folder, for the model with this identity and embedding table.

    Raises PredictorError for a damaged one, and for one of another model or placement.
    """
    card = read_predictor_card(folder, PredictorKind.REQUEST)
    card.check_fits(model_identity, placement_version, model)
    if embedding_VD.shape[-1] != card.width:
        raise PredictorError(
            f"{folder}: the predictor reads embeddings of width {card.width}, "
            f"the model's have {embedding_VD.shape[-1]}"
        )
    windows = card.sizes.get("windows")
    if not isinstance(windows, list) or not all(isinstance(w, int) and w > 0 for w in windows):
        raise PredictorError(f"{folder}: the card's windows are {windows!r}, not counts of tokens")
    pools = PrefixPools(embedding_VD, windows)
    mlp = RequestMLP(pools.num_features, len(card.layers), card.num_experts, card.size("hidden"))
    load_weights(mlp, folder / f"{card.kind}.safetensors")
    return PrefixPredictor(mlp, pools, top_k=card.top_k, horizon=card.size("horizon"))


def load_layer_predictors(
    folder: Path,
    kind: PredictorKind,
    routers: Sequence[RouterWeights],
    *,
    model_identity: str,
    placement_version: str = "",
    model: str = "",
) -> LayerPredictors:
    """The next-layer or the pre-attention predictors of a folder. `routers`: of the model's layers
    with routed experts, in their order.

    Raises PredictorError for a damaged one, and for one of another model or placement.
    """
    card = read_predictor_card(folder, kind)
    card.check_fits(model_identity, placement_version, model)
    if card.layers != tuple(router.layer for router in routers):
        raise PredictorError(f"{folder}: the card names the layers {list(card.layers)}")
    is_early = kind is PredictorKind.PRE_ATTENTION
    context_width = card.size("context") * card.width if is_early else 0
    predictors = LayerPredictors(
        [
            RouterResidual(routers[target], card.size("hidden"), context_width)
            for _, target in predicted_pairs(kind, len(routers))
        ]
    )
    load_weights(predictors, folder / f"{card.kind}.safetensors")
    return predictors.eval()


def load_weights(module: nn.Module, path: Path) -> None:
    """Raises PredictorError unless the file holds the module's tensors, finite."""
    stored, wanted = _read(path), module.state_dict()
    for name, tensor in wanted.items():
        shape = stored[name].shape if name in stored else None
        if shape != tuple(tensor.shape):
            found = "no tensor" if shape is None else f"a tensor {list(shape)}"
            raise PredictorError(
                f"{path} holds {found} {name}, the card implies {list(tensor.shape)}"
            )
        if not np.isfinite(stored[name]).all():
            raise PredictorError(f"{path}: the tensor {name} holds values that are not finite")
    if unknown := sorted(stored.keys() - wanted.keys()):
        raise PredictorError(f"{path} holds {unknown[0]}, which no such predictor has")
    module.load_state_dict(
        {name: torch.from_numpy(array).float() for name, array in stored.items()}
    )


def _read(path: Path) -> Mapping[str, NDArray[np.floating]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise PredictorError(f"{path} is not there") from None
    except (OSError, SafetensorError, TypeError) as error:
        why = " ".join(str(error).split())
        raise PredictorError(f"{path} cannot be read as a safetensors file: {why}") from None
