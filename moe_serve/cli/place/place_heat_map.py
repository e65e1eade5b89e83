"""Draws the load of each device in each layer, before and after, as PNG or HTML.

matplotlib is an optional extra (`plot`), imported by the function that draws a PNG. HTML needs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.cli.place.plan_files import write_text
from moe_serve.errors import ConfigError

_LOW, _HIGH = 0.5, 2.0  # times the mean: beyond them the colours do not change
_BLUE, _WHITE, _RED = (33, 102, 172), (247, 247, 247), (178, 24, 43)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPicture:
    """One panel: loads over the layer's mean [L, D]."""

    title: str
    loads_LD: NDArray[np.float64]
    layers: Sequence[int]


def check_suffix(path: Path) -> None:
    """Raises ConfigError for a file name that is neither *.png nor *.html."""
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--heatmap {path} is neither *.png nor *.html.")


def draw(pictures: Sequence[LoadPicture], path: Path) -> None:
    """Draws the pictures in the format that the file's suffix names. Raises ConfigError."""
    if path.suffix == ".html":
        write_text(path, _html(pictures))
    else:
        _png(pictures, path)


def _png(pictures: Sequence[LoadPicture], path: Path) -> None:
    """Draws layers from top to bottom and devices from left to right; white is the layer's mean."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a PNG needs matplotlib: pip install 'moe-serve[plot]', or draw *.html."
        ) from None
    num_layers, num_devices = pictures[0].loads_LD.shape
    width = min(20.0, len(pictures) * max(3.0, 1.2 + 0.22 * num_devices) + 1.2)
    figure = Figure(figsize=(width, min(14.0, 2.2 + 0.2 * num_layers)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(pictures), squeeze=False, sharey=True)[0]
    norm = TwoSlopeNorm(vmin=_LOW, vcenter=1.0, vmax=_HIGH)
    for axes, picture in zip(panels, pictures, strict=True):
        image = axes.imshow(
            picture.loads_LD, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm
        )
        axes.set_title(picture.title, fontsize=9, parse_math=False)
        axes.set_xticks(range(0, num_devices, max(1, -(-num_devices // 16))))
        step = max(1, -(-num_layers // 32))
        axes.set_yticks(
            range(0, num_layers, step), [str(layer) for layer in picture.layers[::step]]
        )
        axes.set_xlabel("device")
    panels[0].set_ylabel("layer")
    bar = figure.colorbar(
        image, ax=list(panels), extend="both", ticks=[_LOW, 0.75, 1.0, 1.5, _HIGH]
    )
    bar.set_label("load over the layer's mean")
    try:
        with path.open("wb") as file:
            figure.savefig(file, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _html(pictures: Sequence[LoadPicture]) -> str:
    """Returns a self-contained page without scripts; each cell's value is its title."""
    panels = "".join(map(_panel, pictures))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Load of devices</title>'
        "<style>body{font:14px sans-serif;margin:2em}section{display:inline-block;"
        "vertical-align:top;margin-right:3em}table{border-collapse:collapse}td{width:1.1em;"
        "height:1em;padding:0}th{font-weight:normal;text-align:right;padding:0 .4em}"
        "thead th{text-align:center;padding:0}</style>"
        "<p>Load of each device (across) in each layer (down) over the layer's mean: white is the "
        f"mean, blue {_LOW} and less, red {_HIGH} and more.</p>{panels}</html>\n"
    )


def _panel(picture: LoadPicture) -> str:
    num_devices = picture.loads_LD.shape[1]
    step = max(1, -(-num_devices // 16))
    heads = "".join(
        f"<th>{device if device % step == 0 else ''}</th>" for device in range(num_devices)
    )
    rows = "".join(
        f"<tr><th>{layer}</th>"
        + "".join(
            f'<td style="background:{_colour(load)}" title="layer {layer}, device {device}: '
            f'{load:.3f}"></td>'
            for device, load in enumerate(loads_D)
        )
        + "</tr>"
        for layer, loads_D in zip(picture.layers, picture.loads_LD.tolist(), strict=True)
    )
    title = escape(picture.title)
    return (
        f"<section><h2>{title}</h2><table><thead><tr><th></th>{heads}</tr></thead>{rows}</table>"
        "</section>"
    )


def _colour(load: float) -> str:
    """Returns the colour of a load: white at 1, and stronger towards the ends of the scale."""
    end = _BLUE if load < 1.0 else _RED
    reach = (1.0 - load) / (1.0 - _LOW) if load < 1.0 else (load - 1.0) / (_HIGH - 1.0)
    part = min(max(reach, 0.0), 1.0)
    mixed = [round(w + part * (e - w)) for w, e in zip(_WHITE, end, strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)
