"""The format of BitDelta adapters: fine-tunes that are stored as the signs of their differences.

    bitdelta_config.json       {"format": "bitdelta", "version": 1}
    <module>.delta_sign        uint8 [N, ceil(K / 8)]; the first of eight inputs is the lowest bit
    <module>.delta_scale       [1], or one for each of the N outputs
    <name of a tensor>         an embedding, a norm, a head, a router or a bias, in full

A matrix of the fine-tune is that of the base model plus its scale where the bit is set, and minus
its scale elsewhere. A matrix or tensor that is not stored is the base model's. Experts that a
checkpoint has as one tensor are named as if they were apart: `<experts>.17.gate_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.interface.sign_matrix import SignMatrix
from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.manifest import (
    Stored,
    attention_table,
    expert_table,
    feed_forward_table,
    model_table,
)
from moe_serve.model.load.loader import ModelLoader

FORMAT, VERSION = "bitdelta", 1
SIGN, SCALE = ".delta_sign", ".delta_scale"
_FIELDS = frozenset({"format", "version", "base", "scales", "distilled"})  # the last are notes
_FUSED_PARTS = ("gate", "up", "down")


def sign_modules(targets: AdapterTargets) -> Mapping[str, AdaptedMatrix]:
    """Returns all matrices that may be stored as signs, by the names of their modules."""
    found = dict(targets.modules)
    spec = targets.spec
    shapes = {
        "gate": (spec.expert_width, spec.width),
        "up": (spec.expert_width, spec.width),
        "down": (spec.width, spec.expert_width),
    }
    for module, fused in targets.fused_modules.items():
        for expert in range(spec.router.num_experts):
            for part in _FUSED_PARTS:
                target = AdaptedMatrix(
                    layer=fused.layer, kind="expert", part=part, shape=shapes[part], expert=expert
                )
                found.setdefault(f"{module}.{expert}.{part}_proj", target)
    return found


def full_tensors(loader: ModelLoader) -> Mapping[str, Stored]:
    """Returns all tensors that may be stored in full, by name: those that are no sign matrices."""
    names, spec = loader.names, loader.spec
    matrices = {f"{module}.weight" for module in AdapterTargets(loader).modules}
    found = list(model_table(names, spec).values())
    for layer in range(spec.num_layers):
        found += attention_table(names, spec, layer).values()
        found += feed_forward_table(names, spec, layer).values()
        if spec.layers[layer].is_sparse:
            for layout in names.experts:
                if not layout.gate:
                    table = expert_table(layout, spec, layer, 0)
                    found += [item for key, item in table.items() if key.endswith("_bias")]
    return {item.name: item for item in found if item.name not in matrices}


@dataclass(frozen=True, slots=True)
class BitDeltaTensors:
    """The tensors of an adapter, checked by name and shape. Values are read when they are asked
    for."""

    files: AdapterFiles
    signs: Mapping[AdaptedMatrix, str]  # the module's name
    full: frozenset[str]

    def matrix(self, target: AdaptedMatrix) -> SignMatrix | None:
        """Reads the signs of a matrix; None: it is the base model's."""
        module = self.signs.get(target)
        if module is None:
            return None
        scales = self._finite(module + SCALE).float().flatten()
        return SignMatrix(
            bits_NB=self.files.read(module + SIGN),
            num_columns=target.shape[1],
            scales_N=scales,
        )

    def tensor(self, stored: Stored, dtype: torch.dtype) -> Tensor | None:
        """Reads a tensor that is stored in full; None: it is the base model's."""
        return self._finite(stored.name).to(dtype) if stored.name in self.full else None

    def _finite(self, name: str) -> Tensor:
        tensor = self.files.read(name)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{self.files.folder}: tensor {name[:200]} has values that are not finite."
            )
        return tensor


def read_bitdelta(
    files: AdapterFiles, modules: Mapping[str, AdaptedMatrix], full: Mapping[str, Stored]
) -> BitDeltaTensors:
    """Checks the configuration, and every tensor's name and shape. Raises CheckpointError."""
    _check_config(files)
    names = dict(files.headers(bits=SIGN))
    signs, stored = {}, set()
    for name, where in names.items():
        module = name.removesuffix(SIGN).removesuffix(SCALE)
        if module == name:
            if name not in full:
                raise CheckpointError(f"{where} {_why_not(name, modules)}")
            _check_shape(where, files.shape(name), [full[name].shape])
            stored.add(name)
            continue
        target = modules.get(module)
        if target is None:
            raise CheckpointError(f"{where} belongs to no matrix of the base model.")
        for ending in (SIGN, SCALE):
            if module + ending not in names:
                raise CheckpointError(f"{where} has no counterpart {(module + ending)[:200]}.")
        num_rows, width = target.shape
        shapes: list[tuple[int, ...]] = [(1,), (num_rows,), ()]
        if name.endswith(SIGN):
            shapes = [(num_rows, -(-width // 8))]
        _check_shape(where, files.shape(name), shapes)
        signs[target] = module
    if not names:
        raise CheckpointError(f"{files.folder} has no tensors.")
    return BitDeltaTensors(files, signs, frozenset(stored))


def _check_config(files: AdapterFiles) -> None:
    path, config = files.config_path, files.config
    unknown = sorted(config.keys() - _FIELDS)
    if unknown:
        raise CheckpointError(f"{path}: the field {unknown[0][:100]!r} is not known.")
    if config.get("format") != FORMAT or config.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: format and version must be {FORMAT!r} and {VERSION}, not "
            f"{str(config.get('format'))[:50]!r} and {str(config.get('version'))[:50]}."
        )


def _why_not(name: str, modules: Mapping[str, AdaptedMatrix]) -> str:
    if name.removesuffix(".weight") in modules:
        return "is a matrix in full: store its signs and its scale."
    return "belongs to no tensor of the base model."


def _check_shape(where: str, shape: tuple[int, ...], wanted: list[tuple[int, ...]]) -> None:
    if shape not in wanted:
        raise CheckpointError(
            f"{where} has the shape {list(shape)}, but the base model needs {list(wanted[0])}."
        )
