"""Computes the bytes that each kind of rank holds of a model, from its config alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import (
    Table,
    attention_table,
    feed_forward_table,
    model_table,
)
from moe_serve.model.families import family_of
from moe_serve.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes as loaded, of the routed experts and of everything else."""

    attention: int
    experts: int


def weight_bytes(folder: Path, spec: ModelSpec, itemsize: int) -> WeightBytes:
    """Returns shapes times `itemsize`; raises CheckpointError as reading the config does."""
    names = family_of(HFConfig.read(folder)).names_in(lambda _: True)
    attention = _numel([model_table(names, spec)])
    for layer in range(spec.num_layers):
        tables = (attention_table(names, spec, layer), feed_forward_table(names, spec, layer))
        attention += _numel(tables)
    num_sparse = sum(layer.is_sparse for layer in spec.layers)
    expert = 3 * spec.width * spec.expert_width
    return WeightBytes(
        attention=attention * itemsize,
        experts=num_sparse * spec.router.num_experts * expert * itemsize,
    )


def _numel(tables: Iterable[Table]) -> int:
    return sum(math.prod(stored.shape) for table in tables for stored in table.values())
