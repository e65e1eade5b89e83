"""Compares drafts that were not verified with the tokens that were generated all the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_serve.engine.drafting.draft import Draft
from moe_serve.engine.request.sequence import Sequence

_ENOUGH = 4  # right tokens that confirm a draft


@dataclass(frozen=True, slots=True)
class Shadow:
    """The part of a draft that can be compared, and how many of its first tokens are right."""

    draft: Draft
    num_right: int


class Shadows:
    """Keeps a draft of each sequence that was found and not verified.

    Some steps later its tokens are known. So the controller learns how often drafts are right
    without a row for it: a text that repeats is believed sooner, and drafts that are never right
    are not verified to find that out.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, Draft]] = {}  # with the tokens before it

    def keep(self, sequence: Sequence, draft: Draft) -> None:
        """Keeps a draft for the next tokens of a sequence, unless an earlier one waits for them."""
        self._kept.setdefault(sequence.id, (sequence.num_tokens, draft))

    def take(self, sequence: Sequence) -> Shadow | None:
        """Returns what became of a sequence's draft, once; None if that is not known yet: too few
        tokens have come, and all of them as drafted.
        """
        kept = self._kept.get(sequence.id)
        if kept is None:
            return None
        start, draft = kept
        drafted = draft.token_ids
        came = sequence.token_ids[start : start + len(drafted)]
        pairs = enumerate(zip(drafted, came, strict=False))
        num_right = next((place for place, (a, b) in pairs if a != b), len(came))
        if num_right == len(came) < min(_ENOUGH, len(drafted)):
            return None
        del self._kept[sequence.id]
        return Shadow(draft.cut(len(came)), num_right)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops the drafts of sequences that have ended or moved away."""
        for sequence_id in sequence_ids:
            self._kept.pop(sequence_id, None)
