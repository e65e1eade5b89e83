"""Compares policies that choose among replicas: experts and rows of the busiest rank.

    python benchmarks/run.py replica_choice --json build/replica_choice.json

The routing is that of the demonstration model: prompts of mixed domains are run, and the choices of
every row are kept. Placements have equal numbers of consecutive experts per rank, and additional
copies of the most chosen experts, each on the rank with the least load without it. Micro-batches
are drawn from the rows of all prompts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expert_memory.rounds import draw, token_streams
from experts.placement.replicas.replica_choice import LayerChoice, ReplicaPolicy
from harness.environment import write_report
from harness.interval import Interval
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.offline.llm import LLM
from moe_serve.pipeline.stacked_layers import StackedLayers
from moe_serve.pipeline.transport import LocalTransport
from moe_serve.text.tokenizer import Tokenizer

POLICIES: tuple[ReplicaPolicy, ...] = (
    "round-robin",
    "fewest-activated",
    "least-tokens",
    "lp",
    "auto",
)
Choices = dict[int, NDArray[np.int64]]  # layer -> [T, K]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    choices = _choices(options)
    num_experts = 1 + max(int(ids.max()) for ids in choices.values())
    found = []
    for extra in options.extra:
        placement = {
            layer: _placement(ids, num_experts, options.ranks, extra)
            for layer, ids in choices.items()
        }
        for rows in options.rows:
            for policy in POLICIES:
                found.append(_measured(choices, placement, rows, policy, options, extra))
                print(found[-1], flush=True)
    write_report(options.json, {"ranks": options.ranks, "found": found})
    return 0


def _choices(options: argparse.Namespace) -> Choices:
    """Returns the routing of all rows of the prompts, by layer."""
    kept: dict[int, list[NDArray[np.int64]]] = {}
    dispatch = LocalTransport.dispatch

    def keeping(to: LocalTransport, layer: int, micro_batch: int, routed: Routed) -> None:
        kept.setdefault(layer, []).append(routed.rows.expert_ids_TK.numpy().copy())
        dispatch(to, layer, micro_batch, routed)

    stacked = StackedLayers.of
    StackedLayers.of = _no_stack  # type: ignore[assignment]
    LocalTransport.dispatch = keeping  # type: ignore[assignment,method-assign]
    try:
        streams = token_streams(options.texts, Tokenizer.load(demo_model_folder()))
        with LLM(prefix_cache=False, speculation="off") as llm:
            prompts = draw(streams, options.prompts, 64, seed=0)
            llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
    finally:
        LocalTransport.dispatch = dispatch  # type: ignore[method-assign]
        StackedLayers.of = stacked  # type: ignore[method-assign]
    return {layer: np.concatenate(parts) for layer, parts in sorted(kept.items())}


def _no_stack(*_: object) -> None:
    """Lets each layer be called by itself, so that its rows are dispatched."""


def _placement(
    ids_TK: NDArray[np.int64], num_experts: int, num_ranks: int, extra: int
) -> list[list[int]]:
    """Returns a placement with `extra` additional copies on each rank."""
    load_E = np.bincount(ids_TK.reshape(-1), minlength=num_experts).astype(float)
    ranks_of = [[expert * num_ranks // num_experts] for expert in range(num_experts)]
    room = [extra] * num_ranks
    for _ in range(extra * num_ranks):
        share_E = load_E / [len(ranks) for ranks in ranks_of]
        loads = [
            sum(share_E[e] for e, ranks in enumerate(ranks_of) if rank in ranks)
            for rank in range(num_ranks)
        ]
        for expert in np.argsort(-share_E, kind="stable").tolist():
            open_ranks = [r for r in range(num_ranks) if room[r] and r not in ranks_of[expert]]
            if open_ranks:
                rank = min(open_ranks, key=loads.__getitem__)
                ranks_of[expert].append(rank)
                room[rank] -= 1
                break
    return ranks_of


def _measured(
    choices: Choices,
    placement: dict[int, list[list[int]]],
    rows: int,
    policy: ReplicaPolicy,
    options: argparse.Namespace,
    extra: int,
) -> dict[str, object]:
    rng = np.random.default_rng(rows)
    activated, tokens, seconds = [], [], []
    for layer, ids_TK in choices.items():
        choice = LayerChoice(policy, layer, placement[layer])
        for _ in range(options.draws):
            ids = ids_TK[rng.integers(0, len(ids_TK), rows)]
            start = time.perf_counter()
            ranks = choice.ranks(ids)
            seconds.append(time.perf_counter() - start)
            pairs = np.unique(np.stack((ranks.reshape(-1), ids.reshape(-1))), axis=1)
            activated.append(float(np.bincount(pairs[0]).max()))
            tokens.append(float(np.bincount(ranks.reshape(-1)).max()))
    return {
        "extra_copies_a_rank": extra,
        "rows": rows,
        "policy": policy,
        "activated_of_busiest": str(Interval.of(activated)),
        "choices_of_busiest": str(Interval.of(tokens)),
        "median_us": round(float(np.median(seconds)) * 1e6, 1),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--extra", type=int, nargs="+", default=(2, 4), help="copies on each rank")
    parser.add_argument("--rows", type=int, nargs="+", default=(4, 8, 16, 64, 512))
    parser.add_argument("--draws", type=int, default=100, help="micro-batches of each layer")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--texts", type=Path, nargs="*", default=(), help="files of domains")
    parser.add_argument("--json", type=Path)
    return parser
