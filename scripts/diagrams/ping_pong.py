"""Draws how micro-batches let both pools work at the same time."""

from __future__ import annotations

from diagrams.svg import Picture

_LEFT, _UNIT = 150, 64
_ROWS = ("attention rank", "expert rank")


def ping_pong() -> Picture:
    picture = Picture(
        "Ping-pong: micro-batches between attention and expert ranks",
        "With one micro-batch the attention rank waits while the expert rank works, and the other "
        "way round. With two, the attention rank computes micro-batch 1 while the experts have "
        "micro-batch 0, so both are busy.",
        960,
        300,
    )
    picture.text("name", 20, 34, "one micro-batch: each pool waits for the other")
    _tracks(picture, 48, [[(0, 2, "0"), (4, 2, "0"), (8, 2, "0")], [(2, 2, "0"), (6, 2, "0")]])
    words = "two micro-batches: while one is with the experts, the other attends"
    picture.text("name", 20, 168, words)
    attention = [(i * 1.15, 1.0, str(i % 2)) for i in range(8)]
    experts = [(1.15 + i * 1.15, 1.0, str(i % 2)) for i in range(8)]
    _tracks(picture, 182, [attention, experts])
    picture.text(
        "text",
        20,
        286,
        "Numbers are micro-batches, boxes are layers' stages, and time runs to the right. "
        "Smaller batches touch more experts' weights in all, so splitting may also lose.",
    )
    return picture


def _tracks(picture: Picture, y: float, tracks: list[list[tuple[float, float, str]]]) -> None:
    for row, spans in enumerate(tracks):
        top = y + 44 * row
        picture.text("text", 20, top + 23, _ROWS[row])
        for start, length, words in spans:
            x = _LEFT + _UNIT * 1.15 * start
            width = _UNIT * 1.15 * length - 3
            picture.box("attention" if row == 0 else "experts", x, top, width, 36)
            picture.text("name", x + width / 2, top + 23, words, anchor="middle")
