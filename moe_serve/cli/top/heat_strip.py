"""Draws numbers as block characters, in colours from cold to hot."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = ("grey50", "deep_sky_blue3", "green3", "yellow3", "dark_orange", "red1")
_WIDEST = 3  # columns of one value
_HOT = 3.0  # times the mean: as hot as it is shown


def heat_strip(values: Sequence[float], width: int) -> Text:
    """Returns one to three characters for each value, or one for the largest of several values if
    there is no room.

    The height is the value's share of the largest, the colour its ratio to the mean.
    """
    cells = folded(values, width)
    mean = sum(values) / len(values) if values else 0.0
    num_columns = max(1, min(_WIDEST, width // max(1, len(cells))))
    strip = Text(no_wrap=True)
    for value in cells:
        strip.append(block(value, max(cells)) * num_columns, style=_colour(value, mean))
    return strip


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws the last `width` values, scaled to the largest of them."""
    shown = values[-width:]
    return "".join(block(value, max(shown)) for value in shown)


def bar(share: float, width: int) -> str:
    """Draws a share of 0 to 1 as a bar."""
    num_full = round(max(0.0, min(1.0, share)) * width)
    return "█" * num_full + "░" * (width - num_full)


def block(value: float, top: float) -> str:
    """Returns a block character; it is empty only for 0."""
    if value <= 0 or top <= 0:
        return BLOCKS[0]
    return BLOCKS[max(1, round(min(1.0, value / top) * (len(BLOCKS) - 1)))]


def folded(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` values, each the largest of its run.

    5 values in 3:  [0 1] [2 3] [4]
    """
    if len(values) <= width:
        return list(values)
    run = -(-len(values) // width)
    return [max(values[i : i + run]) for i in range(0, len(values), run)]


def _colour(value: float, mean: float) -> str:
    heat = value / mean / _HOT if mean > 0 else 0.0
    return _COLOURS[min(len(_COLOURS) - 1, int(heat * len(_COLOURS)))]
