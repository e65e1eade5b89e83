"""Text of a server, made fit for a terminal."""

from __future__ import annotations

_DROPPED = dict.fromkeys((*range(32), *range(127, 160)), " ")


def plain(text: str, limit: int = 300) -> str:
    """One line without control characters: an error message must not steer the terminal."""
    return " ".join(text.translate(_DROPPED).split())[:limit]
