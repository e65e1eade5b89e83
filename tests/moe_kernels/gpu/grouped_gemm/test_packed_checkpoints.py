"""Quantised checkpoints, packed in the Triton set, against the same weights stored in floats.

Scales are fp32 here, so a weight's product is not rounded, and packed and dequantised are the same
numbers. (With narrower scales, dequantising rounds each weight to their dtype as the formats' own
code does, and the kernels round to the compute dtype alone.)
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.errors import ConfigError
from moe_serve.model.load.loader import ModelLoader
from tests.support.families import quantised_models as tiny
from tests.support.families.case import Case
from tests.support.families.parity import model_logits, random_prompts
from tests.support.families.quantised_cases import CASES
from tests.support.families.quantised_configs import (
    auto_awq,
    auto_gptq,
    compressed,
    gptqmodel,
    group,
)
from tests.support.families.quantised_folder import QuantisedCase, write_pair
from tests.support.families.stored_forms import awq, compressed_int, fp8, gptq, mxfp4

_PROJECTIONS = r".*_proj(_with_mqa)?"
_EXPERTS = r".*\.experts\.\d+\.\w+"
_FP32 = torch.float32


def _one_layer(case: Case) -> Case:
    """Returns the model with one layer, of experts."""
    config = deepcopy(case.config)
    config.num_hidden_layers, config.mlp_only_layers = 1, []
    return replace(case, config=config)


def _compressed(layout: str, bits: int, strategy: str, **keys: Any) -> dict[str, Any]:
    return compressed(layout, ["lm_head", "re:.*gate$"], group_0=group(bits, strategy, **keys))


PACKED: dict[str, tuple[QuantisedCase, str]] = {
    # A dense layer and shared experts too; latent attention.
    "fp8 blocks": (CASES["DeepSeek-V3"], "fp8_block packed, 8.00 bits"),
    "fp8 matrices, fused": (CASES["Mistral-Small-4"], "fp8_channel packed, 8.00 bits"),
    "fp8 blocks, fused and transposed": (
        replace(CASES["Qwen3-VL-30B-A3B-FP8"], model=tiny.qwen3_vl_moe(256)),
        "fp8_block packed, 8.00 bits",
    ),
    "mxfp4": (
        QuantisedCase(
            model=tiny.gpt_oss(),
            quantization={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            forms={r".*experts\.\w+_proj": mxfp4},
            format_name="mxfp4",
        ),
        "mxfp4 packed, 4.25 bits",
    ),
    "fp8 rows": (
        QuantisedCase(
            model=_one_layer(tiny.qwen3_moe(192)),
            quantization=_compressed("float-quantized", 8, "channel", kind="float"),
            forms={_PROJECTIONS: fp8("row", suffix="weight_scale")},
            format_name="",
        ),
        "fp8_channel packed, 8.00 bits",
    ),
    "int8 rows": (
        QuantisedCase(
            model=_one_layer(tiny.qwen3_moe()),
            quantization=_compressed("int-quantized", 8, "channel"),
            forms={_PROJECTIONS: compressed_int(8, is_packed=False, scale_dtype=_FP32)},
            format_name="",
        ),
        "int8 packed, 8.00 bits",
    ),
    "int4 groups": (
        QuantisedCase(
            model=_one_layer(tiny.qwen3_moe()),
            quantization=_compressed("pack-quantized", 4, "group", group_size=32),
            forms={_PROJECTIONS: compressed_int(4, 32, scale_dtype=_FP32)},
            format_name="",
        ),
        "int4 packed, 5.00 bits",
    ),
    "int4 groups with zeros": (
        QuantisedCase(
            model=_one_layer(tiny.qwen3_moe()),
            quantization=_compressed("pack-quantized", 4, "group", group_size=64, symmetric=False),
            forms={_PROJECTIONS: compressed_int(4, 64, is_symmetric=False, scale_dtype=_FP32)},
            format_name="",
        ),
        "int4_zero packed, 4.62 bits",
    ),
    "gptq of 4 and 8 bits": (
        QuantisedCase(
            model=_one_layer(tiny.qwen3_moe(192)),
            quantization=gptqmodel(
                checkpoint_format="gptq_v2",
                sym=False,
                dynamic={"-:.*gate$": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 32}},
            ),
            forms={
                r".*\.down_proj": gptq(8, 32, is_symmetric=False, zero_shift=0, scale_dtype=_FP32),
                _PROJECTIONS: gptq(4, 128, is_symmetric=False, zero_shift=0, scale_dtype=_FP32),
            },
            format_name="",
        ),
        "int4_zero and int8_zero packed, 5.96 bits",
    ),
    "awq": (
        QuantisedCase(
            model=_one_layer(tiny.mixtral()),
            quantization=auto_awq(128, ["gate"]),
            forms={f"{_PROJECTIONS}|{_EXPERTS}": awq(128, _FP32)},
            format_name="",
        ),
        "int4_zero packed, 4.31 bits",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_logits(name: str, tmp_path: Path, device: torch.device) -> None:
    """The logits are within 1e-4 of those of the torch set, in fp32, with weights in floats."""
    case, description = PACKED[name]
    stored, plain = write_pair(tmp_path, case)
    loader = ModelLoader(stored, kernels="triton", dtype=_FP32, device=device)
    assert loader.expert_weights.startswith(f"experts {description}; "), loader.expert_weights
    (prompt,) = random_prompts((4,))
    found = model_logits(stored, "triton", prompt, 4, device=device)
    want = model_logits(plain, "torch", prompt, 4)
    error = ((found - want).abs().max() / want.abs().max()).item()
    assert error < 1e-4, f"{name}: {error:.2e}"


def test_what_cannot_stay_packed_is_dequantised_and_said(
    tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights with activation order are dequantised; the setting `packed` refuses them."""
    case = QuantisedCase(
        model=_one_layer(tiny.mixtral()),
        quantization=auto_gptq(desc_act=True, group_size=32),
        forms={f"{_PROJECTIONS}|{_EXPERTS}": gptq(4, 32, is_shuffled=True)},
        format_name="",
    )
    stored, plain = write_pair(tmp_path, case)
    with caplog.at_level(logging.WARNING):
        loader = ModelLoader(stored, kernels="triton", dtype=_FP32, device=device)
    (line,) = [r.getMessage() for r in caplog.records if "expert_packing" in r.name]
    assert "are shuffled (activation order) (model.layers.0.block_sparse_moe.experts.0" in line
    assert loader.expert_weights.startswith("dequantised to float32 while loading")
    (prompt,) = random_prompts((4,))
    found = model_logits(stored, "triton", prompt, 4, device=device)
    want = model_logits(plain, "torch", prompt, 4)
    error = ((found - want).abs().max() / want.abs().max()).item()
    assert error < 1e-4, f"{error:.2e}"
    with pytest.raises(ConfigError, match="cannot stay packed: .*activation order"):
        ModelLoader(stored, kernels="triton", device=device, expert_weights="packed")
