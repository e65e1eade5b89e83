"""Lets a request forget the middle of its context while it generates.

This is StreamingLLM (arXiv 2309.17453) in whole pages. Which keys a row sees depends on its
position alone, so an answer is the same alone, in a batch, and when it is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.errors import InvalidRequestError
from moe_serve.model.spec import ModelSpec

MAX_WINDOW = 2**31 - 1
PARAM = "kv_window"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWindow:
    """Keeps the keys of the first `sinks` and of the last `window` tokens, rounded up to pages."""

    window: int
    sinks: int = 4

    def __post_init__(self) -> None:
        _check_number("window", self.window, 1)
        _check_number("sinks", self.sinks, 0)

    def hidden_pages(self, position: int, page_size: int) -> range:
        """Returns the indices of the pages that the row at a position does not see."""
        first = -(-self.sinks // page_size)
        return range(first, max(first, (position + 1 - self.window) // page_size))

    def first_hiding(self, page_size: int) -> int:
        """Returns the first position whose row would not see a page."""
        return self.window - 1 + (-(-self.sinks // page_size) + 1) * page_size

    def run(self, position: int, page_size: int) -> int:
        """Returns the number of positions, from this one on, that hide the same pages."""
        behind = position + 1 - self.window
        least = self.first_hiding(page_size)
        return least - position if position < least else page_size - behind % page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWindowRules:
    """Decides whether a server accepts a request's `kv_window`.

    `widest` is the largest window of the layers that have one. `has_chunks` means that some layer
    attends within chunks of positions.
    """

    is_allowed: bool = False
    page_size: int = 16
    widest: int | None = None
    has_chunks: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int, *, is_allowed: bool) -> KVWindowRules:
        """Returns the rules for a model."""
        shapes = [layer.attention for layer in spec.layers]
        return cls(
            is_allowed=is_allowed,
            page_size=page_size,
            widest=max((s.sliding_window for s in shapes if s.sliding_window), default=None),
            has_chunks=any(shape.chunk for shape in shapes),
        )

    def check(self, wish: KVWindow | None) -> None:
        """Raises InvalidRequestError if the request may not have it."""
        if wish is None:
            return
        if not self.is_allowed:
            raise _error(
                "kv_window is not allowed on this server: leave it out, or let the operator set "
                "cache.allow_kv_window."
            )
        if self.has_chunks:
            raise _error(
                "kv_window has no meaning for this model, whose layers attend within chunks of "
                "positions: leave it out."
            )
        least, why = self.page_size, f"the size of a page ({self.page_size} tokens)"
        if self.widest is not None and self.widest > least:
            least, why = self.widest, f"the model's own window ({self.widest} tokens)"
        if wish.window < least:
            raise _error(f"kv_window.window must be at least {why}, got {wish.window}.")


NO_KV_WINDOWS = KVWindowRules()


def _check_number(name: str, value: object, least: int) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not least <= value <= MAX_WINDOW:  # type: ignore[operator]
        raise _error(
            f"kv_window.{name} must be an integer in [{least}, {MAX_WINDOW}], got {value!r:.100}."
        )


def _error(text: str) -> InvalidRequestError:
    return InvalidRequestError(text, param=PARAM)
