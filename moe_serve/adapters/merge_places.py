"""Finds the matrices of a checkpoint that a merged adapter changes: each in a tensor of its own, or
all experts of a layer in two tensors.

N outputs, K inputs, E experts, F width of an expert, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets
from moe_serve.model.checkpoint.checkpoint import Checkpoint
from moe_serve.model.checkpoint.manifest import expert_table
from moe_serve.model.checkpoint.tensor_names import ExpertNames
from moe_serve.model.load.loader import ModelLoader

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlace:
    """A matrix within a stored tensor. `expert` None: it is the whole tensor."""

    name: str
    expert: int | None = None
    is_transposed: bool = False
    rows: slice | None = None  # of the matrix; None: all

    def matrix(self, tensor: Tensor) -> Tensor:
        """Returns the matrix [N, K] as a view of the tensor."""
        if self.expert is None:
            return tensor
        matrix = tensor[self.expert]
        matrix = matrix.T if self.is_transposed else matrix
        return matrix if self.rows is None else matrix[self.rows]


def merge_places(
    targets: AdapterTargets, loader: ModelLoader, checkpoint: Checkpoint
) -> Mapping[AdaptedMatrix, MergePlace]:
    """Returns the places of all matrices that the checkpoint stores in floats."""
    found: dict[AdaptedMatrix, MergePlace] = {}
    for module, target in targets.modules.items():
        if _is_float(checkpoint, f"{module}.weight"):
            found[target] = MergePlace(name=f"{module}.weight")
    for layer in range(loader.spec.num_layers):
        for layout in loader.names.experts if loader.spec.layers[layer].is_sparse else ():
            if not layout.gate:
                found |= _stacked(layout, loader, layer, checkpoint)
    return found


def _is_float(checkpoint: Checkpoint, name: str) -> bool:
    return name in checkpoint and checkpoint.view(name).dtype in _FLOATS


def _stacked(
    layout: ExpertNames, loader: ModelLoader, layer: int, checkpoint: Checkpoint
) -> Mapping[AdaptedMatrix, MergePlace]:
    spec = loader.spec
    table, half = expert_table(layout, spec, layer, 0), spec.expert_width
    gate, up = slice(half), slice(half, None)
    if layout.is_interleaved:
        gate, up = slice(0, None, 2), slice(1, None, 2)
    parts = {"gate": ("gate_up", gate), "up": ("gate_up", up), "down": ("down", None)}
    found = {}
    for part, (key, rows) in parts.items():
        name = table[key].name
        if not _is_float(checkpoint, name):
            continue
        shape = (spec.width, half) if part == "down" else (half, spec.width)
        for expert in range(spec.router.num_experts):
            target = AdaptedMatrix(
                layer=layer, kind="expert", part=part, shape=shape, expert=expert
            )
            found[target] = MergePlace(
                name=name, expert=expert, is_transposed=layout.is_transposed, rows=rows
            )
    return found
