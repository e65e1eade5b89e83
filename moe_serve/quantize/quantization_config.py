"""Writes a plan as the `quantization_config` of compressed-tensors.

Modules are named by patterns that other engines match from the start of a name, so each begins with
`.*`: an engine may put a prefix before every name. Experts are matched by their module alone,
because engines look up a layer's experts under names of their own (`gate_proj` for Mixtral's `w1`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_serve.quantize.quantise_plan import QuantisePlan, is_fused
from moe_serve.quantize.rounded_matrix import Storage

_LAYER = re.compile(r"^.*?\.layers\.(\d+)\.(.*)$")
_MXFP4_LEFT_OUT = (  # as published for GPT-OSS
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)
_EXPERT = re.compile(r"\.experts\.\d+\..*$")


def quantization_config(plan: QuantisePlan, copied: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the value of `quantization_config` in config.json.

    `copied`: modules that the checkpoint has beside the model's own (a vision tower, layers that
    predict further tokens); they are named as not quantised.
    """
    if is_fused(plan):
        return {
            "modules_to_not_convert": [*_MXFP4_LEFT_OUT, *copied],
            "quant_method": "mxfp4",
        }
    by_storage: dict[Storage, list[str]] = {}
    for matrix in plan.matrices:
        by_storage.setdefault(matrix.storage, []).append(_without_expert(matrix.module))
    kept = [name for layer in plan.layers for name in layer.kept]
    layers_of = _layers_of([*kept, *(name for names in by_storage.values() for name in names)])
    return {
        "config_groups": {
            f"group_{index}": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": _patterns(modules, layers_of),
                "weights": _weights(storage),
            }
            for index, (storage, modules) in enumerate(by_storage.items())
        },
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": [*plan.kept, *_patterns(kept, layers_of), *_beside(copied, len(plan.layers))],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _weights(storage: Storage) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": storage.group or None,
        "num_bits": storage.bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group" if storage.group else "channel",
        "symmetric": True,
        "type": "int",
    }


def _without_expert(module: str) -> str:
    return _EXPERT.sub(".experts", module)


def _layers_of(modules: Iterable[str]) -> dict[str, set[int]]:
    """Returns the layers that have each kind of module ("self_attn.q_proj")."""
    layers_of: dict[str, set[int]] = {}
    for module in modules:
        found = _LAYER.match(module)
        if found is not None:
            layers_of.setdefault(found[2], set()).add(int(found[1]))
    return layers_of


def _patterns(modules: Sequence[str], layers_of: Mapping[str, set[int]]) -> list[str]:
    """Returns a pattern for each kind of module. It lists layers unless they are all that have this
    kind. Modules outside the layers are returned as they are.
    """
    patterns = [module for module in modules if _LAYER.match(module) is None]
    for kind, layers in _layers_of(modules).items():
        number = r"\d+"
        if layers != layers_of[kind]:
            number = "(" + "|".join(map(str, sorted(layers))) + ")"
        end = r"\..*" if kind.endswith(".experts") else "$"
        patterns.append(rf"re:.*\.layers\.{number}\.{re.escape(kind)}{end}")
    return list(dict.fromkeys(patterns))


def _beside(modules: Iterable[str], num_layers: int) -> list[str]:
    """Returns names for modules beside the model; a pattern for each layer after its last one."""
    names = []
    for module in modules:
        found = _LAYER.match(module)
        is_further = found is not None and int(found[1]) >= num_layers
        names.append(rf"re:.*\.layers\.{found[1]}\..*" if found and is_further else module)
    return list(dict.fromkeys(names))
