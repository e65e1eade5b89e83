"""Reads and writes a folder of predictors: KIND.safetensors with the weights in fp16, KIND.json
with the card.

The card has the model, the sizes and the measured quality. A predictor belongs to one model (by the
hash of its checkpoint) and, if it was trained on the trace of one placement, to that version of the
placement. L layers with routed experts, E experts, V vocabulary, D model width.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
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
from routing_predictor.traces.metadata import regular
from routing_predictor.traces.routing_error import PredictorError

VERSION = 1


class PredictorKind(str, Enum):
    """The kinds of predictors; also the stem of their two files."""

    REQUEST = "request"
    NEXT_LAYER = "next-layer"
    PRE_ATTENTION = "pre-attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorCard:
    """The facts about a predictor, filled by training and checked when it is loaded."""

    kind: str
    model: str  # name of the model, for messages
    model_identity: str  # hash of the model's checkpoint
    placement_version: str = ""  # empty if it fits any placement
    layers: tuple[int, ...]  # the model's numbers of the layers with routed experts
    num_experts: int
    top_k: int
    width: int
    sizes: Mapping[str, Any]  # of the network: hidden units, windows, ...
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def size(self, name: str) -> int:
        """Return a count among `sizes`. Raises PredictorError."""
        value = self.sizes.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PredictorError(f"the {self.kind} predictor's card has {name} {value!r}")
        return value

    def check_fits(self, model_identity: str, placement_version: str, model: str = "") -> None:
        """Raise PredictorError, with the names of both, for another model or placement."""
        if model_identity != self.model_identity:
            here = f"{model} ({model_identity[:12]})" if model else model_identity[:12]
            raise PredictorError(
                f"the {self.kind} predictor is for the model {self.model} "
                f"({self.model_identity[:12]}), not for {here}: train one for this model"
            )
        if self.placement_version and placement_version != self.placement_version:
            raise PredictorError(
                f"the {self.kind} predictor is for the placement {self.placement_version}, not for "
                f"{placement_version or 'none'}: train one on a trace of this placement"
            )


def write_card(card: PredictorCard, path: Path) -> None:
    path.write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")


def read_card(path: Path) -> PredictorCard:
    """Read a card. Raises PredictorError if it is not a card, or one of another version."""
    try:
        entries = json.loads(regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PredictorError(
            f"{path} does not exist: {path.parent} holds no such predictor."
        ) from None
    except OSError as error:
        raise PredictorError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise PredictorError(f"{path} is not JSON") from None
    if not isinstance(entries, dict) or entries.get("version") != VERSION:
        found = entries.get("version") if isinstance(entries, dict) else None
        raise PredictorError(
            f"{path} has the version {repr(found)[:20]} of a card; {VERSION} is read"
        )
    names = {each.name for each in fields(PredictorCard)}
    if unknown := sorted(entries.keys() - names):
        raise PredictorError(f"{path} has keys that no card has: {', '.join(unknown)}")
    try:
        card = PredictorCard(**entries | {"layers": tuple(entries["layers"])})
    except (KeyError, TypeError) as error:
        raise PredictorError(f"{path} is not a whole card: {error}") from None
    _check(card, path)
    return card


def _check(card: PredictorCard, path: Path) -> None:
    counts = (card.num_experts, card.top_k, card.width, *card.layers)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise PredictorError(f"{path}: layers, num_experts, top_k and width are counts")
    texts = (card.kind, card.model, card.model_identity, card.placement_version)
    if not all(isinstance(text, str) for text in texts):
        raise PredictorError(f"{path}: kind, model, model_identity and placement_version are text")
    if not all(isinstance(part, dict) for part in (card.sizes, card.data, card.metrics)):
        raise PredictorError(f"{path}: sizes, data and metrics are objects")


def write_predictor(folder: Path, card: PredictorCard, module: nn.Module) -> None:
    """Write both files, the card last, each completely or not at all. The same weights and card
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
    """Read the card of a predictor. Raises PredictorError."""
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
    """Load the request predictor of a folder, for the model with this identity and embedding table.

    Raises PredictorError if it is damaged, or belongs to another model or placement.
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
    """Load the next-layer or the pre-attention predictors of a folder. `routers` are those of the
    model's layers with routed experts, in order.

    Raises PredictorError if they are damaged, or belong to another model or placement.
    """
    card = read_predictor_card(folder, kind)
    card.check_fits(model_identity, placement_version, model)
    if card.layers != tuple(router.layer for router in routers):
        raise PredictorError(f"{folder}: the card names the layers {list(card.layers)}")
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
    """Load a file's weights into the module. Raises PredictorError unless the file holds the
    module's tensors, all finite."""
    wanted = module.state_dict()
    _check_shapes(path, {name: tuple(tensor.shape) for name, tensor in wanted.items()})
    with _opened(path) as file:
        if unknown := sorted(set(file.keys()) - wanted.keys()):
            raise PredictorError(f"{path} holds {unknown[0]}, which no such predictor has")
        stored = {name: file.get_tensor(name) for name in wanted}
    for name, array in stored.items():
        if not np.isfinite(array).all():
            raise PredictorError(f"{path}: the tensor {name} holds values that are not finite")
    module.load_state_dict(
        {name: torch.from_numpy(array).float() for name, array in stored.items()}
    )


def _check_shapes(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check shapes before anything is allocated: a card may name any sizes, a file cannot."""
    with _opened(path) as file:
        names = set(file.keys())
        for name, shape in wanted.items():
            found = tuple(file.get_slice(name).get_shape()) if name in names else None
            if found != shape:
                what = "no tensor" if found is None else f"a tensor {list(found)}"
                raise PredictorError(f"{path} holds {what} {name}, the card implies {list(shape)}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises PredictorError if it cannot be read."""
    try:
        with safe_open(regular(path), framework="numpy") as file:
            yield file
    except FileNotFoundError:
        raise PredictorError(f"{path} does not exist") from None
    except (OSError, SafetensorError, TypeError) as error:
        why = " ".join(str(error).split())
        raise PredictorError(f"{path} cannot be read as a safetensors file: {why}") from None
