"""Draws docs/images/predictor.png from the file of `moe-serve predictor evaluate --json FILE`.

    PYTHONPATH=scripts python -m pictures.predictor_figure FILE [--out docs/images/predictor.png]

Left: overlap by layer of the request predictor and its baselines, with 95% intervals. Middle: the
same for the predictors between layers. Right: reliability, the observed frequency over the
predicted probability.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_NAMED = ("next-layer predictor", "pre-attention predictor")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw an evaluation of predictors.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images/predictor.png"))
    options = parser.parse_args(arguments)
    verdicts = json.loads(options.file.read_text(encoding="utf-8"))["verdicts"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2))
    _draw_layers(left, verdicts.get("request", {}), "next 32 tokens: overlap with the top 4")
    between = {
        name if name in _NAMED else f"{name} ({kind})": verdict
        for kind in ("next-layer", "pre-attention")
        for name, verdict in verdicts.get(kind, {}).items()
        if name in (*_NAMED, "frozen router")
    }
    _draw_layers(middle, between, "per token: recall of the top 4")
    _draw_reliability(right, verdicts)
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)
    print(f"written to {options.out}")


def _draw_layers(axes: Any, verdicts: Mapping[str, Any], title: str) -> None:
    count = max(1, len(verdicts))
    for index, (name, verdict) in enumerate(verdicts.items()):
        layers = verdict["overlap"]["layers"]
        places = [int(layer) + (index - count / 2) * 0.06 for layer in layers]
        means = [100 * mean for mean, _, _ in layers.values()]
        low = [100 * (mean - bottom) for mean, bottom, _ in layers.values()]
        high = [100 * (top - mean) for mean, _, top in layers.values()]
        axes.errorbar(places, means, (low, high), marker="o", ms=4, lw=1, capsize=2, label=name)
    axes.set(title=title, xlabel="layer", ylabel="%", ylim=(0, 102))
    axes.grid(alpha=0.3)
    if verdicts:
        axes.legend(fontsize=7)


def _draw_reliability(axes: Any, verdicts: Mapping[str, Any]) -> None:
    axes.plot([0, 1], [0, 1], color="0.7", lw=1)
    for kind in verdicts:
        name, verdict = next(iter(verdicts[kind].items()))
        found = verdict["calibration"]
        label = f"{name}, error {found['error']:.3f}"
        axes.plot(found["predicted"], found["observed"], marker="o", ms=4, lw=1, label=label)
    axes.set(title="reliability", xlabel="predicted probability", ylabel="how often it happened")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


if __name__ == "__main__":
    main()
