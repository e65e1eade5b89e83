"""Replays a request trace against the prefix cache, beside an ideal LRU of the same size.

    python benchmarks/run.py prefix_replay conversation_trace.jsonl --blocks 0 20000

The trace is in Mooncake's format: JSON lines, also .xz, with `input_length` and `hash_ids`, the ids
of chained blocks of 512 tokens. It runs through the real engine, scheduler, tree and page pool;
only the model is missing, so steps compute nothing. Requests run one after the other in the order
of the trace, and each answers one token. Time then has no effect on the hit rate, so it is not
simulated.

With `--disk-blocks` the real disk tier is behind the cache, in a temporary folder, with pages of
128 tokens and eight bytes of content. Every run of pages that it has is loaded, and a request
begins when the pages of the one before are written. `--kv-share 0.516` shrinks the bytes of a
block, as pages in int8 do: the cache and the disk then hold more blocks.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.tiers.disk_folder import DiskFolder, StoreIdentity
from moe_serve.cache.tiers.disk_space import DiskLimits
from moe_serve.cache.tiers.disk_store import DiskStore
from moe_serve.cache.tiers.slot import slot_bytes
from moe_serve.cache.tiers.store import TierStats
from moe_serve.clock import REAL_CLOCK
from moe_serve.config.sections import CacheConfig, SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule.load_or_compute import Decision, LoadOrCompute
from moe_serve.engine.schedule.page_tiers import PageAccess, PageTiers
from moe_serve.model.step_plan import StepPlan

BLOCK_TOKENS = 512
_DISK_PAGE_TOKENS, _PAGE_BYTES = 128, 8
PAGES_PER_BLOCK = BLOCK_TOKENS // CacheConfig().page_size


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One prompt: its length and the ids of its blocks, the last of which may be shorter."""

    num_tokens: int
    block_ids: tuple[int, ...]

    def token_ids(self) -> tuple[int, ...]:
        """Returns 512 tokens for each block id, different from those of every other id."""
        starts = np.array(self.block_ids, dtype=np.int64)[:, None] * BLOCK_TOKENS
        ids = (starts + np.arange(BLOCK_TOKENS)).reshape(-1)[: self.num_tokens]
        return tuple(ids.tolist())


