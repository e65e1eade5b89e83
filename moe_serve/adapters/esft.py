"""Reads an expert-specialised fine-tune (ESFT): whole experts in place of the base model's.

`expert_cfg.json` is {"experts": {"<layer>": [ids]}, "shared_experts": bool, "non_expert_modules":
bool}. The tensors have the names of a checkpoint, with or without `model.` before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets
from moe_serve.errors import CheckpointError

_PARTS = frozenset({"gate", "up", "down"})
_FIELDS = frozenset({"experts", "shared_experts", "non_expert_modules"})


def read_esft(
    files: AdapterFiles, targets: AdapterTargets, wants: Callable[[AdaptedMatrix], bool]
) -> Mapping[AdaptedMatrix, Tensor | None]:
    """Returns the matrices of all experts; None: it is not wanted. Raises CheckpointError with the
    field or the tensor."""
    experts = _experts(files, targets)
    found: dict[AdaptedMatrix, Tensor | None] = {}
    for name, where in files.headers():
        module = name.removesuffix(".weight")
        if not module.startswith("model."):
            module = f"model.{module}"
        target = targets.target(module, where)
        if target.kind == "attention" or (target.kind == "mlp" and not _has_shared(files)):
            raise CheckpointError(
                f"{where} is not one of the experts that {files.config_path} lists."
            )
        if target.kind == "expert" and target.expert not in experts.get(target.layer, ()):
            raise CheckpointError(
                f"{where} belongs to expert {target.expert} of layer {target.layer}, which "
                f"{files.config_path} does not list."
            )
        if files.shape(name) != target.shape:
            raise CheckpointError(
                f"{where} has the shape {list(files.shape(name))}, but the base model has "
                f"{list(target.shape)}."
            )
        matrix = files.read(name) if wants(target) else None
        if matrix is not None and not bool(torch.isfinite(matrix).all()):
            raise CheckpointError(f"{where} has values that are not finite.")
        found[target] = matrix
    _check_complete(files, experts, found)
    return found


def _has_shared(files: AdapterFiles) -> bool:
    return bool(files.config.get("shared_experts"))


def _experts(files: AdapterFiles, targets: AdapterTargets) -> Mapping[int, frozenset[int]]:
    """Returns the experts that the configuration lists, by layer."""
    path, config, spec = files.config_path, files.config, targets.spec
    unknown = sorted(config.keys() - _FIELDS)
    if unknown:
        raise CheckpointError(f"{path}: the field {unknown[0][:100]!r} is not known.")
    if config.get("non_expert_modules"):
        raise CheckpointError(
            f"{path}: non_expert_modules is true, but only experts can be replaced: serve such a "
            "fine-tune as a checkpoint of its own."
        )
    if spec.has_expert_bias:
        raise CheckpointError(
            f"{path}: the experts of {spec.family} have biases, which an ESFT adapter cannot "
            "replace."
        )
    listed = config.get("experts")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: experts must be an object of lists, one for each layer.")
    sparse = {layer for layer, each in enumerate(spec.layers) if each.is_sparse}
    result = {}
    for key, ids in listed.items():
        layer = int(key) if key.isdecimal() and len(key) < 6 else -1
        if layer not in sparse:
            raise CheckpointError(
                f"{path}: experts has the layer {key[:20]!r}, which has no routed experts."
            )
        result[layer] = frozenset(_checked_ids(f"{path}: experts.{key}", ids, targets))
    return result


def _checked_ids(where: str, ids: Any, targets: AdapterTargets) -> list[int]:
    most = targets.spec.router.num_experts - 1
    if not isinstance(ids, list) or not all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= most for each in ids
    ):
        raise CheckpointError(f"{where} must be a list of expert ids in [0, {most}].")
    return ids


def _check_complete(
    files: AdapterFiles,
    experts: Mapping[int, frozenset[int]],
    found: Mapping[AdaptedMatrix, Tensor | None],
) -> None:
    parts: dict[tuple[int, int], set[str]] = {}
    for target in found:
        if target.kind == "expert":
            parts.setdefault((target.layer, target.expert), set()).add(target.part)
    for layer, ids in experts.items():
        for expert in sorted(ids):
            missing = sorted(_PARTS - parts.get((layer, expert), set()))
            if missing:
                raise CheckpointError(
                    f"{files.folder} has no {missing[0]} matrix of expert {expert} of layer "
                    f"{layer}, which {files.config_path} lists."
                )
