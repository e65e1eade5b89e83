"""Reads the routed experts of a model from its config.json alone, for planners that load no
weights.

It needs no torch and goes by the keys of a config, so it also reads configs of architectures that
are not served. For served architectures it agrees with their family; a test asserts that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.hf_config import HFConfig

_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k")
_WIDTH = ("moe_intermediate_size", "expert_hidden_dim", "intermediate_size")
# Number of dense layers at the start if a config does not state it.
_NUM_DENSE = {"DeepseekV3": 3, "Kimi": 3, "Glm4": 1, "HYV3": 1, "ExaoneMo": 1, "Ernie4_5_Mo": 1}
_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The layers with routed experts, the number of experts, and the size of one."""

    num_layers: int
    sparse_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    num_groups: int  # groups that the router chooses among first; 1: no groups
    bytes_per_expert: int  # of one layer; from the storage format in config.json, without scales


def read_expert_shape(path: Path) -> ExpertShape:
    """Reads from a checkpoint's folder or from a config.json itself. Raises CheckpointError."""
    config = _config(path).text()
    num_layers = config.positive_int("num_hidden_layers", "num_layers")
    sparse = tuple(layer for layer in range(num_layers) if _is_sparse(config, layer, num_layers))
    if not sparse:
        raise CheckpointError(f"{config.source}: none of {num_layers} layers has routed experts.")
    width = _number(config, _WIDTH)
    values = 3 * config.positive_int("hidden_size") * width  # gate, up and down
    return ExpertShape(
        num_layers=num_layers,
        sparse_layers=sparse,
        num_experts=_number(config, _NUM_EXPERTS),
        top_k=_number(config, _TOP_K, default=1),
        num_groups=config.positive_int("n_group", default=1),
        bytes_per_expert=round(values * _bits(config) / 8),
    )


def _config(path: Path) -> HFConfig:
    if path.is_dir():
        return HFConfig.read(path)
    if path.suffix == ".json":
        return HFConfig.of_file(path)
    raise CheckpointError(f"{path} is neither the folder of a checkpoint nor its config.json.")


def _is_sparse(config: HFConfig, layer: int, num_layers: int) -> bool:
    """Returns whether a layer has routed experts: by a list of layers, or by first, last and
    interval.
    """
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return bool(kinds[layer] == "sparse")
    if config.get("moe_layers") is not None:
        return layer in config.whole_numbers("moe_layers")
    if layer in config.whole_numbers("mlp_only_layers"):
        return False
    for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"):
        if (layer + 1) % config.positive_int(key, default=1):
            return False
    first, last = _ends(config, num_layers)
    return first <= layer <= last and layer % config.positive_int("moe_layer_freq", default=1) == 0


def _ends(config: HFConfig, num_layers: int) -> tuple[int, int]:
    """Returns the first and the last layer that may have experts."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    stated = next((count for start, count in _NUM_DENSE.items() if name.startswith(start)), 0)
    first, last = config.get("first_k_dense_replace", stated), config.get("moe_layer_end_index")
    first = config.get("moe_layer_start_index", first)
    last = num_layers - 1 if last in (-1, None) else last
    for key, value in (("first_k_dense_replace", first), ("moe_layer_end_index", last)):
        if not isinstance(value, int):
            raise config.error(key, f"must be the index of a layer, is {value!r}")
    return first, last


def _number(config: HFConfig, keys: tuple[str, ...], default: int | None = None) -> int:
    """Reads a number. A list of one number per layer (Hunyuan) must have equal entries."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, list) and value:
            if len(set(map(str, value))) > 1 or not isinstance(value[0], int):
                raise config.error(key, "differs between layers, which plans do not support")
            return int(value[0])
        if value is not None:
            return config.positive_int(key)
    return config.positive_int(keys[0], default=default)


def _bits(config: HFConfig) -> float:
    """Returns the bits of one weight."""
    stated = config.quantization()
    if stated is not None:
        method = str(stated.get("quant_method", ""))
        if method == "fp8":
            return 8.0
        if method == "mxfp4":
            return 4.25  # an 8-bit scale is shared by 32 weights
        bits = stated.get("bits")
        if isinstance(bits, int) and 1 <= bits <= 16:
            return float(bits)
    return _BITS[config.dtype() or "bfloat16"]
