"""By which tokens an answer's reasoning begins and ends."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarkers:
    """Token ids only; made where a tokenizer is (`thinking_limit.py`).

    `end`: the tokens that end the reasoning when its budget is spent, and may go on to open what
    comes next. It begins with one of `closings`, the ways in which a model ends it by itself.
    `openings`: the ways in which it begins, at the answer's beginning (`blanks` may come before);
    with `can_reopen` anywhere, and then again. `is_open`: the answer begins inside.
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
