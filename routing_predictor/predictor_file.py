"""Reads and writes a folder of predictors: KIND.safetensors with the weights in fp16, KIND.json
with the card.

L layers with routed experts, E experts, V vocabulary, D model width.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from routing_predictor.layers.router_residual import RouterResidual, RouterWeights
from routing_predictor.layers.train_layers import LayerPredictors, predicted_pairs
from routing_predictor.requests.request_mlp import PrefixPools, PrefixPredictor, RequestMLP
from routing_predictor.traces.card import PredictorCard, PredictorKind, read_card, write_card
from routing_predictor.traces.metadata import regular
from routing_predictor.traces.routing_error import PredictorError


def write_predictor(folder: Path, card: PredictorCard, module: nn.Module) -> None:
    """Writes both files, the card last, each completely or not at all. The same weights and card
    give the same bytes."""
    tensors: dict[str, NDArray[Any]] = {
        name: tensor.detach().half().numpy() for name, tensor in module.state_dict().items()
    }
    weights, facts = folder / f"{card.kind}.safetensors", folder / f"{card.kind}.json"
    aside = [path.with_name(f".{path.name}.{secrets.token_hex(4)}") for path in (weights, facts)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside[0].write_bytes(save(tensors))
        write_card(card, aside[1])
        # renamed only now, with the card, so that the two files belong together
        aside[0].replace(weights)
        aside[1].replace(facts)
    except OSError as error:
        raise PredictorError(f"{folder} cannot be written: {error.strerror}") from None
    finally:
        for path in aside:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def read_predictor_card(folder: Path, kind: PredictorKind) -> PredictorCard:
    """Reads the card of a predictor. Raises PredictorError."""
    card = read_card(folder / f"{kind.value}.json")
    if card.kind != kind.value:
        raise PredictorError(f"{folder / kind.value}.json belongs to a {card.kind} predictor")
    return card


def load_request_predictor(
    folder: Path,
    *,
    model_identity: str,
    embedding_VD: Tensor,
    placement_version: str = "",
    model: str = "",
) -> PrefixPredictor:
    """Loads the request predictor of a folder, for the model with this identity and embedding
    table.

    Raises PredictorError if it is damaged, or belongs to another model or placement.
    """
    card = read_predictor_card(folder, PredictorKind.REQUEST)
    card.check_fits(model_identity, placement_version, model)
    if embedding_VD.shape[-1] != card.width:
        raise PredictorError(
            f"{folder}: the predictor reads embeddings of width {card.width}, but the "
            f"model's have {embedding_VD.shape[-1]}"
        )
    windows = card.sizes.get("windows")
    if not isinstance(windows, list) or not all(isinstance(w, int) and w > 0 for w in windows):
        raise PredictorError(
            f"{folder}: the card's windows must be numbers of tokens, got {windows!r}"
        )
    hidden, num_outputs = card.size("hidden"), len(card.layers) * card.num_experts
    num_features = len(windows) * card.width
    file = folder / f"{card.kind}.safetensors"
    shapes = {"first.weight": (hidden, num_features), "last.weight": (num_outputs, hidden)}
    _check_shapes(file, shapes)
    pools = PrefixPools(embedding_VD, windows)
    mlp = RequestMLP(num_features, len(card.layers), card.num_experts, hidden)
    load_weights(mlp, file)
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
    """Loads the next-layer or the pre-attention predictors of a folder. `routers` are those of the
    model's layers with routed experts, in order.

    Raises PredictorError if they are damaged, or belong to another model or placement.
    """
    card = read_predictor_card(folder, kind)
    card.check_fits(model_identity, placement_version, model)
    if card.layers != tuple(router.layer for router in routers):
        raise PredictorError(f"{folder}: the card names invalid layers, {list(card.layers)}")
    is_early = kind is PredictorKind.PRE_ATTENTION
    context_width = card.size("context") * card.width if is_early else 0
    hidden, file = card.size("hidden"), folder / f"{card.kind}.safetensors"
    targets = [routers[target] for _, target in predicted_pairs(kind, len(routers))]
    for each in targets:
        num_experts, width = each.weight_ED.shape
        name = f"layers.{each.layer}"
        first, last = (hidden, width + context_width), (num_experts, hidden)
        _check_shapes(file, {f"{name}.first.weight": first, f"{name}.last.weight": last})
    predictors = LayerPredictors([RouterResidual(each, hidden, context_width) for each in targets])
    load_weights(predictors, file)
    return predictors.eval()


def load_weights(module: nn.Module, path: Path) -> None:
    """Loads a file's weights into the module. Raises PredictorError unless the file holds the
    module's tensors, all finite."""
    wanted = module.state_dict()
    _check_shapes(path, {name: tuple(tensor.shape) for name, tensor in wanted.items()})
    with _opened(path) as file:
        if unknown := sorted(set(file.keys()) - wanted.keys()):
            raise PredictorError(
                f"{path} contains {unknown[0]}, which is not a tensor of such a predictor"
            )
        stored = {name: file.get_tensor(name) for name in wanted}
    for name, array in stored.items():
        if not np.isfinite(array).all():
            raise PredictorError(f"{path}: the tensor {name} holds values that are not finite")
    module.load_state_dict(
        {name: torch.from_numpy(array).float() for name, array in stored.items()}
    )


def _check_shapes(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Checks shapes before anything is allocated: a card may name any sizes, a file cannot."""
    with _opened(path) as file:
        names = set(file.keys())
        for name, shape in wanted.items():
            found = tuple(file.get_slice(name).get_shape()) if name in names else None
            if found != shape:
                what = "no tensor" if found is None else f"a tensor {list(found)}"
                raise PredictorError(
                    f"{path} has {what} {name}, but the card implies {list(shape)}"
                )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises PredictorError if it cannot be read."""
    try:
        with safe_open(regular(path), framework="numpy") as file:
            yield file
    except FileNotFoundError:
        raise PredictorError(f"{path} does not exist") from None
    except (OSError, SafetensorError, TypeError) as error:
        why = " ".join(str(error).split())
        raise PredictorError(f"{path} cannot be read as a safetensors file: {why}") from None
