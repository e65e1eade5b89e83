"""Measures adapters: the speed of a base model beside them, and of many adapters in one batch.

    python benchmarks/run.py adapters                                 the demonstration model
    python scripts/make_random_model.py build/random-1b
    python benchmarks/run.py adapters --model build/random-1b --threads 2 --on all --rounds 2
    python benchmarks/run.py adapters --on esft --adapters 20         10% of the experts, whole
    python benchmarks/run.py adapters --layout 1A1E --on all          on ranks
    python benchmarks/run.py adapters --on all --clock cpu            on a busy machine, one process

Writes random adapters into a temporary folder: LoRAs (rank 16) of attention, or of attention and
all experts, or ESFTs. The cases take turns, on the same prompts; each figure is the median of the
rounds. "merged in turns" answers one stream after the other, as merged checkpoints in one process
would, without counting the time to load them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.environment import write_report
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.load.loader import ModelLoader
from moe_serve.offline.llm import LLM
from offline.random_adapters import write_esfts, write_loras

_LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "alone": {},
    "1A1E": {"attention_ranks": 1, "expert_ranks": 1},
    "1A2E": {"attention_ranks": 1, "expert_ranks": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch: the adapter of each stream. `is_off`: it runs on a server without adapters."""

    name: str
    adapters: tuple[str | None, ...]
    is_in_turns: bool = False  # one stream after the other
    is_off: bool = False


def cases(streams: int, num_adapters: int) -> list[Case]:
    """Returns the cases in the order in which they take turns."""
    every = tuple(f"a{i % num_adapters}" for i in range(streams))
    none = (None,) * streams
    return [
        Case(name="1 stream, base", adapters=(None,)),
        Case(name="1 stream, adapter", adapters=("a0",)),
        Case(name=f"{streams} streams, base", adapters=none),
        Case(name=f"{streams} streams, one adapter", adapters=("a0",) * streams),
        Case(name=f"{streams} streams, all adapters", adapters=every),
        Case(name=f"{streams} merged in turns", adapters=none, is_in_turns=True),
        Case(name=f"{streams} streams, base, adapters off", adapters=none, is_off=True),
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
        adapters = None if case.is_off else case.adapters
        llm.generate(chosen, params, adapter=adapters, use_progress_bar=False)
    return len(chosen) * num_tokens / (clock() - start)


def measure(options: argparse.Namespace, root: Path) -> dict[str, float]:
    """Returns the tokens per second of each case, and the bytes of adapters and of the model."""
    folder = demo_model_folder() if options.model is None else options.model
    folders = _written(ModelLoader(folder), root, options)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 250, 8).tolist() for _ in range(options.streams)]
    settings: dict[str, Any] = {
        "num_threads": options.threads,
        "prefix_cache": False,
        "speculation": "off",
    }
    settings |= {"max_model_len": 256, **_LAYOUTS[options.layout]}
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(str(folder), adapters=folders, **settings))
        without = stack.enter_context(LLM(str(folder), **settings)) if options.off else None
        for number in range(options.rounds + 1):  # the first is not counted
            for case in cases(options.streams, options.adapters):
                used = without if case.is_off else llm
                if used is not None:
                    speed = tokens_per_second(used, case, prompts, options.tokens, clock)
                    found.setdefault(case.name, []).extend([speed] if number else [])
        assert llm._adapters is not None, "adapters were given"
        num_bytes = float(llm._adapters.stats.bytes_in_memory)
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    return medians | {
        "adapter bytes": num_bytes,
        "bytes of the adapters' files": float(
            sum(_weight_bytes(each) for each in folders.values())
        ),
        "model bytes": float(_weight_bytes(folder)),
    }


def _written(loader: ModelLoader, root: Path, options: argparse.Namespace) -> dict[str, str]:
    if options.on == "esft":
        return write_esfts(loader, root, options.adapters, options.share)
    return write_loras(loader, root, options.adapters, options.on)


def _weight_bytes(folder: str | Path) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def lines(found: Mapping[str, float], streams: int, num_adapters: int) -> list[str]:
    """Returns the figures and the ratios that the bars are about."""
    many, base = found[f"{streams} streams, all adapters"], found[f"{streams} streams, base"]
    model, adapters = found["model bytes"], found["adapter bytes"]
    ratios = {
        "1 stream: adapter / base": found["1 stream, adapter"] / found["1 stream, base"],
        f"{streams} streams: one adapter / base": found[f"{streams} streams, one adapter"] / base,
        f"{streams} streams: {num_adapters} adapters / base": many / base,
        f"{num_adapters} adapters / merged in turns": many / found[f"{streams} merged in turns"],
        f"bytes: model and adapters / {num_adapters} models": (
            (model + adapters) / (num_adapters * model)
        ),
        "bytes: model and adapters / their files": (
            (model + adapters) / (model + found["bytes of the adapters' files"])
        ),
    }
    off = found.get(f"{streams} streams, base, adapters off")
    if off is not None:
        ratios["none used / adapters off"] = base / off
    shown = [f"{name:40} {value:14.1f}" for name, value in found.items()]
    return [*shown, "", *(f"{name:40} {value:14.3f}" for name, value in ratios.items())]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: the demonstration model")
    parser.add_argument("--on", choices=("attention", "all", "esft"), default="attention")
    parser.add_argument("--share", type=float, default=0.1, help="of experts that an ESFT replaces")
    parser.add_argument("--layout", choices=tuple(_LAYOUTS), default="alone")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-off", action="store_false", dest="off", help="no second, plain model")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    if options.clock == "cpu" and options.layout != "alone":
        parser.error("--clock cpu counts this process alone: leave it out on ranks")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print("\n".join(lines(found, options.streams, options.adapters)))
    if options.json is not None:
        write_report(options.json, found)
    return 0
