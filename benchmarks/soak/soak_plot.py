"""The samples of a soak as a picture: what should be flat, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soak.sample import Sample

_SHOWN = {
    "own_mib": "own memory, MiB",
    "num_fds": "descriptors",
    "num_threads": "threads",
    "metrics_bytes": "/metrics, bytes",
    "pages_used": "share of pages held",
}


def write_plot(path: Path, samples: Sequence[Sample], warm_up_s: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(_SHOWN), 1, sharex=True, figsize=(8, 1.7 * len(_SHOWN)))
    minutes = [sample.seconds / 60 for sample in samples]
    for axis, (name, label) in zip(axes, _SHOWN.items(), strict=True):
        axis.plot(minutes, [getattr(sample, name) for sample in samples], linewidth=1.2)
        axis.axvspan(0, warm_up_s / 60, alpha=0.12, color="grey")
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.3)
        axis.margins(y=0.1)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("minutes (grey: warm-up)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
