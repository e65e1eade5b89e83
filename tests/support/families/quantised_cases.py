"""Quantised checkpoints, each after a published one."""

from __future__ import annotations

import torch

from tests.support.families import quantised_models as tiny
from tests.support.families.expert_layouts import separate, swapped, swapped_and_separate
from tests.support.families.quantised_configs import (
    DEEPSEEK_V3,
    auto_awq,
    auto_gptq,
    compressed,
    fp8_matrices,
    gptqmodel,
    group,
    mistral_fp8,
    of_tokens,
)
from tests.support.families.quantised_folder import QuantisedCase
from tests.support.families.stored_forms import awq, compressed_int, fp8, gptq

_ALL = r".*_proj(_with_mqa)?"
_EXPERTS = r".*\.experts\.\d+\.\w+"
_ROUTERS = ["model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate"]


_FP8_ROWS = group(8, "channel", kind="float", activations=of_tokens("float"))
_stored_rows = fp8("row", suffix="weight_scale", scale_dtype=torch.bfloat16, is_rounded=True)

FP8_CASES = {
    "DeepSeek-V3": QuantisedCase(
        model=tiny.deepseek_v3(),
        quantization=DEEPSEEK_V3,
        forms={_ALL: fp8("block")},
        format_name="fp8 blocks of 128x128",
        unread=("model.layers.2.enorm.weight", "model.layers.2.eh_proj.weight_scale_inv"),
        must_be_stored=("experts", "shared_experts", "kv_b_proj", "layers.0.mlp.down_proj"),
    ),
    "Qwen3-30B-A3B-FP8": QuantisedCase(
        model=tiny.qwen3_moe(192),
        quantization=DEEPSEEK_V3
        | {"modules_to_not_convert": ["lm_head", "model.layers.1.input_layernorm", *_ROUTERS]},
        forms={_ALL: fp8("block", scale_dtype=torch.bfloat16)},
        format_name="fp8 blocks of 128x128",
    ),
    "Qwen3-VL-30B-A3B-FP8": QuantisedCase(
        model=tiny.qwen3_vl_moe(),
        quantization=DEEPSEEK_V3 | {"modules_to_not_convert": ["model.visual.blocks.0.mlp"]},
        forms={r"model\.language_model.*_proj": fp8("block", scale_dtype=torch.bfloat16)},
        format_name="fp8 blocks of 128x128",
        layout=swapped,
    ),
    "Mistral-Small-4": QuantisedCase(
        model=tiny.mistral4(),
        quantization=mistral_fp8(["model.vision_tower", "lm_head"]),
        forms={
            r".*experts\.\w+_proj": fp8("fused matrix", scale_dtype=torch.bfloat16),
            _ALL: fp8("matrix", scale_dtype=torch.bfloat16),
        },
        format_name="fp8",
        unread=("model.layers.1.mlp.experts.down_proj_activation_scale",),
        must_be_stored=("experts", "shared_experts", "kv_b_proj"),
    ),
    "Mixtral-8x7B-FP8": QuantisedCase(
        model=tiny.mixtral(),
        quantization=fp8_matrices(["model.layers.0.block_sparse_moe.gate", "lm_head"]),
        forms={
            f"{_ALL}|{_EXPERTS}": fp8("matrix", suffix="weight_scale", has_input_scale=True),
        },
        format_name="fp8",
        unread=("model.layers.0.self_attn.k_scale",),
    ),
    "Qwen3-30B-A3B-FP8-dynamic": QuantisedCase(
        model=tiny.qwen3_moe(),
        quantization=compressed("float-quantized", ["lm_head", *_ROUTERS], group_0=_FP8_ROWS),
        forms={_ALL: _stored_rows},
        format_name="compressed-tensors fp8 rows",
    ),
    "GLM-4.5-Air-FP8": QuantisedCase(
        model=tiny.glm4_moe(),
        quantization=compressed(
            "float-quantized", ["lm_head", "re:.*mlp.gate$"], group_0=_FP8_ROWS
        ),
        forms={_ALL: _stored_rows},
        format_name="compressed-tensors fp8 rows",
        unread=("model.layers.2.eh_proj.weight_scale",),
        must_be_stored=("experts", "shared_experts", "self_attn", "layers.0.mlp.down_proj"),
    ),
    "Llama-4-Scout-FP8-dynamic": QuantisedCase(
        model=tiny.llama4(),
        quantization=compressed(
            "float-quantized",
            ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model.*"],
            group_0=_FP8_ROWS,
        ),
        forms={r".*feed_forward.*_proj": _stored_rows},
        format_name="compressed-tensors fp8 rows",
        layout=swapped_and_separate,
        must_be_stored=("experts", "shared_expert."),
    ),
    "Qwen3-30B-A3B-FP8-BLOCK": QuantisedCase(
        model=tiny.qwen3_moe(192),
        quantization=compressed(
            "float-quantized",
            ["lm_head", "re:.*mlp.gate$"],
            group_0=group(8, "block", kind="float", block_structure=[128, 128]),
        ),
        forms={
            _ALL: fp8("block", suffix="weight_scale", scale_dtype=torch.bfloat16, is_rounded=True)
        },
        format_name="compressed-tensors fp8 blocks of 128x128",
    ),
}

