"""Scales of a BitDelta adapter that are fitted to texts, and the model with gradients behind it."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe_serve.adapters.bitdelta.distil import DistilRecipe, DistilTexts
from moe_serve.adapters.bitdelta.make import ScalesName, make_bitdelta
from moe_serve.adapters.bitdelta.make_distilled import make_distilled
from moe_serve.adapters.bitdelta.whole_texts import open_model
from moe_serve.errors import ConfigError
from moe_serve.offline.llm import LLM
from tests.support.adapters.adapter_folders import tensors_of
from tests.support.adapters.answers import PROMPTS, adapters_of, answers, answers_of, logprobs_of
from tests.support.adapters.bitdelta_folders import write_fine_tune
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint

TEXTS = [np.array(prompt * 3) for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["deepseek_v2-lite", "gpt_oss", "granitemoe-shared"])
def test_the_model_with_gradients_is_the_served_one(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "base", CASES[family])
    prompts = [np.array(prompt) for prompt in PROMPTS]
    with torch.no_grad():
        logprobs_TV = F.log_softmax(open_model(folder, 32).logits(prompts), dim=-1)
    served = answers_of(folder, dtype="float32", kernels="torch")
    first = 0
    for prompt, output in zip(prompts, served, strict=True):
        rows = logprobs_TV[first : first + len(prompt) - 1]
        own = rows[torch.arange(len(rows)), torch.from_numpy(prompt[1:])]
        assert torch.allclose(own, torch.tensor(logprobs_of(output)), atol=1e-4)
        first += len(prompt)


@pytest.mark.parametrize("scales", ["matrix", "row"])
def test_fitted_scales(base: Path, tmp_path: Path, scales: ScalesName) -> None:
    """The texts' divergence falls, and the served adapter has the perplexity that was measured."""
    tuned, out = write_fine_tune(tmp_path / "tuned", base, seed=3), tmp_path / "fitted"
    texts = DistilTexts(fitted=TEXTS, held_out=TEXTS)
    made = make_distilled(base, tuned, out, scales, texts, DistilRecipe(num_steps=8, rate=0.1))
    found = made.distilled
    assert found.is_better and found.after.divergence < 0.9 * found.before.divergence
    assert made.size == make_bitdelta(base, tuned, tmp_path / "plain", scales)
    first, fitted = tensors_of(tmp_path / "plain"), tensors_of(out)
    changed = {name for name in fitted if not torch.equal(fitted[name], first[name])}
    assert changed and all(name.endswith(".delta_scale") for name in changed)
    with LLM(str(base), adapters=adapters_of(own=out), dtype="float32") as llm:
        outputs = answers(llm, "own", [text.tolist() for text in TEXTS])
    logprobs = [each for output in outputs for each in logprobs_of(output)]
    perplexity = math.exp(-statistics.fmean(logprobs))
    assert perplexity == pytest.approx(found.after.perplexity, rel=1e-3)


def test_an_existing_folder_is_refused_at_once(base: Path, tmp_path: Path) -> None:
    texts = DistilTexts(fitted=TEXTS, held_out=TEXTS)
    with pytest.raises(ConfigError, match="exists: name a new folder"):
        make_distilled(base, base, tmp_path, "matrix", texts, DistilRecipe())
