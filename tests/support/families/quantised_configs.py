"""`quantization_config` of published checkpoints, including keys that do not matter here."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

DEEPSEEK_V3: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_AUTO_GPTQ: Config = {
    "bits": 4,
    "damp_percent": 0.1,
    "group_size": 128,
    "is_marlin_format": False,
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "quant_method": "gptq",
    "sym": True,
    "true_sequential": True,
}


def fp8_matrices(ignored: list[str]) -> Config:
    """Returns the config of Mixtral-8x7B-Instruct-v0.1-FP8, made by AutoFP8."""
    return {
        "activation_scheme": "static",
        "ignored_layers": ignored,
        "kv_cache_scheme": "static",
        "quant_method": "fp8",
    }


def mistral_fp8(left_out: list[str]) -> Config:
    """Returns the config of Mistral-Small-4."""
    return {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": left_out,
        "quant_method": "fp8",
        "weight_block_size": None,
    }


def compressed(layout: str, ignore: list[str], **groups: Config) -> Config:
    return {
        "config_groups": groups,
        "format": layout,
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def group(
    bits: int,
    strategy: str,
    *,
    kind: str = "int",
    activations: Config | None = None,
    targets: tuple[str, ...] = ("Linear",),
    layout: str | None = None,
    **weights: Any,
) -> Config:
    """Returns one entry of `config_groups`; `weights` changes the defaults."""
    return {
        "format": layout,
        "input_activations": activations,
        "output_activations": None,
        "targets": list(targets),
        "weights": {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": None,
            "num_bits": bits,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": strategy,
            "symmetric": True,
            "type": kind,
        }
        | weights,
    }


def of_tokens(kind: str) -> Config:
    """Returns the settings of activations in 8 bits, scaled token by token while the model runs."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": True,
        "group_size": None,
        "num_bits": 8,
        "observer": None,
        "observer_kwargs": {},
        "strategy": "token",
        "symmetric": True,
        "type": kind,
    }


def gptqmodel(**changes: Any) -> Config:
    """Returns the config of Qwen3-30B-A3B-GPTQ-Int4, made by GPTQModel."""
    return {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": 128,
        "lm_head": False,
        "meta": {
            "damp_auto_increment": 0.0025,
            "damp_percent": 0.01,
            "mse": 0.0,
            "quantizer": ["gptqmodel:2.2.0"],
            "static_groups": False,
            "true_sequential": True,
            "uri": "https://github.com/modelcloud/gptqmodel",
        },
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    } | changes


def auto_gptq(**changes: Any) -> Config:
    """Returns the config of Mixtral-8x7B-Instruct-v0.1-GPTQ and Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4,
    made by AutoGPTQ."""
    return _AUTO_GPTQ | changes


def auto_awq(group_size: int, left_out: list[str] | None) -> Config:
    return {
        "backend": "autoawq",
        "bits": 4,
        "do_fuse": False,
        "group_size": group_size,
        "modules_to_not_convert": left_out,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
