"""Compares cache policies with half of the experts in memory, on the same requests.

    python benchmarks/run.py expert_memory --json build/expert_memory.json
    python benchmarks/run.py expert_memory --predictor moe_serve/demo_model/predictor

With a request predictor, every policy except LRU runs a second time, with predictions of the
experts that the requests of a step will need. The model is the demonstration model or a wider
random one (`--random`); the random one has no next-layer predictor, so that policy is left out.
With the page cache, reading an expert costs no more than packing it; `--latency-us` and
`--gigabytes-per-s` imitate a slower disk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expert_memory.rounds import TOLD, Outcome, draw, run_rounds, token_streams
from harness.environment import write_report
from make_random_model import Sizes, write_random_model
from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PredictorConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.model.checkpoint.checkpoint import Checkpoint, Shape, demo_model_folder
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.load.weight_reader import OpenWeights, WeightReader
from moe_serve.text.tokenizer import Tokenizer

NEXT_LAYER = "next-layer"
POLICIES = ("lru", "frequency", "prefetch", "predicted", NEXT_LAYER)
ALL = "all resident"
WIDE = Sizes(
    num_layers=6, width=512, num_heads=8, num_kv_heads=2, head_dim=64,
    num_experts=32, top_k=4, expert_width=512, vocab_size=4096, max_positions=1024,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    tier = Tier(latency_s=options.latency_us * 1e-6, bytes_per_s=options.gigabytes_per_s * 1e9)
    report: dict[str, object] = {
        "model": "random, " + str(asdict(WIDE)) if options.random else "demonstration",
        "tier": str(tier),
        "share": options.share,
        "threads": options.threads,
        "prompt": options.prompt,
        "tokens": options.tokens,
    }
    with ExitStack() as stack:
        folder = _random(stack) if options.random else demo_model_folder()
        engines = {ALL: _engine(folder, options, None, None, tier, PredictorConfig())}
        num_bytes = int(expert_bytes(folder) * options.share)
        for policy in options.policies:
            if policy == NEXT_LAYER and options.random:
                continue
            known = PredictorConfig()
            if policy == NEXT_LAYER:
                beside = options.predictor or demo_model_folder() / "predictor"
                known = PredictorConfig(path=str(beside), mode="off")
            engines[policy] = _engine(folder, options, policy, num_bytes, tier, known)
            if options.predictor is not None and policy != "lru":
                known = PredictorConfig(path=str(options.predictor))
                told = _engine(folder, options, policy, num_bytes, tier, known)
                engines[f"{policy}{TOLD}"] = told
        tokenizer = Tokenizer.load(demo_model_folder())
        streams = token_streams(options.texts, tokenizer)
        for batch in options.batches:
            rounds = [
                draw(streams, batch, options.prompt, seed) for seed in range(options.rounds + 1)
            ]
            outcomes = run_rounds(engines, rounds, options.tokens)
            report[f"batch {batch}"] = [asdict(outcome) for outcome in outcomes]
            _print(batch, tier, outcomes)
        for engine in engines.values():
            engine.close()
    write_report(options.json, report)
    return 0


def _engine(
    folder: Path,
    options: argparse.Namespace,
    policy: str | None,
    num_bytes: int | None,
    tier: Tier,
    predictor: PredictorConfig,
) -> DrivenEngine:
    config = EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(
            path=str(folder),
            num_threads=options.threads,
            expert_memory_bytes=num_bytes,
            expert_memory_policy=policy or "lru",  # type: ignore[arg-type]
        ),
        cache=CacheConfig(prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=max(options.batches)),
        predictor=predictor,
    )
    return build_engine(config, open_weights=slow_weights(tier)).engine


def expert_bytes(folder: Path) -> int:
    """Returns the bytes of all routed experts, packed with two bytes per value."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = ("hidden_size", "moe_intermediate_size", "num_experts", "num_hidden_layers")
    width, expert_width, num_experts, num_layers = (config[name] for name in names)
    return int(3 * width * expert_width * num_experts * num_layers * 2)


def _random(stack: ExitStack) -> Path:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_random_model(folder, "qwen3_moe", WIDE, dtype="bfloat16", seed=0, shard_bytes=2**29)
    return folder


def _print(batch: int, tier: Tier, outcomes: Sequence[Outcome]) -> None:
    print(f"\n{batch} requests; experts read from: {tier}")
    for each in outcomes:
        print(
            f"  {each.name:15} {each.tokens_per_s} tokens/s, {each.over_first} of LRU's; hits "
            f"{each.hit_rate} of experts, {each.row_hit_rate} of rows; waits {each.wait_share}; "
            f"{each.megabytes_read_per_token} MB a token; read ahead {each.prefetched}, of these "
            f"needed {each.prefetch_hits}",
            flush=True,
        )
        if each.read_over_untold is not None:
            print(f"  {'':15} bytes {each.read_over_untold} of those without", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", action="store_true", help="a wider model of random weights")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts that fit")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--predictor", type=Path, help="a folder, of the demonstration model")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4, 16))
    parser.add_argument("--rounds", type=int, default=8, help="after one that warms up")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--threads", type=int, default=1, help="of the kernels")
    parser.add_argument("--latency-us", type=float, default=0.0, help="of a tensor's read")
    parser.add_argument("--gigabytes-per-s", type=float, default=float("inf"))
    parser.add_argument("--texts", type=Path, nargs="*", default=(), help="files of domains")
    parser.add_argument("--json", type=Path)
    return parser


@dataclass(frozen=True, slots=True)
class Tier:
    """The storage of the experts. Reads by two threads overlap, as on a disk with a queue."""

    latency_s: float = 0.0  # of each tensor
    bytes_per_s: float = float("inf")

    def __str__(self) -> str:
        if not self.latency_s and self.bytes_per_s == float("inf"):
            return "page cache"
        return f"{self.latency_s * 1e6:.0f} us a tensor, {self.bytes_per_s / 1e9:g} GB/s"

    def wait(self, num_bytes: int) -> None:
        seconds = self.latency_s + num_bytes / self.bytes_per_s
        if seconds:
            time.sleep(seconds)


class SlowReader(WeightReader):
    """A reader that is slow only for experts that are read while requests run, not while
    loading.
    """

    def __init__(self, folder: Path, config: HFConfig, tier: Tier, *, is_copying: bool) -> None:
        super().__init__(Checkpoint(folder, is_copying=is_copying), config)
        self._arguments: tuple[Any, ...] = (folder, config, tier)
        self._tier = tier if is_copying else Tier()

    def read(
        self, name: str, shape: Shape, dtype: torch.dtype, expert: int | None = None
    ) -> Tensor:
        weight = super().read(name, shape, dtype, expert)
        self._tier.wait(weight.nbytes)
        return weight

    def copying(self) -> SlowReader:
        return SlowReader(*self._arguments, is_copying=True)


def slow_weights(tier: Tier) -> OpenWeights:
    """Opens weights for `build_engine` on a simulated slow disk.

    Every read delays only while the server answers requests.
    """

    def open_weights(folder: Path, config: HFConfig) -> SlowReader:
        return SlowReader(folder, config, tier, is_copying=False)

    return open_weights
