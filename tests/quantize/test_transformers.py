"""transformers, with compressed-tensors and accelerate, reads a written model. Without these
packages, which the test extra does not have, the tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from moe_serve.quantize.quantise_plan import INT8_ROWS, QuantiseRules
from moe_serve.quantize.quantize_job import QuantiseJob, quantise
from moe_serve.quantize.rounded_matrix import Storage
from tests.support.families.parity import model_logits, random_prompts

pytest.importorskip("compressed_tensors")
pytest.importorskip("accelerate")

RULES = {
    "int4, int8 rows, int8 head": QuantiseRules(experts=Storage(4, 32), head=INT8_ROWS),
    "int4 alone": QuantiseRules(experts=Storage(4, 32), attention=Storage(4, 32)),
    "int8 experts": QuantiseRules(experts=Storage(8, 32), attention=None),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RULES)
def test_logits_are_those_of_our_loader(name: str, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = QuantiseJob(folder=tiny_model, out=out, rules=RULES[name], is_gptq=False)
    quantise(job, lambda what, share: None, lambda outcome: {})
    (prompt,) = random_prompts((40,))
    ours = model_logits(out, "torch", prompt, 40)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=config
    )
    with torch.inference_mode():
        theirs = model.float()(torch.tensor([prompt])).logits[0]
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"{name}, {error=:.2e}"
