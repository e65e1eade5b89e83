"""Measures expert-aware batches: activated experts on real routing, and throughput.

    python benchmarks/run.py batching --texts CORPUS --predictor FOLDER --json build/batching.json

CORPUS has a folder per domain with valid*.txt or .txt.xz files; `moe-serve predictor train request`
writes FOLDER. docs/internals/batching.md explains the counts and has figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from batching.cost import time_joins, time_splits
from batching.duel import Rival, pages_for, run_duel
from batching.queue import count_queue
from batching.report import BatchingReport, QueueRow, SplitRow, plot_counts, print_report
from batching.requests import Routed
from batching.splits import count_bursts, count_splits
from harness.environment import describe_environment
from moe_serve.cache.page_key import model_identity
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from routing_predictor.traces.card import PredictorKind, read_card, write_card

PARTS = ("splits", "queue", "tiers", "cost", "throughput")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.plot and not {"splits", "queue"} <= set(options.parts):
        parser.error("--plot draws the parts splits and queue: give both to --parts")
    if set(options.parts) - {"cost"} and options.texts is None:
        parser.error("the parts but cost count on texts: give --texts")
    clock = time.monotonic()
    report = BatchingReport(environment=describe_environment(), num_groups=options.micro_batches)
    if "cost" in options.parts:
        report.costs, report.joins = time_splits(), time_joins()
    if set(options.parts) - {"cost"}:
        routed = Routed(None, options.texts, options.predictor, options.max_tokens)
        report.num_pieces = routed.num_pieces
        _say(f"{sum(routed.num_pieces.values())} pieces are read", clock)
        if {"splits", "queue", "tiers"} & set(options.parts):
            _count(report, routed, options, clock)
        if "throughput" in options.parts:
            _time(report, routed, options, clock)
    print_report(report)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot_counts(report, options.plot)
    return 0


def _count(
    report: BatchingReport, routed: Routed, options: argparse.Namespace, clock: float
) -> None:
    groups, tolerance = options.micro_batches, options.tolerance
    for size in options.sizes:
        if "splits" in options.parts:
            draws = [
                count_splits(routed, size, groups, tolerance, np.random.default_rng(seed))
                for seed in range(options.draws)
            ]
            report.splits += SplitRow.of(draws)
            if options.predictor is not None:
                bursts = [
                    count_bursts(
                        routed, size, report.burst, groups, tolerance, np.random.default_rng(seed)
                    )
                    for seed in range(options.draws)
                ]
                report.bursts += SplitRow.of(bursts)
        for part in ("queue", "tiers"):
            for times in options.pools if part in options.parts else ():
                runs = [
                    count_queue(
                        routed, size, times, groups, tolerance, seed, options.max_passed_over,
                        has_tiers=part == "tiers",
                    )
                    for seed in range(options.runs)
                ]  # fmt: skip
                report.queues += QueueRow.of(runs)
        _say(f"{size} running requests are counted", clock)


def _time(
    report: BatchingReport, routed: Routed, options: argparse.Namespace, clock: float
) -> None:
    with tempfile.TemporaryDirectory(prefix="batching-") as folder:
        model = Path(folder) / "wider"
        write_wider(demo_model_folder(), model, options.widen)
        predictor = None
        if options.predictor is not None:
            predictor = str(Path(folder) / "predictor")
            write_its_predictor(options.predictor, Path(predictor), model)
        for size in options.time_sizes:
            requests = routed.draw(size * options.requests_per_seat, np.random.default_rng(size))
            pages, threads = pages_for(len(requests)), options.threads
            groups = options.micro_batches
            fifo = Rival(str(model), "fifo", size, pages, threads, groups, None)
            other = Rival(str(model), "expert-aware", size, pages, threads, groups, predictor)
            name = "history" if predictor is None else "predictor and history"
            report.duels.append(run_duel(fifo, other, name, requests, size, options.rounds))
            fifo.llm.close()
            other.llm.close()
            _say(f"{size} running requests are timed", clock)


def _say(text: str, clock: float) -> None:
    sys.stderr.write(f"{time.monotonic() - clock:6.0f} s  {text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, help="folders of valid*.txt[.xz]; cost needs none")
    parser.add_argument("--predictor", type=Path, help="a folder of trained predictors")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 4], help="waiting, per seat")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.12, help="of token counts")
    parser.add_argument("--max-passed-over", type=int, default=128, help="in a queue")
    parser.add_argument("--draws", type=int, default=60, help="sets of requests to split")
    parser.add_argument("--runs", type=int, default=5, help="of a queue")
    parser.add_argument("--max-tokens", type=int, default=160_000, help="of texts to read")
    parser.add_argument("--time-sizes", type=int, nargs="+", default=[32])
    parser.add_argument("--widen", type=int, default=8, help="experts, to be timed")
    parser.add_argument("--requests-per-seat", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG")
    return parser


_ROWS, _COLUMNS = ("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)


def write_wider(source: Path, target: Path, factor: int) -> None:
    """Copies a Qwen3-MoE checkpoint of one file with experts that are `factor` times as wide.

    Tokens and routing stay the same: gate and up get rows of zeros, and down gets columns that add
    nothing. A step then waits for the weights of its activated experts, as in a large model.
    """
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["moe_intermediate_size"] *= factor
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name and name.endswith(_ROWS):
            rows = (factor - 1) * tensor.shape[0]
            tensors[name] = torch.cat([tensor, tensor.new_zeros(rows, tensor.shape[1])])
        elif ".experts." in name and name.endswith(_COLUMNS):
            columns = (factor - 1) * tensor.shape[1]
            tensors[name] = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], columns)], dim=1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def write_its_predictor(source: Path, target: Path, model: Path) -> None:
    """Writes the narrow model's request predictor for the wide model, which routes in the same
    way.
    """
    target.mkdir(parents=True)
    name = PredictorKind.REQUEST.value
    shutil.copy(source / f"{name}.safetensors", target / f"{name}.safetensors")
    card = read_card(source / f"{name}.json")
    write_card(replace(card, model_identity=model_identity(model).hex()), target / f"{name}.json")
