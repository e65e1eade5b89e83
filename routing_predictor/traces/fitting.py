"""The training loop: AdamW in one cycle, early stopping on held-out documents; Ctrl-C keeps the
best weights.

The same seed, data and number of threads give the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Progress = Callable[[str, float], None]  # (description of the current work, share done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of training."""

    epochs: int = 16
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    patience: int = 3  # epochs without improvement before training stops
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainingCourse:
    """The course of a training run; the module holds the weights of the best epoch."""

    best_loss: float  # on held-out documents
    best_epoch: int
    is_interrupted: bool


@dataclass(frozen=True, slots=True)
class Task:
    """The subject of training: `loss(samples)` of sample numbers, and `held_out()` for early
    stopping."""

    num_samples: int
    loss: Callable[[Tensor], Tensor]
    held_out: Callable[[], float]
    name: str


def fit(module: nn.Module, task: Task, recipe: Recipe, progress: Progress) -> TrainingCourse:
    """Trains in place. An interrupt ends training, not the program; the best weights so far are
    kept."""
    generator = torch.Generator().manual_seed(recipe.seed)
    num_batches = max(1, task.num_samples // recipe.batch_size)
    optimiser = torch.optim.AdamW(
        module.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.epochs * num_batches + 1
    )
    module.eval()
    best, best_epoch, is_interrupted = task.held_out(), 0, False
    kept = _copy(module)
    try:
        for epoch in range(1, recipe.epochs + 1):
            order = torch.randperm(task.num_samples, generator=generator)
            module.train()
            for batch in range(num_batches):
                optimiser.zero_grad()
                task.loss(order[batch * recipe.batch_size :][: recipe.batch_size]).backward()
                optimiser.step()
                schedule.step()
                if batch % 16 == 0:
                    share = (epoch - 1 + batch / num_batches) / recipe.epochs
                    progress(f"{task.name}: epoch {epoch}, held out {best:.4f}", share)
            module.eval()
            loss = task.held_out()
            if loss < best:
                best, best_epoch, kept = loss, epoch, _copy(module)
            elif epoch - best_epoch >= recipe.patience:
                break
    except KeyboardInterrupt:
        is_interrupted = True
    module.load_state_dict(kept)
    module.eval()
    return TrainingCourse(best, best_epoch, is_interrupted)


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
