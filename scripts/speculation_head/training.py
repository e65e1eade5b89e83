"""Trains a head on shards within a time budget; can stop at any time and resume.

A head runs several steps on its own states, as it will when it drafts, while the tokens are those
of the text. Each step learns the model's distribution behind the token it is given. A checkpoint
holds the weights, their moving average (this is what is exported), and the optimizer's state.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model.training import Optimizer

from .network import DraftingHead, cross_entropy
from .shards import Shard, shard_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Settings of the training. Times are seconds of training, summed over resumed runs."""

    budget_s: float
    batch: int = 1024
    step_weights: tuple[float, ...] = (1.0, 0.6, 0.4)
    unroll_from: float = 0.4  # fraction of the budget; before it a head learns its first step only
    temperature: float = 0.5  # of the distributions that are learnt
    warmup_steps: int = 20
    decay_from: float = 0.5  # fraction of the budget
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    average: float = 0.995  # of the weights, per step
    shards_at_once: int = 3
    save_every_s: float = 60.0
    seed: int = 20261124


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Positions whose next tokens are known. S is the number of unrolled steps."""

    hidden_BD: Tensor
    tokens_BS: Tensor  # given to each step
    ids_BSK: Tensor
    probs_BSK: Tensor


class Positions:
    """The positions of some shards, to be drawn in random order."""

    def __init__(self, shards: list[Shard], num_steps: int) -> None:
        self._num_steps = num_steps
        self.tokens_T = torch.cat([s.tokens_T for s in shards]).long()
        self.hidden_TD = torch.cat([s.rows.hidden_TD for s in shards])
        self.top_ids_TK = torch.cat([s.rows.top_ids_TK for s in shards])
        self.top_logits_TK = torch.cat([s.rows.top_logits_TK for s in shards])
        first = np.cumsum([0, *(int(s.text_T[-1]) + 1 for s in shards)])
        text_T = torch.cat([s.text_T + int(n) for s, n in zip(shards, first, strict=False)])
        at = torch.arange(len(text_T) - num_steps)
        self.usable = at[text_T[at] == text_T[at + num_steps]]

    def batches(self, size: int, temperature: float, rng: np.random.Generator) -> Iterator[Batch]:
        order = torch.from_numpy(rng.permutation(len(self.usable)))
        for part in self.usable[order].split(size):
            if len(part) == size:
                yield self.at(part, temperature)

    def at(self, part: Tensor, temperature: float) -> Batch:
        steps_BS = part[:, None] + torch.arange(1, self._num_steps + 1)
        logits = self.top_logits_TK[steps_BS].float() / temperature
        return Batch(
            hidden_BD=self.hidden_TD[part],
            tokens_BS=self.tokens_T[steps_BS],
            ids_BSK=self.top_ids_TK[steps_BS].long(),
            probs_BSK=torch.softmax(logits, dim=-1),
        )


def loss_of(
    head: DraftingHead, batch: Batch, head_VD: Tensor, weights: tuple[float, ...]
) -> Tensor:
    """Returns the weighted mean cross entropy of the unrolled steps."""
    state_BD, total = batch.hidden_BD, torch.zeros(())
    for step, weight in enumerate(weights):
        state_BD = head(state_BD, batch.tokens_BS[:, step])
        losses_B = cross_entropy(
            head.normed(state_BD), head_VD, batch.ids_BSK[:, step], batch.probs_BSK[:, step]
        )
        total = total + weight * losses_B.mean()
    return total / sum(weights)


def learning_rate_scale(schedule: Schedule, step: int, progress: float) -> float:
    """Returns 1 between warm-up and `decay_from`, then fall linearly to 0."""
    warmup = min(1.0, (step + 1) / schedule.warmup_steps)
    return max(0.0, min(warmup, (1.0 - progress) / (1.0 - schedule.decay_from)))


class Training:
    """A head in training, with its average and its optimizer."""

    def __init__(
        self,
        head: DraftingHead,
        head_VD: Tensor,
        shards: Path,
        folder: Path,
        schedule: Schedule,
    ) -> None:
        """`shards` is the folder that is learnt from, `folder` that of the checkpoint."""
        self.head, self.head_VD, self._schedule = head, head_VD.bfloat16(), schedule
        self._optimizer = Optimizer(head, muon_lr=schedule.muon_lr, adam_lr=schedule.adam_lr)
        self.average = {name: p.detach().clone() for name, p in head.named_parameters()}
        self._checkpoint, self._log = folder / "head.safetensors", folder / "training.jsonl"
        self._shards, self.spent, self.num_positions = shards, 0.0, 0
        folder.mkdir(parents=True, exist_ok=True)
        if self._checkpoint.exists():
            self._restore()

    def run(self) -> None:
        """Trains until the budget is spent."""
        schedule, saved = self._schedule, self.spent
        rng = np.random.default_rng([schedule.seed, int(self._optimizer.state["steps"])])
        uses, losses = Counter[Path](), list[float]()
        while self.spent < schedule.budget_s:
            clock = time.monotonic()
            positions = self._draw(uses, rng)
            for batch in positions.batches(schedule.batch, schedule.temperature, rng):
                losses.append(self._step(batch))
                now = time.monotonic()
                self.spent, clock = self.spent + now - clock, now
                if len(losses) == 50:
                    self._write(loss=round(float(np.mean(losses)), 4))
                    losses = []
                if self.spent - saved >= schedule.save_every_s:
                    self._save()
                    saved = self.spent
                if self.spent >= schedule.budget_s:
                    break
        self._save()

    def _draw(self, uses: Counter[Path], rng: np.random.Generator) -> Positions:
        paths = shard_paths(self._shards)
        assert paths, f"there are no shards in {self._shards}"
        order = [paths[index] for index in rng.permutation(len(paths))]
        chosen = sorted(order, key=lambda path: uses[path])[: self._schedule.shards_at_once]
        uses.update(chosen)
        shards = [Shard.read(path) for path in chosen]
        return Positions(shards, len(self._schedule.step_weights))

    def _step(self, batch: Batch) -> float:
        schedule, step = self._schedule, int(self._optimizer.state["steps"])
        progress = self.spent / schedule.budget_s
        num_steps = 1 if progress < schedule.unroll_from else len(schedule.step_weights)
        loss = loss_of(self.head, batch, self.head_VD, schedule.step_weights[:num_steps])
        torch.autograd.backward(loss)
        scale = learning_rate_scale(schedule, step, progress)
        self._optimizer.step(scale)
        share = 1 - min(schedule.average, (step + 1) / (step + 10))
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                self.average[name].lerp_(parameter, share)
        self.num_positions += len(batch.hidden_BD)
        return loss.item()

    def _write(self, **fields: Any) -> None:
        facts = {"step": int(self._optimizer.state["steps"]), "spent": round(self.spent, 1)}
        with self._log.open("a") as log:
            log.write(json.dumps(facts | {"positions": self.num_positions} | fields) + "\n")

    def _save(self) -> None:
        tensors = {f"weight.{k}": v for k, v in self.head.state_dict().items()}
        tensors |= {f"average.{k}": v for k, v in self.average.items()}
        tensors |= {f"optimizer.{k}": v for k, v in self._optimizer.state.items()}
        temporary = self._checkpoint.with_suffix(".tmp")
        facts = {"spent": repr(self.spent), "positions": str(self.num_positions)}
        save_file(tensors, temporary, facts)
        temporary.replace(self._checkpoint)

    def _restore(self) -> None:
        tensors = load_file(self._checkpoint)
        parts = {prefix: _under(prefix, tensors) for prefix in ("weight", "average", "optimizer")}
        self.head.load_state_dict(parts["weight"])
        for name, tensor in parts["average"].items():
            self.average[name].copy_(tensor)
        for name, tensor in parts["optimizer"].items():
            self._optimizer.state[name].copy_(tensor)
        with safe_open(self._checkpoint, "pt") as file:
            facts = file.metadata()
        self.spent, self.num_positions = float(facts["spent"]), int(facts["positions"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
