"""Drafts from the answer that a client predicts (OpenAI's Predicted Outputs)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.request.sequence import Sequence

_ANCHORS = (8, 4, 3, 2)  # tokens that must agree to find the place again
_WINDOW = 512  # tokens of the prediction that are searched for it, before and behind the last place
_NEAR = 3  # tokens around the place that are compared with one that differs
_WIDTH = array("i").itemsize


class _PredictedPlace:
    """The place of one sequence in its prediction."""

    __slots__ = ("agreed", "num_seen", "packed", "position", "predicted")

    def __init__(self, predicted: tuple[int, ...]) -> None:
        self.predicted, self.packed = predicted, array("i", predicted).tobytes()
        self.position = 0  # of the prediction's token that is expected next
        self.num_seen = 0  # tokens of the answer that were compared
        self.agreed = 0  # tokens in a row that agreed

    def note(self, token: int) -> None:
        """Compares the answer's next token. One that differs may be a replaced token, or the
        prediction may have some tokens more or less than the answer."""
        expected, position = self.predicted, self.position
        self.num_seen += 1
        if token in expected[position : position + 1]:
            self.position, self.agreed = position + 1, self.agreed + 1
            return
        near = () if self.agreed else expected[max(0, position - _NEAR) : position]
        if token in near[-1:]:
            self.agreed = 1  # the answer had a token more, so the place is right now
        elif token in (behind := expected[position + 1 : position + 1 + _NEAR]):
            self.position, self.agreed = position + 2 + behind.index(token), 1
        elif token in near:
            self.position, self.agreed = position - near[::-1].index(token), 1
        else:
            self.position, self.agreed = position + 1, 0

    def search(self, tail: list[int]) -> bool:
        """Goes behind the occurrence of the longest anchor at the end of `tail` that is nearest to
        the last place. Returns False if it was not found."""
        low, high = max(0, self.position - _WINDOW), self.position + _WINDOW
        for size in _ANCHORS:
            if len(tail) < size:
                continue
            anchor = array("i", tail[-size:]).tobytes()
            found = self._ends(anchor, size, low, high)
            if found:
                self.position, self.agreed = min(found, key=lambda e: abs(e - self.position)), size
                return True
        return False

    def _ends(self, anchor: bytes, size: int, low: int, high: int) -> list[int]:
        """Returns the positions behind the last occurrence before the place and the first one
        behind it. At least one token of the prediction follows them."""
        here, found = self.position * _WIDTH, list[int]()
        last = len(self.packed) - _WIDTH
        before = self.packed.rfind(anchor, low * _WIDTH, min(here, last))
        behind = self.packed.find(
            anchor, max(here - len(anchor) + 1, 0), min(high * _WIDTH, last)
        )
        for start in (before, behind):
            if start >= 0 and start % _WIDTH == 0:
                found.append(start // _WIDTH + size)
        return found


class Predictions:
    """Implements Drafter for requests with a prediction.

    As long as the answer agrees with the prediction, the draft goes on where it stands. After a
    difference, and at the end of the prediction, a place is found by the answer's last tokens,
    nearest to the last place.
    """

    searches = False  # but near the last place

    def __init__(self) -> None:
        self._places: dict[int, _PredictedPlace] = {}

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        if not sequence.request.prediction:
            return None
        place = self._places.get(sequence.id)
        if place is None:
            place = self._places[sequence.id] = _PredictedPlace(sequence.request.prediction)
        answer, start = sequence.token_ids, sequence.num_prompt_tokens
        was_lost = not place.agreed and place.num_seen > 0
        for token in answer[start + place.num_seen :]:
            place.note(token)
        is_at_end = place.position >= len(place.predicted)
        if (is_at_end or (not place.agreed and was_lost)) and not place.search(
            answer[start:][-_ANCHORS[0] :]
        ):
            return None
        tokens = place.predicted[place.position : place.position + most]
        return Draft(tokens, DraftSource.PREDICTION, min(place.agreed, 32)) if tokens else None

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See Drafter.forget."""
        for sequence_id in sequence_ids:
            self._places.pop(sequence_id, None)
