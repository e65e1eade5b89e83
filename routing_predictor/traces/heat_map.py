"""Draws how often each expert of each layer was chosen.

matplotlib is an optional extra (`plot`) and is imported by the function that draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from routing_predictor.traces.errors import TraceError
from routing_predictor.traces.trace_stats import Loads

_MOST = 4.0  # multiple of the mean above which the colour stays the same


def draw_heat_map(load_LE: Loads, layers: Sequence[int], title: str, path: Path) -> None:
    """Draw layers down and experts across; white is the mean of the layer, blue below, red above.

    Raises TraceError if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise TraceError("a heat map needs matplotlib: pip install 'moe-serve[plot]'") from None
    mean_L1 = np.maximum(load_LE.mean(axis=1, keepdims=True), 1e-30)
    num_layers, num_experts = load_LE.shape
    width, height = min(16.0, 4.0 + 0.16 * num_experts), min(14.0, 2.0 + 0.24 * num_layers)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        load_LE / mean_L1,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        norm=TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=_MOST),
    )
    step = max(1, -(-num_layers // 32))
    axes.set_yticks(range(0, num_layers, step), [str(layer) for layer in layers[::step]])
    axes.set_xticks(range(0, num_experts, max(1, -(-num_experts // 32))))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=10, parse_math=False)
    bar = figure.colorbar(image, ax=axes, extend="max", ticks=[0.0, 0.5, 1.0, 2.0, 3.0, _MOST])
    bar.set_label("load over the layer's mean")
    try:
        with path.open("wb") as file:
            figure.savefig(file, dpi=130, format="png")
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}") from None
