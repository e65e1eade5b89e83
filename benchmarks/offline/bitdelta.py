"""Measures BitDelta adapters: bytes, perplexity beside the fine-tune's, and several in one batch.

    python benchmarks/run.py bitdelta                      about two minutes on a quiet machine
    python benchmarks/run.py bitdelta --clock cpu          on a busy one: speeds by processor time
    python benchmarks/run.py bitdelta --json bitdelta.json

The fine-tune is the demonstration model with both of its example adapters merged. Perplexity is
that of pages of docs/guide, a kind of text that the fine-tune was made for; scales are fitted to
docs/internals and docs/operate (--steps 0: not at all). Speed is that of four different adapters in
one batch, also with as many rows of the base model beside, and of four merged models that answer
one after the other. The cases take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from harness.environment import write_report
from moe_serve.adapters.bitdelta.distil import Distilled, DistilRecipe, DistilTexts
from moe_serve.adapters.bitdelta.make import make_bitdelta
from moe_serve.adapters.bitdelta.make_distilled import make_distilled
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.offline.llm import LLM

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_WINDOW = 512
_COUNT = 4  # fine-tunes in one batch


def write_fine_tune(folder: Path, base: Path, seed: int) -> Path:
    """Writes the model with its example adapters merged; `seed` > 0: and a little noise in all
    matrices of the layers."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "adapters"))
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        is_noisy = seed and name.endswith("_proj.weight")
        noise = torch.randn(weight.shape, generator=generator) if is_noisy else 0.0
        weights[name] = (weight.float() + 1e-3 * noise).to(weight.dtype)
    _merge(weights, base / "adapters")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _merge(weights: dict[str, Tensor], adapters: Path) -> None:
    weights |= load_file(adapters / "manual-esft" / "model.safetensors")
    config = json.loads((adapters / "manual-lora" / "adapter_config.json").read_text())
    lora = load_file(adapters / "manual-lora" / "adapter_model.safetensors")
    for name, a in lora.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            added = lora[f"{module}.lora_B.weight"].float() @ a.float()
            target = module.removeprefix("base_model.model.") + ".weight"
            added *= config["lora_alpha"] / config["r"]
            weights[target] = (weights[target].float() + added).to(weights[target].dtype)


def perplexity(llm: LLM, windows: Sequence[list[int]], adapter: str | None) -> float:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outputs = llm.generate(list(windows), params, adapter=adapter, use_progress_bar=False)
    found = [
        described[token].logprob
        for output in outputs
        for token, described in zip(
            output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True
        )
        if described is not None
    ]
    return math.exp(-statistics.fmean(found))


