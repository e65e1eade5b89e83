"""The definition of `kv_window`: the positions that a row sees."""

from __future__ import annotations

from moe_serve.engine.request.kv_window import KVWindow
from tests.support.engine.fake_runner import PAGE_SIZE, next_token


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


def windowed_answer(
    prompt: list[int], count: int, window: KVWindow, size: int = PAGE_SIZE
) -> list[int]:
    """Returns the tokens that the fake model answers with a window."""
    tokens = list(prompt)
    for _ in range(count):
        positions = seen(len(tokens) - 1, len(prompt), window, size)
        tokens.append(next_token([tokens[each] for each in positions]))
    return tokens[len(prompt) :]
