"""Loads, reloads, unloads and evicts adapters under load, in one process or on ranks that die.

    python benchmarks/run.py adapter_soak                                     10 000 requests, alone
    python benchmarks/run.py adapter_soak --layout 2A2E --requests 1500 --kills 12 --json soak.json

The adapters are random LoRAs of the demonstration model, of attention and of attention and experts.
Every answer is compared with that of one process in which nothing else happens. The exit status is
0 only if all are equal, none failed, and no page of another adapter was found. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from harness.environment import write_report
from moe_serve.adapters.adapter_build import AdapterBuilder
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.adapter_part import WHOLE, AdapterPart
from moe_serve.cluster.control.rank_name import RankName, all_ranks
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members.rank_starter import LocalStarter
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.http.server import SWITCH_INTERVAL_S
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.load.loader import ModelLoader
from offline.random_adapters import write_loras
from soak.adapter_chaos import Chaos, Expected, Plan, answers_of

_NUM_PROMPTS, _PROMPT_TOKENS = 6, 40  # longer than two pages
_VOCAB_SIZE = 4096


def main() -> int:
    options = _parser().parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a server
    with tempfile.TemporaryDirectory() as folder:
        report = soak(options, Path(folder))
    print(json.dumps(report, indent=2))
    write_report(options.json, report)
    return 1 if report["problems"] else 0


def soak(options: argparse.Namespace, root: Path) -> dict[str, object]:
    """Runs the plan and returns the counts and the problems."""
    folders = _written(root, options.contents)
    rng = random.Random(options.seed)
    prompts = [
        [rng.randrange(1, _VOCAB_SIZE) for _ in range(_PROMPT_TOKENS)] for _ in range(_NUM_PROMPTS)
    ]
    alone = _config((0, 0), AdapterConfig(is_enabled=True))
    expected, layout = _expected(alone, folders, prompts), _layout(options.layout)
    sizes = _sizes(layout, folders)
    limit = int(options.in_memory * sum(sizes) / len(sizes))
    config = _config(layout, AdapterConfig(is_enabled=True, memory_bytes=limit))
    plan = Plan(num_requests=options.requests, num_names=options.names, seed=options.seed)
    starters: list[LocalStarter] = []
    built = _built(config, starters)
    strike = _striker(layout, starters, options) if options.kills else lambda number: None
    clock = time.perf_counter()
    try:
        assert built.adapters is not None
        chaos = Chaos(built.engine, built.adapters, folders, prompts, expected, plan, strike)
        tally = chaos.run()
        stats = asdict(built.adapters.stats)
    finally:
        built.engine.close()
    seconds = round(time.perf_counter() - clock, 1)
    counts = {**tally.counts, "problems": len(tally.problems)}
    return {
        "counts": counts,
        "problems": tally.problems[:20],
        "adapters": stats,
        "seconds": seconds,
        "p99 of a step in s, nothing loads": _p99(tally.calm_s),
        "p99 of a step in s, an adapter loads": _p99(tally.busy_s),
    }


def _p99(seconds: Sequence[float]) -> float | None:
    return round(float(np.quantile(seconds, 0.99)), 5) if seconds else None


def _written(root: Path, count: int) -> list[Path]:
    """Writes LoRAs, every third of them of experts too."""
    loader, folders = ModelLoader(demo_model_folder()), []
    for on in ("attention", "all"):
        (root / on).mkdir()
        number = count // 3 if on == "all" else count - count // 3
        folders += [Path(each) for each in write_loras(loader, root / on, number, on).values()]
    return folders


def _expected(
    config: EngineConfig, folders: Sequence[Path], prompts: Sequence[Sequence[int]]
) -> Expected:
    """Returns the answers of one process."""
    built = build_engine(replace(config, cache=CacheConfig(num_pages=256, prefix_cache=False)))
    registry = built.adapters
    assert registry is not None
    for number, folder in enumerate(folders):
        registry.load(f"c{number}", folder)
    held = [registry.acquire(f"c{number}") for number in range(len(folders))]
    try:
        return answers_of(built.engine, [None, *held], prompts)
    finally:
        built.engine.close()


def _sizes(layout: tuple[int, int], folders: Sequence[Path]) -> list[int]:
    """Returns the bytes of each adapter on the rank that holds the most of it."""
    loader, (_, num_ranks) = ModelLoader(demo_model_folder()), layout
    spec, parts = loader.spec, [WHOLE]
    if num_ranks:
        borders = [spec.router.num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
        held = [range(first, end) for first, end in itertools.pairwise(borders)]
        parts = [AdapterPart(experts={})]
        for experts in held:
            by_layer = dict.fromkeys(range(spec.num_layers), experts)
            parts.append(AdapterPart(has_attention=False, experts=by_layer))
    builders = [AdapterBuilder(loader, AdapterConfig(), part) for part in parts]
    return [max(_num_bytes(each, folder) for each in builders) for folder in folders]


def _num_bytes(builder: AdapterBuilder, folder: Path) -> int:
    with open_unchanged(folder) as files:
        return builder.build(files).num_bytes


def _config(layout: tuple[int, int], adapters: AdapterConfig) -> EngineConfig:
    attention, experts = layout
    return EngineConfig(
        model=ModelConfig(num_threads=1, max_model_len=256),
        scheduler=SchedulerConfig(max_num_seqs=16, max_batched_tokens=64),
        cache=CacheConfig(num_pages=256),
        cluster=ClusterConfig(attention_ranks=attention, expert_ranks=experts, heartbeat_s=10.0),
        adapters=adapters,
    )


def _built(config: EngineConfig, starters: list[LocalStarter]) -> BuiltEngine:
    """Builds the engine; the starter of its ranks is put into `starters`."""
    if not config.cluster.attention_ranks:
        return build_engine(config)

    def make(host: str, port: int, secret: ClusterSecret, threads: int) -> LocalStarter:
        starters.append(LocalStarter(host, port, secret, threads))
        return starters[-1]

    return build_cluster(config, make_starter=make)


def _striker(
    layout: tuple[int, int], starters: Sequence[LocalStarter], options: argparse.Namespace
) -> Callable[[int], None]:
    """Returns what kills a random rank before some requests, evenly distributed."""
    rng, names = random.Random(options.seed), all_ranks(*layout)
    every = max(1, options.requests // (options.kills + 1))

    def strike(number: int) -> None:
        if number and number % every == 0:
            victim: RankName = rng.choice(names)
            starters[0].kill(victim)

    return strike


def _layout(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)A(\d+)E", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layout", default="alone", help="such as 2A2E; alone: one process")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--names", type=int, default=50)
    parser.add_argument("--contents", type=int, default=12, help="different adapters")
    parser.add_argument("--in-memory", type=int, default=8, help="adapters that fit into memory")
    parser.add_argument("--kills", type=int, default=0, help="ranks that are killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report there, too")
    return parser
