"""Measures adapters: the speed of a base model beside them, and of many adapters in one batch.

    python benchmarks/run.py adapters                                 the demonstration model
    python scripts/make_random_model.py build/random-1b
    python benchmarks/run.py adapters --model build/random-1b --threads 2 --json adapters.json
    python benchmarks/run.py adapters --on all --clock cpu            on a busy machine

Writes 16 random LoRAs (rank 16), of attention or of attention and all experts, into a temporary
folder. The cases take turns, in one
process and on the same prompts; each figure is the median of the rounds. "merged in turns" answers
one stream after the other, as 16 merged checkpoints in one process would, without counting the time
to load them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from harness.environment import write_report
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.checkpoint.manifest import Stored, attention_table, expert_table
from moe_serve.model.load.loader import ModelLoader
from moe_serve.offline.llm import LLM

_RANK = 16
_PARTS = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch: the adapter of each stream."""

    name: str
    adapters: tuple[str | None, ...]
    is_in_turns: bool = False  # one stream after the other


def adapted_tensors(loader: ModelLoader, on: str) -> Iterator[Stored]:
    """Yields all projections of grouped-query attention and, with "all", those of all experts."""
    spec = loader.spec
    for layer in range(spec.num_layers):
        table = attention_table(loader.names, spec, layer)
        yield from (table[part] for part in _PARTS)
        if on == "all" and spec.layers[layer].is_sparse:
            layout = next(each for each in loader.names.experts if each.gate)
            for expert in range(spec.router.num_experts):
                yield from expert_table(layout, spec, layer, expert).values()


def write_loras(loader: ModelLoader, root: Path, count: int, on: str) -> dict[str, str]:
    """Writes random LoRAs."""
    folders = {}
    for number in range(count):
        generator, matrices = torch.Generator().manual_seed(number), {}
        for stored in adapted_tensors(loader, on):
            num_outputs, num_inputs = stored.shape
            module = "base_model.model." + stored.name.removesuffix(".weight")
            a = torch.randn(_RANK, num_inputs, generator=generator)
            b = torch.randn(num_outputs, _RANK, generator=generator)
            matrices[f"{module}.lora_A.weight"] = (0.02 * a).bfloat16()
            matrices[f"{module}.lora_B.weight"] = (0.02 * b).bfloat16()
        folder = root / f"a{number}"
        folder.mkdir()
        config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(matrices, folder / "adapter_model.safetensors")
        folders[folder.name] = str(folder)
    return folders


def cases(count: int) -> list[Case]:
    """Returns the cases in the order in which they take turns."""
    every = tuple(f"a{i}" for i in range(count))
    return [
        Case(name="1 stream, base", adapters=(None,)),
        Case(name="1 stream, adapter", adapters=("a0",)),
        Case(name=f"{count} streams, base", adapters=(None,) * count),
        Case(name=f"{count} streams, one adapter", adapters=("a0",) * count),
        Case(name=f"{count} streams, {count} adapters", adapters=every),
        Case(name=f"{count} merged in turns", adapters=(None,) * count, is_in_turns=True),
    ]


def tokens_per_second(
    llm: LLM, case: Case, prompts: Sequence[list[int]], num_tokens: int, clock: Callable[[], float]
) -> float:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    chosen, start = list(prompts[: len(case.adapters)]), clock()
    if case.is_in_turns:
        for prompt in chosen:
            llm.generate([prompt], params, use_progress_bar=False)
    else:
        llm.generate(chosen, params, adapter=case.adapters, use_progress_bar=False)
    return len(chosen) * num_tokens / (clock() - start)


def measure(options: argparse.Namespace, root: Path) -> dict[str, float]:
    """Returns the tokens per second of each case, and the bytes of adapters and of the model."""
    folder = demo_model_folder() if options.model is None else options.model
    folders = write_loras(ModelLoader(folder), root, options.adapters, options.on)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 250, 8).tolist() for _ in range(options.adapters)]
    found: dict[str, list[float]] = {}
    settings = {"num_threads": options.threads, "prefix_cache": False, "max_model_len": 256}
    with (
        LLM(str(folder), **settings) as without,
        LLM(str(folder), adapters=folders, **settings) as llm,
    ):
        for number in range(options.rounds + 1):  # the first is not counted
            for case in cases(options.adapters):
                speed = tokens_per_second(llm, case, prompts, options.tokens, clock)
                found.setdefault(case.name, []).extend([speed] if number else [])
            case = cases(options.adapters)[2]
            speed = tokens_per_second(without, case, prompts, options.tokens, clock)
            found.setdefault(f"{case.name}, adapters off", []).extend([speed] if number else [])
        assert llm._adapters is not None, "adapters were given"
        num_bytes = float(llm._adapters.stats.bytes_in_memory)
    model_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    return medians | {"adapter bytes": num_bytes, "model bytes": float(model_bytes)}


def lines(found: Mapping[str, float], count: int) -> list[str]:
    """Returns the figures and the ratios that the bars are about."""
    many = found[f"{count} streams, {count} adapters"]
    base, off = found[f"{count} streams, base"], found[f"{count} streams, base, adapters off"]
    ratios = {
        "none used / adapters off": base / off,
        "1 stream: adapter / base": found["1 stream, adapter"] / found["1 stream, base"],
        f"{count} streams: one adapter / base": found[f"{count} streams, one adapter"] / base,
        f"{count} streams: {count} adapters / base": many / base,
        f"{count} adapters / merged in turns": many / found[f"{count} merged in turns"],
        f"bytes: model and adapters / {count} models": (
            found["model bytes"] + found["adapter bytes"]
        )
        / (count * found["model bytes"]),
    }
    shown = [f"{name:40} {value:12.1f}" for name, value in found.items()]
    return [*shown, "", *(f"{name:40} {value:12.3f}" for name, value in ratios.items())]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: the demonstration model")
    parser.add_argument("--on", choices=("attention", "all"), default="attention")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print("\n".join(lines(found, options.adapters)))
    if options.json is not None:
        write_report(options.json, found)
    return 0
