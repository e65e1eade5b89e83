"""The JSON card beside a predictor's tensors: its model, its sizes and its measured quality.

A predictor belongs to one model (by the hash of its checkpoint) and, if it was trained on the trace
of one placement, to that version of the placement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

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
        """Returns a count among `sizes`. Raises PredictorError."""
        value = self.sizes.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PredictorError(
                f"the {self.kind} predictor's card has an invalid {name}: {value!r}"
            )
        return value

    def check_fits(self, model_identity: str, placement_version: str, model: str = "") -> None:
        """Raises PredictorError, with the names of both, for another model or placement."""
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
    """Reads a card. Raises PredictorError if it is not a card, or one of another version."""
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
            f"{path} has version {repr(found)[:20]} of a card, but only version {VERSION} "
            "can be read"
        )
    names = {each.name for each in fields(PredictorCard)}
    if unknown := sorted(entries.keys() - names):
        raise PredictorError(f"{path} has unknown keys: {', '.join(unknown)}")
    try:
        card = PredictorCard(**entries | {"layers": tuple(entries["layers"])})
    except (KeyError, TypeError) as error:
        raise PredictorError(f"{path} is not a complete card: {error}") from None
    _check(card, path)
    return card


def _check(card: PredictorCard, path: Path) -> None:
    counts = (card.num_experts, card.top_k, card.width, *card.layers)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise PredictorError(f"{path}: layers, num_experts, top_k and width must be integers")
    texts = (card.kind, card.model, card.model_identity, card.placement_version)
    if not all(isinstance(text, str) for text in texts):
        raise PredictorError(
            f"{path}: kind, model, model_identity and placement_version must be text"
        )
    if not all(isinstance(part, dict) for part in (card.sizes, card.data, card.metrics)):
        raise PredictorError(f"{path}: sizes, data and metrics must be objects")
