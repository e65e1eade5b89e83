"""Measures BitDelta adapters: bytes, perplexity beside the fine-tune's, and several in one batch.

    python benchmarks/run.py bitdelta
    python benchmarks/run.py bitdelta --json bitdelta.json

The fine-tune is the demonstration model with both of its example adapters merged. Perplexity is
that of pages of docs/guide, a kind of text that the fine-tune was made for. Speed is that of four
different adapters in one batch, and of four merged models that answer one after the other, in
turns.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from harness.environment import write_report
from moe_serve.adapters.bitdelta.make import make_bitdelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.offline.llm import LLM

_GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
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


def windows_of(base: Path, count: int) -> list[list[int]]:
    text = "\n\n".join(path.read_text("utf-8") for path in sorted(_GUIDE.glob("*.md")))
    tokens = Tokenizer.from_file(str(base / "tokenizer.json")).encode(text).ids
    return [tokens[i * _WINDOW : (i + 1) * _WINDOW] for i in range(count)]


def speeds(llm: LLM, names: Sequence[str], num_tokens: int, rounds: int) -> dict[str, float]:
    """Returns the medians of tokens per second, in turns."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    prompts = [[5 + i, 9, 20, 77, 31, 8] for i in range(_COUNT)]
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first is not counted
        for case in ("base", "adapters", "in turns"):
            start = time.perf_counter()
            if case == "in turns":
                for prompt in prompts:
                    llm.generate([prompt], params, use_progress_bar=False)
            else:
                chosen = list(names) if case == "adapters" else None
                llm.generate(prompts, params, adapter=chosen, use_progress_bar=False)
            speed = _COUNT * num_tokens / (time.perf_counter() - start)
            found.setdefault(case, []).extend([speed] if number else [])
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
    settings = {"num_threads": options.threads, "prefix_cache": False, "max_model_len": 1024}
    with LLM(str(base), adapters=folders, **settings) as llm:
        windows = windows_of(base, options.windows)
        for name in (None, "matrix0", "row0"):
            found[f"perplexity, {name or 'base'}"] = perplexity(llm, windows, name)
        names = [f"matrix{i}" for i in range(_COUNT)]
        found |= {f"tokens/s, {k}": v for k, v in speeds(llm, names, 64, options.rounds).items()}
        assert llm._adapters is not None, "adapters were given"
        stats = llm._adapters.stats
        found["bytes of an adapter in memory"] = stats.bytes_in_memory / stats.num_in_memory
    with LLM(str(tuned[0]), **settings) as llm:
        found["perplexity, fine-tune"] = perplexity(llm, windows, None)
    found["model bytes"] = float((base / "model.safetensors").stat().st_size)
    return found


def ratios(found: Mapping[str, float]) -> dict[str, float]:
    """Returns what the figures are compared by."""
    fine = found["perplexity, fine-tune"]
    return {
        "perplexity, one scale a matrix / fine-tune": found["perplexity, matrix0"] / fine,
        "perplexity, one scale a row / fine-tune": found["perplexity, row0"] / fine,
        "perplexity, base / fine-tune": found["perplexity, base"] / fine,
        "4 adapters in a batch / base": found["tokens/s, adapters"] / found["tokens/s, base"],
        "4 adapters in a batch / 4 models in turns": (
            found["tokens/s, adapters"] / found["tokens/s, in turns"]
        ),
        "model and 4 adapters / one model, bytes": 1
        + _COUNT * found["bytes of an adapter in memory"] / found["model bytes"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=int, default=24, help="of 512 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = dict(measure(options, Path(folder)))
    found |= ratios(found)
    print("\n".join(f"{name:45} {value:14.3f}" for name, value in found.items()))
    if options.json is not None:
        write_report(options.json, found)
    return 0
