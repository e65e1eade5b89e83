"""The definition of `kv_window`: the positions that a row sees."""

from __future__ import annotations

from moe_serve.engine.request.kv_window import KVWindow


def seen(position: int, prompt: int, window: KVWindow, size: int = 16) -> list[int]:
    """Returns the positions that a row sees: all in a prompt of `prompt` tokens, else those on
    pages with a sink or with one of the last tokens."""
    if position < prompt:
        return list(range(position + 1))
    return [
        each
        for each in range(position + 1)
        if each // size * size < window.sinks
        or (each // size + 1) * size - 1 > position - window.window
    ]
