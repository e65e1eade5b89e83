"""Requests with known routing: pieces of documents that the model has read once.

N tokens, L layers, K choices, E experts, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.learn.documents import cut_into_pieces, read_documents
from moe_serve.learn.predictor_data import PredictorModel
from moe_serve.text.tokenizer import Tokenizer
from routing_predictor.predictor_file import load_request_predictor
from routing_predictor.requests.request_mlp import RequestPredictor

PREFIX = 128  # tokens that a request has when it starts
LONGEST = 96  # tokens that it may generate

Signatures = NDArray[np.float32]  # [R, L, E]


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of one document, and the experts that each token chose."""

    token_N: NDArray[np.int64]
    ids_NLK: NDArray[np.int64]
    domain: str


@dataclass(frozen=True, slots=True)
class Request:
    """A position in a piece: the tokens before it are the prompt, the tokens after it the
    answer.
    """

    piece: Piece
    start: int

    def choices(self, step: int) -> NDArray[np.int64]:
        """Returns the choices [L, K] of the token of a step."""
        chosen: NDArray[np.int64] = self.piece.ids_NLK[self.start + step]
        return chosen

    def past(self, step: int) -> NDArray[np.int64]:
        """Returns the choices [N, L, K] of the prefix and of the tokens generated before the
        step.
        """
        end = self.start + step
        chosen: NDArray[np.int64] = self.piece.ids_NLK[end - PREFIX : end]
        return chosen

    def prefix(self, step: int) -> NDArray[np.int64]:
        """Returns the token ids before the step."""
        end = self.start + step
        tokens: NDArray[np.int64] = self.piece.token_N[end - PREFIX : end]
        return tokens


class Routed:
    """Pieces of validation documents by domain, and a predictor if there is one."""

    def __init__(
        self, model: str | None, texts: Path, predictor: Path | None, max_tokens: int
    ) -> None:
        opened = PredictorModel(model)
        tokenizer = Tokenizer.load(opened.folder)
        documents = read_documents([texts], "valid")
        pieces = cut_into_pieces(documents, tokenizer, max_tokens, opened.max_piece, 0)
        pieces = [piece for piece in pieces if len(piece.tokens) >= PREFIX + LONGEST]
        trace = opened.capture(pieces, has_hidden=False, progress=lambda done, total: None).trace
        ends = np.cumsum([len(piece.tokens) for piece in pieces])
        parts = np.split(trace.expert_ids_NLK.astype(np.int64), ends[:-1])
        self.num_layers, self.num_experts = len(trace.layers), trace.num_experts
        self.top_k, self.model = trace.top_k, opened.name
        self._by_domain: dict[str, list[Piece]] = {}
        for piece, ids_NLK in zip(pieces, parts, strict=True):
            made = Piece(piece.tokens, ids_NLK, piece.label)
            self._by_domain.setdefault(piece.label, []).append(made)
        self.predictor: RequestPredictor | None = None
        if predictor is not None:
            self.predictor = load_request_predictor(
                predictor, model_identity=opened.identity, embedding_VD=opened.embedding()
            )

    @property
    def num_pieces(self) -> dict[str, int]:
        return {domain: len(pieces) for domain, pieces in sorted(self._by_domain.items())}

    def draw(self, count: int, rng: np.random.Generator) -> list[Request]:
        """Draws `count` requests, evenly from all domains, in random order."""
        domains = sorted(self._by_domain)
        order = rng.permutation(np.resize(rng.permutation(len(domains)), count))
        return [self._request(domains[index], rng) for index in order]

    def predicted(self, requests: Sequence[Request], step: int) -> Signatures:
        """Returns the signatures that the predictor gives."""
        assert self.predictor is not None, "no predictor was given"
        return self.predictor.predict([request.prefix(step) for request in requests])

    def coming(self, requests: Sequence[Request], step: int, count: int) -> Signatures:
        """Averages the choices of the next `count` tokens: the best that a predictor could do."""
        ids = np.stack([r.piece.ids_NLK[r.start + step : r.start + step + count] for r in requests])
        chosen = (ids[..., None] == np.arange(self.num_experts)).any(axis=3)
        return np.asarray(chosen.mean(axis=1), dtype=np.float32)

    def _request(self, domain: str, rng: np.random.Generator) -> Request:
        pieces = self._by_domain[domain]
        piece = pieces[int(rng.integers(len(pieces)))]
        return Request(piece, int(rng.integers(PREFIX, len(piece.token_N) - LONGEST + 1)))


def num_activated(groups: Sequence[Sequence[NDArray[np.int64]]]) -> int:
    """Counts experts with at least one row, summed over layers and groups.

    The rows of a group have choices [L, K] each.
    """
    total = 0
    for group in groups:
        ids_LN = np.concatenate(group, axis=1)
        total += sum(len(np.unique(row)) for row in ids_LN)
    return total
