"""How often requests moved from lost attention ranks: one that kills every rank must end."""

from __future__ import annotations

from moe_serve.engine.request.sequence import Sequence

MAX_MOVES = 5  # without a token between them


class Moves:
    """Counts the moves of sequences since their last token."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[int, int]] = {}  # sequence -> tokens that it had, moves

    def is_allowed(self, sequence: Sequence) -> bool:
        """Note that its rank was lost while it computed the sequence; whether it may move on."""
        num_tokens, count = self._moved.get(sequence.id, (0, 0))
        count = count + 1 if num_tokens == sequence.num_tokens else 1
        self._moved[sequence.id] = (sequence.num_tokens, count)
        while len(self._moved) > 4096:  # of sequences that ended long ago
            del self._moved[next(iter(self._moved))]
        return count <= MAX_MOVES
