"""Draws the two pictures of the report: expert use, and the training curve from `log.jsonl`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from .evaluation import ExpertUse

_CEILING = 6.0  # the colour scale ends at this multiple of the even share
Curve = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """Training lines and validation lines by step, in order of steps."""

    train: dict[int, dict[str, float]]
    valid: dict[int, dict[str, float]]  # bits per byte by domain

    @classmethod
    def read(cls, path: Path) -> TrainingLog:
        train: dict[int, dict[str, float]] = {}
        valid: dict[int, dict[str, float]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            fields = json.loads(line)
            if "chat_loss" in fields:  # another text: not on the same curve
                continue
            if "valid" in fields:
                valid[fields["step"]] = fields["valid"]
            else:
                train[fields["step"]] = fields
        return cls(dict(sorted(train.items())), dict(sorted(valid.items())))

    def losses(self) -> Curve:
        return list(self.train), [fields["loss"] for fields in self.train.values()]

    def valid_curves(self) -> dict[str, Curve]:
        """Returns the validation lines by domain."""
        domains = next(iter(self.valid.values()), {})
        return {d: (list(self.valid), [bits[d] for bits in self.valid.values()]) for d in domains}

    def mean_valid(self, last: int) -> list[tuple[int, float]]:
        """Returns (step, mean over domains) for the last few validations."""
        means = [(step, sum(bits.values()) / len(bits)) for step, bits in self.valid.items()]
        return means[-last:]


def plot_expert_use(use: ExpertUse, path: Path) -> None:
    """Draws one panel per layer; row = domain, column = expert, colour = multiple of the even
    share.

    Columns are sorted by the domain that uses the expert most, so that experts of one domain are
    side by side. The number under a column is the expert's id.
    """
    num_domains, num_layers, num_experts = use.share.shape
    num_rows = (num_layers + 1) // 2
    figure = Figure(figsize=(15, 2.7 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, 2, squeeze=False)
    image = None
    for layer, axes in enumerate(grid.flat[:num_layers]):
        relative_NE = use.share[:, layer] * num_experts
        owner_E = relative_NE.argmax(0)
        order = sorted(
            range(num_experts), key=lambda e: (int(owner_E[e]), -float(relative_NE[:, e].max()))
        )
        image = axes.imshow(
            relative_NE[:, torch.tensor(order)].numpy(),
            cmap="magma",
            vmin=0,
            vmax=_CEILING,
            aspect="auto",
        )
        axes.set_title(f"layer {layer}", fontsize=11)
        axes.set_xticks(range(num_experts), [str(e) for e in order], fontsize=6.5)
        axes.set_yticks(range(num_domains), use.domains if layer % 2 == 0 else [], fontsize=9)
        axes.tick_params(length=0)
    assert image is not None, "a model has at least one layer"
    bar = figure.colorbar(image, ax=grid, shrink=0.6, extend="max")
    bar.set_label("share of the domain's choices (1 = even)")
    figure.suptitle("Which experts each domain uses", fontsize=14)
    _save(figure, path)


def plot_training(log: TrainingLog, path: Path) -> None:
    """Draws the training loss and the valid bits per byte by domain, over steps."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps, losses = log.losses()
    left.plot(steps, losses, color="#b0b0b0", linewidth=0.8, label="every 10th batch")
    left.plot(steps, _smooth(losses, 0.85), color="#1f4e9c", linewidth=1.8, label="smoothed")
    left.set(xlabel="step", ylabel="nats per token", title="Training loss")
    left.legend(frameon=False)
    colours = colormaps["tab10"]
    for index, (domain, (steps, bits)) in enumerate(log.valid_curves().items()):
        right.plot(steps, bits, color=colours(index), linewidth=1.6, label=domain)
    right.set(xlabel="step", ylabel="bits per byte", title="Valid, while training")
    right.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    _save(figure, path)


def _smooth(values: list[float], keep: float) -> list[float]:
    """Returns an exponential mean without bias at the start."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(total / weight)
    return smoothed


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
