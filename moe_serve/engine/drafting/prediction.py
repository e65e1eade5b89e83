"""Drafts from the answer that a client predicts (OpenAI's Predicted Outputs)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.request.sequence import Sequence

_ANCHORS = (8, 4, 3, 2)  # tokens that must agree to find the place again
_WINDOW = 512  # tokens of the prediction that are searched for it, before and behind the last place


@dataclass(slots=True)
class _Place:
    """The place of one sequence in its prediction."""

    position: int = 0  # of the prediction's token that is expected next
    num_seen: int = 0  # tokens of the answer that were compared
    agreed: int = 0  # tokens in a row that agreed


class Predictions:
    """Implements Drafter for requests with a prediction.

    As long as the answer agrees with the prediction, the draft goes on where it stands. After a
    difference the place is found again by the answer's last tokens, nearest to the last place.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        predicted = sequence.request.prediction
        if not predicted:
            return None
        place = self._places.setdefault(sequence.id, _Place())
        start = sequence.num_prompt_tokens
        answer = sequence.token_ids
        for token in answer[start + place.num_seen :]:
            is_expected = place.position < len(predicted) and predicted[place.position] == token
            place.agreed = place.agreed + 1 if is_expected else 0
            place.position += 1
        place.num_seen = len(answer) - start
        if not place.agreed and place.num_seen:
            found = _find(predicted, answer[start:][-_ANCHORS[0] :], place.position)
            if found is None:
                return None
            place.position, place.agreed = found
        tokens = predicted[place.position : place.position + most]
        if not tokens:
            return None
        return Draft(tokens, DraftSource.PREDICTION, min(place.agreed, 32))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See Drafter.forget."""
        for sequence_id in sequence_ids:
            self._places.pop(sequence_id, None)


def _find(predicted: tuple[int, ...], tail: list[int], near: int) -> tuple[int, int] | None:
    """Return the position behind an occurrence of the longest anchor at the end of `tail` that is
    nearest to `near`, and the anchor's length."""
    low, high = max(0, near - _WINDOW), min(len(predicted), near + _WINDOW)
    for size in _ANCHORS:
        anchor = tuple(tail[-size:])
        if len(anchor) < size:
            continue
        ends = [end for end in range(low + size, high) if predicted[end - size : end] == anchor]
        if ends:
            return min(ends, key=lambda end: abs(end - near)), size
    return None