def windows_of(
    base: Path, count: int, size: int = _WINDOW, folder: str = "guide"
) -> list[list[int]]:
    text = "\n\n".join(path.read_text("utf-8") for path in sorted((_DOCS / folder).glob("*.md")))
    tokens = Tokenizer.from_file(str(base / "tokenizer.json")).encode(text).ids
    return [tokens[i * size : (i + 1) * size] for i in range(min(count, len(tokens) // size))]


def fitted(base: Path, tuned: Path, out: Path, steps: int) -> Distilled:
    """Makes an adapter whose scales are fitted to pages that perplexity is not measured on."""
    pages = [windows_of(base, 400, 128, folder) for folder in ("internals", "operate")]
    texts = [np.array(tokens, dtype=np.int64) for windows in pages for tokens in windows]
    order = np.random.default_rng(0).permutation(len(texts))
    texts = [texts[i] for i in order]
    chosen = DistilTexts(fitted=texts[16:], held_out=texts[:16])
    recipe = DistilRecipe(num_steps=steps)
    return make_distilled(base, tuned, out, "matrix", chosen, recipe).distilled


def speeds(
    llm: LLM, names: Sequence[str], num_tokens: int, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Returns the medians of tokens per second, in turns."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    prompts = [[5 + i, 9, 20, 77, 31, 8] for i in range(_COUNT)]
    none: list[str | None] = [None] * _COUNT
    cases: dict[str, list[str | None]] = {
        "base": none,
        "adapters": list(names),
        "one adapter": [names[0]] * _COUNT,
        "adapters and base rows": [*names, *none],
        "base, twice the rows": none * 2,
        "in turns": none,
    }
    found: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(rounds + 1):  # the first is not counted
        for case, chosen in cases.items():
            wanted, start = (prompts * 2)[: len(chosen)], clock()
            if case == "in turns":
                for prompt in wanted:
                    llm.generate([prompt], params, use_progress_bar=False)
            else:
                llm.generate(wanted, params, adapter=chosen, use_progress_bar=False)
            speed = len(chosen) * num_tokens / (clock() - start)
            found[case].extend([speed] if number else [])
    return {name: statistics.median(each) for name, each in found.items()}


def measure(options: argparse.Namespace, root: Path) -> Mapping[str, float]:
    base, found = demo_model_folder(), dict[str, float]()
    tuned = [write_fine_tune(root / f"tuned{i}", base, i) for i in range(_COUNT)]
    folders = {}
    for i, folder in enumerate(tuned):
        for scales in ("matrix", "row") if i == 0 else ("matrix",):
            out = root / f"{scales}{i}"
            size = make_bitdelta(base, folder, out, scales)
            folders[out.name] = str(out)
            if i == 0:
                found[f"{out.name}: matrices, bf16 / stored"] = (
                    size.matrix_bf16_bytes / size.matrix_bytes
                )
    if options.steps:
        done = fitted(base, tuned[0], root / "fitted", options.steps)
        folders["fitted"] = str(root / "fitted")
        found["divergence, mean scales, nats"] = done.before.divergence
        found["divergence, fitted scales, nats"] = done.after.divergence
    settings: dict[str, Any] = {"num_threads": options.threads, "max_model_len": 1024}
    settings |= {"prefix_cache": False, "speculation": "off"}
    with LLM(str(base), adapters=folders, **settings) as llm:
        windows = windows_of(base, options.windows)
        for name in (None, "matrix0", "row0", *(["fitted"] if options.steps else [])):
            found[f"perplexity, {name or 'base'}"] = perplexity(llm, windows, name)
        names = [f"matrix{i}" for i in range(_COUNT)]
        clock = time.process_time if options.clock == "cpu" else time.perf_counter
        found |= {
            f"tokens/s, {case}": speed
            for case, speed in speeds(llm, names, 64, options.rounds, clock).items()
        }
        assert llm._adapters is not None, "adapters were given"
        stats = llm._adapters.stats
        found["bytes of an adapter in memory"] = stats.bytes_in_memory / stats.num_in_memory
    with LLM(str(tuned[0]), **settings) as llm:
        found["perplexity, fine-tune"] = perplexity(llm, windows, None)
    found["model bytes"] = float((base / "model.safetensors").stat().st_size)
    return found


def ratios(found: Mapping[str, float]) -> dict[str, float]:
    """Returns what the figures are compared by."""
    fine, speed = found["perplexity, fine-tune"], _speed_ratios(found)
    if "perplexity, fitted" in found:
        speed["perplexity, fitted scales / fine-tune"] = found["perplexity, fitted"] / fine
    return {
        "perplexity, one scale a matrix / fine-tune": found["perplexity, matrix0"] / fine,
        "perplexity, one scale a row / fine-tune": found["perplexity, row0"] / fine,
        "perplexity, base / fine-tune": found["perplexity, base"] / fine,
        **speed,
        "model and 4 adapters / one model, bytes": 1
        + _COUNT * found["bytes of an adapter in memory"] / found["model bytes"],
    }


def _speed_ratios(found: Mapping[str, float]) -> dict[str, float]:
    adapters = found["tokens/s, adapters"]
    mixed = found["tokens/s, adapters and base rows"]
    return {
        "4 adapters in a batch / 4 rows of the base": adapters / found["tokens/s, base"],
        "4 rows of one adapter / 4 rows of the base": (
            found["tokens/s, one adapter"] / found["tokens/s, base"]
        ),
        "4 adapters and 4 base rows / 8 base rows": mixed / found["tokens/s, base, twice the rows"],
        "4 adapters in a batch / 4 models in turns": adapters / found["tokens/s, in turns"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="to fit scales; 0: none are fitted")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = dict(measure(options, Path(folder)))
    found |= ratios(found)
    print("\n".join(f"{name:45} {value:14.3f}" for name, value in found.items()))
    if options.json is not None:
        write_report(options.json, found)
    return 0
