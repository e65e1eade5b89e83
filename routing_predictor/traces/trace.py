"""The routers' choices, token by token: the object that traces, predictors and planners share.

N tokens, L layers with routed experts, K choices per token and layer, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.routing_error import TraceError

PREFILL, DECODE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """The choices of N tokens. Tokens of one request are in ascending order of position.

    Raises TraceError if the fields do not fit each other.
    """

    expert_ids_NLK: NDArray[np.integer]  # global ids; uint8 or int16
    request_N: NDArray[np.int32]  # index into request_ids
    position_N: NDArray[np.int32]
    phase_N: NDArray[np.uint8]  # PREFILL or DECODE
    num_experts: int
    layers: tuple[int, ...]  # the model's numbers of the L layers
    request_ids: tuple[str, ...]
    model: str = ""  # the model's name
    model_identity: str = ""  # hash of the model's weights; empty if unknown
    placement_version: str = ""
    token_N: NDArray[np.int32] | None = None  # token ids, if they were recorded
    weights_NLK: NDArray[np.floating] | None = None  # the routers' weights, if they were recorded
    labels: tuple[str, ...] = ()  # of the requests (a domain, a data set); empty if none has one
    # The adapter that answered each request, "" for the base model; empty if none has one.
    adapters: tuple[str, ...] = ()
    recording: str = ""  # name of the recording, within which the request ids are unique

    def __post_init__(self) -> None:
        shape = self.expert_ids_NLK.shape
        if len(shape) != 3:
            raise TraceError(
                f"expert ids must have the shape tokens x layers x k, got {len(shape)} dimensions"
            )
        if shape[1] != len(self.layers):
            raise TraceError(
                f"there are expert ids of {shape[1]} layers, but {len(self.layers)} layer numbers"
            )
        for name in ("request_N", "position_N", "phase_N", "token_N"):
            column = getattr(self, name)
            if column is not None and column.shape != shape[:1]:
                raise TraceError(
                    f"{name} has the shape {column.shape}, but there are {shape[0]} tokens"
                )
        if self.weights_NLK is not None and self.weights_NLK.shape != shape:
            raise TraceError(
                f"weights must have the shape {shape} of the ids, got {self.weights_NLK.shape}"
            )
        for name in ("labels", "adapters"):
            words = getattr(self, name)
            if words and len(words) != len(self.request_ids):
                raise TraceError(
                    f"there are {len(words)} {name} for {len(self.request_ids)} requests"
                )
        if not shape[0]:
            return
        low, high = int(self.expert_ids_NLK.min()), int(self.expert_ids_NLK.max())
        if low < 0 or high >= self.num_experts:
            raise TraceError(f"expert ids must be 0 to {self.num_experts - 1}, got {low} to {high}")
        if int(self.request_N.max()) >= len(self.request_ids) or int(self.request_N.min()) < 0:
            raise TraceError(
                f"the tokens belong to {int(self.request_N.max()) + 1} requests, but "
                f"{len(self.request_ids)} request ids are given"
            )

    @property
    def num_tokens(self) -> int:
        return int(self.expert_ids_NLK.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.expert_ids_NLK.shape[2])

    def select(self, tokens: NDArray[np.bool_] | NDArray[np.integer] | slice) -> RoutingTrace:
        """Returns some of the tokens, in this order; the requests keep their numbers."""
        return replace(
            self,
            expert_ids_NLK=self.expert_ids_NLK[tokens],
            request_N=self.request_N[tokens],
            position_N=self.position_N[tokens],
            phase_N=self.phase_N[tokens],
            token_N=None if self.token_N is None else self.token_N[tokens],
            weights_NLK=None if self.weights_NLK is None else self.weights_NLK[tokens],
        )

    def load(self) -> NDArray[np.int64]:
        """Returns [L, E]: how many of the tokens chose each expert."""
        loads = [
            np.bincount(self.expert_ids_NLK[:, layer].ravel(), minlength=self.num_experts)
            for layer in range(len(self.layers))
        ]
        return np.array(loads, dtype=np.int64).reshape(len(self.layers), self.num_experts)


def check_distinct(ids_NLK: NDArray[np.integer], layers: Sequence[int] = ()) -> None:
    """Raises TraceError if a token has an expert twice in a layer. `layers` are the layers'
    numbers."""
    for row in range(ids_NLK.shape[1]):
        sorted_NK = np.sort(ids_NLK[:, row], axis=1)
        repeats_NK = sorted_NK[:, 1:] == sorted_NK[:, :-1]
        if repeats_NK.any():
            token, place = (int(index) for index in np.argwhere(repeats_NK)[0])
            layer = layers[row] if layers else row
            raise TraceError(
                f"token {token} has expert {sorted_NK[token, place]} twice in layer "
                f"{layer}; the {ids_NLK.shape[2]} choices of a token must be different "
                "experts"
            )
