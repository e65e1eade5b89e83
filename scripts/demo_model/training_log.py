"""Reads `log.jsonl`, which `training.py` writes; if a resumed run repeated a step, the last line
counts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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
