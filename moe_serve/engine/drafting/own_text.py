"""Drafts the tokens that followed the same tokens earlier in a request's own prompt and answer."""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.drafting.gram_index import GramIndex
from moe_serve.engine.drafting.text_hashes import Prefix, TextHashes
from moe_serve.engine.request.sequence import Sequence

_MAX_NOTED = 16384  # tokens of a long prompt that one step enters into the index
_MAX_AGREED = 64


class _Text:
    """The index of one sequence, and the place whose continuation it repeats."""

    __slots__ = ("agreed", "index", "num_noted", "num_seen", "place")

    def __init__(self, index: GramIndex) -> None:
        self.index, self.num_noted = index, 0
        self.place = 0  # of the token that is expected next
        self.agreed = 0  # tokens that agreed before it; 0: there is no place
        self.num_seen = 0  # tokens of the sequence that were compared


class OwnText:
    """Implements Drafter by n-grams (prompt lookup). A token costs constant time.

    As long as a sequence repeats an earlier passage, the place moves on and nothing is looked up or
    entered, because the index already has the passage. A continuation that reaches the end of the
    text goes on with its own tokens, so that a repeating passage gives a draft of any length.
    """

    searches = True

    def __init__(
        self, shortest: int, longest: int, max_model_len: int, hashes: TextHashes | None = None
    ) -> None:
        """`shortest` and `longest` are the lengths of the n-grams, in tokens. `hashes` may be
        shared with other drafters."""
        middle = (shortest + longest) // 2
        self._sizes = tuple(sorted({shortest, middle, longest}))
        self._max_model_len = max_model_len
        self._hashes = TextHashes() if hashes is None else hashes
        self._texts: dict[int, _Text] = {}

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        tokens = sequence.token_ids
        text = self._texts.get(sequence.id)
        if text is None:
            index = GramIndex(self._hashes, self._sizes, 2 * self._expected(sequence))
            text = self._texts[sequence.id] = _Text(index)
        self._follow(text, tokens, self._hashes.of(sequence))
        if not text.agreed:
            return None
        place = text.place
        drafted = tokens[place : place + most]
        period = len(tokens) - place
        while len(drafted) < most:
            drafted += drafted[len(drafted) - period :][: most - len(drafted)]
        return Draft(tuple(drafted), DraftSource.NGRAM, text.agreed)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See Drafter.forget."""
        self._hashes.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self._texts.pop(sequence_id, None)

    def _follow(self, text: _Text, tokens: list[int], prefix: Prefix) -> None:
        """Moves the place behind the sequence's new tokens, or finds a better one."""
        num_tokens = len(tokens)
        num_new = num_tokens - text.num_seen
        if text.agreed:
            place = text.place + num_new
            if tokens[text.place : place] == tokens[text.num_seen :]:
                text.place, text.agreed = place, min(text.agreed + num_new, _MAX_AGREED)
            else:
                text.agreed = 0
        text.num_seen = num_tokens
        if text.agreed >= self._sizes[-1]:
            return
        # the last token is entered later: its position has nothing behind it yet
        end = min(num_tokens - 1, text.num_noted + _MAX_NOTED)
        text.index.note(prefix, text.num_noted, end)
        text.num_noted = end
        found = text.index.find(prefix, tokens, tokens, text.agreed)
        if found is not None:
            text.place, text.agreed = found

    def _expected(self, sequence: Sequence) -> int:
        """Returns the largest number of tokens that the sequence can have."""
        most = sequence.request.params.max_tokens
        length = self._max_model_len if most is None else sequence.num_prompt_tokens + most
        return min(length, self._max_model_len)
