"""Packed experts in slots against the same experts resident, bit for bit.

T rows, K choices per row, D model width.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_kernels.kernel_choice import KernelsName
from moe_serve.model.load.load_expert_memory import MemoryBudget
from moe_serve.model.load.loader import ModelLoader
from tests.support.families import quantised_models as tiny
from tests.support.families.quantised_cases import CASES
from tests.support.families.quantised_configs import compressed, group
from tests.support.families.quantised_folder import QuantisedCase, write_pair
from tests.support.families.stored_forms import compressed_int, mxfp4

ROWS = 5
FORMS = {
    "fp8 blocks": CASES["DeepSeek-V3"],
    "mxfp4, with biases": QuantisedCase(
        model=tiny.gpt_oss(),
        quantization={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        forms={r".*experts\.\w+_proj": mxfp4},
        format_name="mxfp4",
    ),
    "int4 groups with zeros": QuantisedCase(
        model=tiny.qwen3_moe(),
        quantization=compressed(
            "pack-quantized",
            ["lm_head", "re:.*gate$"],
            group_0=group(4, "group", group_size=64, symmetric=False),
        ),
        forms={
            r".*_proj(_with_mqa)?": compressed_int(
                4, 64, is_symmetric=False, scale_dtype=torch.float32
            )
        },
        format_name="",
    ),
}


@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, "torch") for name in FORMS), *((name, "triton") for name in list(FORMS)[1:])],
)
@pytest.mark.usefixtures("rows_are_alike")
def test_packed_experts_in_slots(
    name: str, kernels: KernelsName, tmp_path: Path, device: torch.device
) -> None:
    """There is room for two, so every layer takes several passes."""
    stored, _ = write_pair(tmp_path, FORMS[name])
    loader = ModelLoader(
        stored, kernels=kernels, dtype=torch.float32, device=device, expert_weights="packed"
    )
    spec = loader.spec
    whole = loader.expert_stage()
    sample = loader.expert_stage(budget=MemoryBudget(num_bytes=2**24, policy="lru")).memory
    assert sample is not None, "there is a budget"
    budget = MemoryBudget(num_bytes=2 * sample.slot_bytes, policy="lru")
    stage = loader.expert_stage(budget=budget)
    generator = torch.Generator().manual_seed(3)
    for layer in whole.sparse_layers:
        chosen_TE = torch.rand(ROWS, spec.router.num_experts, generator=generator)
        ids_TK = chosen_TE.topk(spec.router.top_k).indices.sort().values
        x_TD = torch.randn(ROWS, spec.width, generator=generator)
        weights_TK = torch.rand(ids_TK.shape, generator=generator)
        rows = x_TD.to(device), ids_TK.to(device), weights_TK.to(device)
        got_TD, want_TD = stage.layer(layer).total(*rows), whole.layer(layer).total(*rows)
        assert torch.equal(got_TD, want_TD), f"{name}, {kernels}, layer {layer}"
    assert stage.memory is not None, "there is a budget"
    stats = stage.memory.stats
    assert stats.num_passes > stats.num_visits, f"{stats}"
