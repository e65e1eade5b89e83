"""The token sequences that begin and end an answer's reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarkers:
    """Markers of reasoning as token ids. `thinking_limit.py` makes them where a tokenizer is
    available.

    `end` are the tokens that end the reasoning when its budget is spent; they may also open the
    part that follows. It begins with one of `closings`, the sequences with which a model ends its
    reasoning. `openings` begin the reasoning at the start of the answer (after `blanks`), or
    anywhere and repeatedly with `can_reopen`. `is_open` means that the answer starts inside the
    reasoning.
    """

    end: tuple[int, ...]
    closings: tuple[tuple[int, ...], ...]
    openings: tuple[tuple[int, ...], ...] = ()
    blanks: tuple[int, ...] = ()
    is_open: bool = False
    can_reopen: bool = False

    def __post_init__(self) -> None:
        if not any(word and self.end[: len(word)] == word for word in self.closings):
            raise InvalidRequestError(
                f"The end of thinking_markers must begin with one of its closings, got {self.end} "
                f"and {self.closings}.",
                param="thinking_markers",
            )