COMPRESSED_CASES = {
    "Kimi-K2-Thinking": QuantisedCase(
        model=tiny.deepseek_v3(),
        quantization=compressed(
            "pack-quantized",
            [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
            group_0=group(4, "group", group_size=32),
        ),
        forms={_EXPERTS: compressed_int(4, 32)},
        format_name="compressed-tensors int4 groups of 32",
    ),
    "Kimi-K2.5": QuantisedCase(
        model=tiny.deepseek_v3(),
        quantization=compressed(
            "pack-quantized",
            ["re:.*self_attn.*", "re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"],
            group_0=group(4, "group", group_size=32),
        ),
        forms={_EXPERTS: compressed_int(4, 32)},
        format_name="compressed-tensors int4 groups of 32",
        inside="KimiK25ForConditionalGeneration",
        unread=("vision_tower.patch_embed.proj.weight",),
        must_be_stored=("language_model.model.layers.1.mlp.experts",),
    ),
    "Qwen3-30B-A3B-quantized.w4a16": QuantisedCase(
        model=tiny.qwen3_moe(),
        quantization=compressed(
            "pack-quantized", ["lm_head", *_ROUTERS], group_0=group(4, "group", group_size=128)
        ),
        forms={_ALL: compressed_int(4, 128)},
        format_name="compressed-tensors int4 groups of 128",
    ),
    "Qwen3-30B-A3B-AWQ-4bit, by llm-compressor": QuantisedCase(
        model=tiny.qwen3_moe(),
        quantization=compressed(
            "pack-quantized",
            ["re:.*lm_head", "re:.*mlp.gate$"],
            group_0=group(4, "group", group_size=32, symmetric=False),
        ),
        forms={_ALL: compressed_int(4, 32, is_symmetric=False)},
        format_name="compressed-tensors int4 groups of 32",
    ),
    "Qwen3-VL-30B-A3B-AWQ-4bit, by llm-compressor": QuantisedCase(
        model=tiny.qwen3_vl_moe(),
        quantization=compressed(
            "pack-quantized",
            ["re:.*visual.*", "lm_head", "re:.*mlp.gate$"],
            group_0=group(4, "group", group_size=64),
        ),
        forms={r"model\.language_model.*_proj": compressed_int(4, 64)},
        format_name="compressed-tensors int4 groups of 64",
        layout=separate,
    ),
    "Mixtral-8x7B-w4a16-actorder": QuantisedCase(
        model=tiny.mixtral(),
        quantization=compressed(
            "pack-quantized",
            ["lm_head", "re:.*block_sparse_moe.gate"],
            group_0=group(4, "group", group_size=128, actorder="group"),
        ),
        forms={f"{_ALL}|{_EXPERTS}": compressed_int(4, 128, is_shuffled=True)},
        format_name="compressed-tensors int4 groups of 128",
    ),
    "Qwen3-30B-A3B-quantized.w8a8": QuantisedCase(
        model=tiny.qwen3_moe(),
        quantization=compressed(
            "int-quantized",
            ["lm_head", *_ROUTERS],
            group_0=group(8, "channel", activations=of_tokens("int")),
        ),
        forms={_ALL: compressed_int(8, is_packed=False)},
        format_name="compressed-tensors int8 rows",
    ),
    "three groups of modules": QuantisedCase(
        model=tiny.qwen2_moe(),
        quantization=compressed(
            "mixed-precision",
            ["re:.*gate$"],
            experts=group(
                4,
                "group",
                group_size=32,
                targets=(r"re:.*mlp\.experts.*_proj$",),
                layout="pack-quantized",
            ),
            head=group(8, "channel", targets=("lm_head",), layout="pack-quantized"),
            rest=_FP8_ROWS | {"format": "float-quantized"},
        ),
        forms={
            "lm_head": compressed_int(8),
            _EXPERTS: compressed_int(4, 32),
            _ALL: _stored_rows,
        },
        format_name="compressed-tensors int4 groups of 32 and int8 rows and fp8 rows",
        must_be_stored=("experts", "lm_head", "shared_expert.", "self_attn"),
    ),
}

INTEGER_CASES = {
    "Qwen3-30B-A3B-GPTQ-Int4": QuantisedCase(
        model=tiny.qwen3_moe(),
        quantization=gptqmodel(dynamic={"-:.*mlp.gate$": {}, "-:.*lm_head": {}}),
        forms={_ALL: gptq(4, 128)},
        format_name="gptq int4 groups of 128",
    ),
    "Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4": QuantisedCase(
        model=tiny.qwen2_moe(),
        quantization=auto_gptq(
            desc_act=False,
            modules_in_block_to_quantize=[
                ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"],
                ["self_attn.o_proj"],
                ["mlp.shared_expert.up_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj"],
            ],
        ),
        forms={r".*self_attn\.[qkv]_proj": gptq(4, 128), _ALL: gptq(4, 128, has_zero_bias=True)},
        format_name="gptq int4 groups of 128",
        must_be_stored=("experts", "shared_expert.", "self_attn"),
    ),
    "Mixtral-8x7B-GPTQ": QuantisedCase(
        model=tiny.mixtral(),
        quantization=auto_gptq(desc_act=True, sym=False, group_size=32),
        forms={f"{_ALL}|{_EXPERTS}": gptq(4, 32, is_symmetric=False, is_shuffled=True)},
        format_name="gptq int4 groups of 32",
    ),
    "gptq_v2 with a head and bits by module": QuantisedCase(
        model=tiny.qwen3_moe(192, vocab_size=304),
        quantization=gptqmodel(
            checkpoint_format="gptq_v2",
            sym=False,
            lm_head=True,
            dynamic={
                "-:.*gate$": {},
                "lm_head": {},
                r"+:.*\.down_proj": {"bits": 8, "group_size": 32},
            },
        ),
        forms={
            r".*\.down_proj": gptq(8, 32, is_symmetric=False, zero_shift=0),
            f"{_ALL}|lm_head": gptq(4, 128, is_symmetric=False, zero_shift=0),
        },
        format_name="gptq int4 groups of 128",
        must_be_stored=("experts", "lm_head"),
    ),
    "Mixtral-8x7B-Instruct-v0.1-AWQ": QuantisedCase(
        model=tiny.mixtral(),
        quantization=auto_awq(128, ["gate"]),
        forms={f"{_ALL}|{_EXPERTS}": awq(128)},
        format_name="awq int4 groups of 128",
    ),
    "DeepSeek-V2-Lite-AWQ": QuantisedCase(
        model=tiny.deepseek_v2(),
        quantization=auto_awq(32, None),
        forms={_ALL: awq(32)},
        format_name="awq int4 groups of 32",
        must_be_stored=("experts", "shared_experts", "kv_a_proj_with_mqa", "kv_b_proj"),
    ),
}

CASES = FP8_CASES | COMPRESSED_CASES | INTEGER_CASES
