"""Makes text from a server safe to print on a terminal."""

from __future__ import annotations

_DROPPED = dict.fromkeys((*range(32), *range(127, 160)), " ")


def plain(text: str, limit: int = 300) -> str:
    """Returns one line without control characters, so that an error message cannot steer the
    terminal."""
    return " ".join(text.translate(_DROPPED).split())[:limit]
