"""Reads the API key that a command sends."""

from __future__ import annotations

from moe_serve.config.sources import read_first_key


def sent_key(text: str | None) -> str | None:
    """Returns the key; @FILE stands for the first key in that file. Raises ConfigError."""
    return read_first_key(text[1:]) if text is not None and text.startswith("@") else text
