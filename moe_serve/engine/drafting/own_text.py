"""Drafts from a request's own prompt and answer: what followed the same tokens before."""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.drafting.gram_index import GramIndex
from moe_serve.engine.request.sequence import Sequence

_MAX_NOTED = 4096  # tokens of a long prompt that one step enters into the index


class _Text:
    """The index of one sequence and the number of its tokens that were entered."""

    __slots__ = ("index", "num_noted")

    def __init__(self, sizes: tuple[int, ...], num_tokens: int) -> None:
        self.index, self.num_noted = GramIndex(sizes, 2 * num_tokens), 0


class OwnText:
    """Implements Drafter by n-grams (prompt lookup). A token costs constant time.

    A continuation that reaches the end of the text goes on with its own tokens, so that a repeating
    passage gives a draft of any length.
    """

    def __init__(self, shortest: int, longest: int, max_model_len: int) -> None:
        """`shortest` and `longest` are the lengths of the n-grams, in tokens."""
        middle = (shortest + longest) // 2
        self._sizes = tuple(sorted({shortest, middle, longest}))
        self._max_model_len = max_model_len
        self._texts: dict[int, _Text] = {}

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        tokens = sequence.token_ids
        text = self._texts.get(sequence.id)
        if text is None:
            text = self._texts[sequence.id] = _Text(self._sizes, self._expected(sequence))
        # the last token is entered later: its position has nothing behind it yet
        end = min(len(tokens) - 1, text.num_noted + _MAX_NOTED)
        text.index.note(tokens, 0, text.num_noted, end)
        text.num_noted = end
        found = text.index.find(tokens, tokens[-self._sizes[-1] :])
        if found is None:
            return None
        position, size = found
        drafted = tokens[position : position + most]
        period = len(tokens) - position
        while len(drafted) < most:
            drafted.append(drafted[len(drafted) - period])
        return Draft(tuple(drafted), DraftSource.NGRAM, size)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See Drafter.forget."""
        for sequence_id in sequence_ids:
            self._texts.pop(sequence_id, None)

    def _expected(self, sequence: Sequence) -> int:
        """Return the largest number of tokens that the sequence can have."""
        most = sequence.request.params.max_tokens
        length = self._max_model_len if most is None else sequence.num_prompt_tokens + most
        return min(length, self._max_model_len)