class NoModel:
    """A StepRunner that computes nothing and always answers token 0."""

    def run(self, plan: StepPlan) -> Tensor:
        return torch.zeros(sum(piece.num_logits for piece in plan.slices), 2)

    def clear_pages(self, pages: list[int]) -> None:
        """Does nothing: pages have no content."""

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Does nothing: pages have no content."""

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return [True] * len(pages)


def read_trace(path: Path) -> list[TracedRequest]:
    content = path.read_bytes()
    if path.suffix == ".xz":
        content = lzma.decompress(content)
    rows = [json.loads(line) for line in content.splitlines()]
    return [TracedRequest(int(r["input_length"]), tuple(r["hash_ids"])) for r in rows]


def replay(trace: Sequence[TracedRequest], num_blocks: int) -> EngineStats:
    """Serves the trace with a cache of `num_blocks`; returns the counts of the engine."""
    longest = max(request.num_tokens for request in trace)
    engine = Engine(
        LocalExecutor(NoModel(), Sampler(frozenset())),
        scheduler=SchedulerConfig(max_num_seqs=1, max_batched_tokens=2**20),
        num_pages=num_blocks * PAGES_PER_BLOCK,
        micro_batches=1,
        max_model_len=longest + 2,
        eos_token_ids=frozenset(),
    )
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for index, request in enumerate(trace):
        engine.add(
            GenerationRequest(
                request_id=str(index), prompt_token_ids=request.token_ids(), params=params
            )
        )
        while engine.has_work:
            engine.step()
    engine.check_integrity()
    return engine.stats()


class AlwaysLoads(LoadOrCompute):
    """The rule for steps that take no time: computing would always win."""

    def decide(self, num_tokens: int, num_bytes: int, num_queued_bytes: int) -> Decision:
        return Decision(is_load=True, patience_s=60.0, deadline_s=60.0)


def replay_with_disk(
    trace: Sequence[TracedRequest], num_blocks: int, disk_blocks: int, folder: Path
) -> tuple[EngineStats, TierStats]:
    """Serves the trace with a cache of `num_blocks` and a disk tier of `disk_blocks`."""
    pages = BLOCK_TOKENS // _DISK_PAGE_TOKENS
    identity = StoreIdentity(b"0" * 32, {"model": "none"})
    store = DiskStore(
        DiskFolder.claim(folder),
        DiskLimits(
            max_bytes=disk_blocks * pages * slot_bytes(_PAGE_BYTES), min_free_bytes=0, ttl_s=1e6
        ),
        page_bytes=_PAGE_BYTES,
        geometry=b"0" * 32,
        identify=lambda: identity,
    )
    access = PageAccess(lambda page, into: None, lambda page, data: None, _PAGE_BYTES)
    made = list[PageTiers]()

    def make_tier(prefixes: PrefixCache) -> PageTiers:
        made.append(PageTiers(prefixes, store, access, REAL_CLOCK, 0.0))
        made[0].loads.rule = AlwaysLoads()
        return made[0]

    engine = Engine(
        LocalExecutor(NoModel(), Sampler(frozenset())),
        scheduler=SchedulerConfig(max_num_seqs=1, max_batched_tokens=2**20),
        num_pages=num_blocks * pages,
        page_size=_DISK_PAGE_TOKENS,
        micro_batches=1,
        max_model_len=max(request.num_tokens for request in trace) + 2,
        eos_token_ids=frozenset(),
        model_identity=b"trace",
        make_tier=make_tier,
    )
    while not store.stats().is_reading:
        time.sleep(0.01)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for index, request in enumerate(trace):
        engine.add(
            GenerationRequest(
                request_id=str(index), prompt_token_ids=request.token_ids(), params=params
            )
        )
        while engine.has_work or made[0].has_work:
            engine.step()
        while store.stats().num_queued:
            time.sleep(0.0005)
    stats, tier = engine.stats(), made[0].stats()
    engine.close()
    return stats, tier


def print_with_disk(
    trace: Sequence[TracedRequest], num_blocks: int, disk_blocks: int, folder: Path
) -> None:
    clock = time.monotonic()
    stats, tier = replay_with_disk(trace, num_blocks, disk_blocks, folder)
    found = (stats.counts.num_hit_tokens) / stats.counts.num_queried_tokens
    ideal, alone = (ideal_hit_rate(trace, blocks) for blocks in (disk_blocks, num_blocks))
    print(
        f"{num_blocks} blocks in memory, {disk_blocks} on the disk: found {found:.2%}, "
        f"{found / ideal:.3f} of an ideal LRU of {disk_blocks} ({ideal:.2%}), {found / alone:.2f} "
        f"of one of {num_blocks} ({alone:.2%}); {tier.saves}, {tier.loads}, "
        f"{time.monotonic() - clock:.0f} s"
    )


def ideal_hit_rate(trace: Sequence[TracedRequest], num_blocks: int) -> float:
    """Returns the share of tokens that an LRU over whole blocks finds: the leading run of known
    ids.
    """
    known: OrderedDict[int, None] = OrderedDict()
    num_hit = 0
    for request in trace:
        run = 0
        while run < len(request.block_ids) and request.block_ids[run] in known:
            run += 1
        num_hit += min(run * BLOCK_TOKENS, request.num_tokens)
        for block_id in request.block_ids:
            known[block_id] = None
            known.move_to_end(block_id)
        while len(known) > num_blocks:
            known.popitem(last=False)
    return num_hit / sum(request.num_tokens for request in trace)


def num_distinct_blocks(trace: Sequence[TracedRequest]) -> int:
    return len({block_id for request in trace for block_id in request.block_ids})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="JSON lines in Mooncake's format, also as .xz")
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[0, 20_000, 5_000, 1_000],
        help="capacities in blocks of 512 tokens; 0: room for everything",
    )
    parser.add_argument("--disk-blocks", type=int, help="blocks of a disk tier behind the first")
    parser.add_argument("--requests", type=int, help="number of requests; default: all")
    parser.add_argument("--kv-share", type=float, default=1.0, help="bytes of a block over bf16's")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)[: arguments.requests]
    if arguments.disk_blocks is not None:
        sizes = (arguments.blocks[0], arguments.disk_blocks)
        memory, disk = (int(blocks / arguments.kv_share) for blocks in sizes)
        with tempfile.TemporaryDirectory() as folder:
            print_with_disk(trace, memory, disk, Path(folder) / "kv")
        return 0
    num_tokens = sum(request.num_tokens for request in trace)
    print(f"{len(trace)} requests, {num_tokens} tokens, {num_distinct_blocks(trace)} blocks")
    print(f"{'capacity':>12}{'hit rate':>10}{'ideal LRU':>11}{'evicted pages':>15}{'seconds':>9}")
    for num_blocks in arguments.blocks:
        room = num_blocks or num_distinct_blocks(trace) + 1
        clock = time.monotonic()
        stats = replay(trace, room)
        print(
            f"{num_blocks or 'unlimited':>12}"
            f"{stats.counts.num_hit_tokens / stats.counts.num_queried_tokens:>10.2%}"
            f"{ideal_hit_rate(trace, room):>11.2%}"
            f"{stats.counts.num_evicted_pages:>15}{time.monotonic() - clock:>9.1f}"
        )
    return 0
