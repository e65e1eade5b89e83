"""Shares the log probabilities of a prompt: computed for its first choice, shown with every
choice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moe_serve.engine.request.request import GenerationRequest, TokenLogprob
from moe_serve.http.generation.sequence import Piece


class SharedPromptLogprobs:
    """Adds the prompt logprobs, which the engine reports for choice 0 only, to every choice of a
    prompt.

        2 prompts, n = 3:  index 0 1 2 | 3 4 5,  computed for 0 and 3, shared with 1 2 and 4 5

    A choice that is ahead of its choice 0 is held back, because its first piece must have them.
    """

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        firsts = [index - request.choice for index, request in enumerate(requests)]
        self._first_of = dict(enumerate(firsts))
        self._is_needed = any(request.params.prompt_logprobs is not None for request in requests)
        self._known: dict[int, tuple[TokenLogprob | None, ...] | None] = {}
        self._held: dict[int, list[Piece]] = {first: [] for first in firsts}
        self._has_begun: set[int] = set()

    def share(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces that can be shown now. The pieces of one choice keep their order."""
        if not self._is_needed:
            return pieces
        ready: list[Piece] = []
        for piece in pieces:
            first = self._first_of[piece.index]
            if piece.index == first and first not in self._known:
                self._known[first] = piece.prompt_logprobs
                ready.append(piece)
                ready += [self._completed(held) for held in self._held.pop(first)]
            elif first in self._known:
                ready.append(self._completed(piece))
            else:
                self._held[first].append(piece)
        return ready

    def _completed(self, piece: Piece) -> Piece:
        first = self._first_of[piece.index]
        if piece.index == first or piece.index in self._has_begun:
            return piece
        self._has_begun.add(piece.index)
        return msgspec.structs.replace(piece, prompt_logprobs=self._known[first])
