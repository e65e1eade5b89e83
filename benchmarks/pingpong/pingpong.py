"""Measures the gain of micro-batches on one attention rank and one expert rank.

    python benchmarks/run.py pingpong --json build/pingpong.json --plot build/pingpong.png

Creates a random model whose stages take about the same time, unless `--model` names one.
benchmarks/README.md describes the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from harness.environment import describe_environment
from make_random_model import Sizes, write_random_model
from pingpong.ablation import DELAYS, MICRO_BATCHES, Ablation, run_ablation
from pingpong.calibrated import expected_steps
from pingpong.deepspeed_layer import DeepSpeedTimes, time_deepspeed
from pingpong.engines import EngineTimes, loaded_engines, time_engines
from pingpong.pair import started_pair
from pingpong.report import PairReport
from pingpong.table import plot_ablation, print_report
from pingpong.way import OneHost, Way, cable, why_no_cable

# On the CPUs tried, T_a and T_e of this model are within a few percent of each other.
SIZES = Sizes(
    num_layers=24, width=256, num_heads=20, num_kv_heads=4, head_dim=64,
    num_experts=4, top_k=2, expert_width=1024, vocab_size=4096, max_positions=1024,
)  # fmt: skip
PARTS = ("ablation", "engines", "deepspeed", "calibration")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 384)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.merge and options.json is None:
        parser.error("--merge adds to the file of --json, which is missing")
    if "calibration" in options.parts and "ablation" not in options.parts:
        parser.error("the part calibration is compared with the ablation: give both to --parts")
    cores = _cores(options.no_pin)
    with ExitStack() as stack:
        model = options.model or _made(stack, options)
        report = PairReport(
            environment=describe_environment(),
            model=_facts(model, options),
            context=options.context,
            busy_cores=psutil.cpu_percent(interval=0.5) / 100 * (psutil.cpu_count() or 1),
        )
        if "ablation" in options.parts:
            report = replace(report, ablation=_ablation(model, cores, options))
        if "engines" in options.parts:
            report = replace(report, engines=tuple(_time_engines(model, cores, options)))
        if "deepspeed" in options.parts:
            report = replace(report, deepspeed=_time_deepspeed(model, cores, options))
        if (
            "calibration" in options.parts and report.ablation is not None
        ):  # sets this one's threads
            expected = expected_steps(model, report.ablation, options.context, options.quick)
            report = replace(report, expected=expected)
    if options.merge and options.json.exists():
        report = report.merged(options.json)
    print_report(report)
    if options.json:
        report.write(options.json)
    if options.plot and report.ablation:
        plot_ablation(report.ablation, options.plot)
    return 0


def _ablation(model: Path, cores: Sequence[int] | None, options: argparse.Namespace) -> Ablation:
    """Runs the ablation: steps without delays use shared memory, delays come from the kernel if
    possible.
    """
    largest = MICRO_BATCHES[-1] * (options.batch // 3)  # of micro-batches of one size

    def run(way: Way, delays: Sequence[float]) -> Ablation:
        with started_pair(model, options.context, largest, cores, way) as pair:
            return run_ablation(pair, options.batch, options.rounds, delays)

    reason = None
    if options.delay_by != "transport":
        reason = why_no_cable()
        if reason is not None and options.delay_by == "netem":
            raise SystemExit(f"delays cannot be real here: {reason}; or --delay-by transport.")
        if reason is None and any(options.delays):
            found = run(OneHost(), ())
            with cable() as way:
                return found.delayed_as(run(way, options.delays), "tc netem, gloo")
    found = run(OneHost(), options.delays)
    return found if reason is None else replace(found, delayed_by=f"the transport ({reason})")


def _time_engines(
    model: Path, cores: Sequence[int] | None, options: argparse.Namespace
) -> list[EngineTimes]:
    with loaded_engines(model, max(options.batches), options.prompt, cores) as engines:
        return [
            time_engines(engines, batch, options.prompt, options.warm, options.steps)
            for batch in options.batches
        ]


def _time_deepspeed(
    model: Path, cores: Sequence[int] | None, options: argparse.Namespace
) -> DeepSpeedTimes:
    """Measures DeepSpeed's layer with half of the batch on each rank."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    names = {
        "width": "hidden_size",
        "expert_width": "moe_intermediate_size",
        "num_experts": "num_experts",
        "top_k": "num_experts_per_tok",
    }
    if not all(key in config for key in names.values()):
        why = "the model names its sizes in another way than Qwen3-MoE: deepspeed did not run"
        return DeepSpeedTimes(rows=options.batch // 2, missing=why)
    sizes = {name: config[key] for name, key in names.items()}
    return time_deepspeed(sizes, options.batch // 2, options.deepspeed_python, cores)


def _cores(is_free: bool) -> list[int] | None:
    """Returns two cores that this process may use, or None if ranks are not pinned."""
    if is_free or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"two cores are needed, this process may use {len(cores)}; or --no-pin.")
    return cores[:2]


def _made(stack: ExitStack, options: argparse.Namespace) -> Path:
    """Creates a checkpoint for the time of the run."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_random_model(
        folder, "qwen3_moe", _sizes(options), dtype=options.dtype, seed=0, shard_bytes=2**29
    )
    return folder


def _sizes(options: argparse.Namespace) -> Sizes:
    return Sizes(**{name: getattr(options, name) for name in asdict(SIZES)})


def _facts(model: Path, options: argparse.Namespace) -> dict[str, object]:
    if options.model:
        return {"name": model.name}
    return {"family": "qwen3_moe", "dtype": options.dtype, **asdict(_sizes(options))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", type=Path, help="a checkpoint instead of a random model")
    parser.add_argument("--batch", type=int, default=384, help="divisible by 12")
    parser.add_argument("--context", type=int, default=32, help="tokens of a sequence at most")
    parser.add_argument("--rounds", type=int, default=3, help="of each pass")
    parser.add_argument(
        "--delays", type=float, nargs="+", default=DELAYS, help="of T_f of half the batch, one way"
    )
    parser.add_argument(
        "--delay-by", choices=("auto", "netem", "transport"), default="auto",
        help="auto: tc netem between two network namespaces where root, iproute2 and the kernel "
        "allow it, else the transport",
    )  # fmt: skip
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="of the engines")
    parser.add_argument("--prompt", type=int, default=8, help="tokens, for the engines")
    parser.add_argument("--warm", type=int, default=16, help="steps of `auto` that do not count")
    parser.add_argument("--steps", type=int, default=32, help="steps of each that count")
    parser.add_argument("--quick", action="store_true", help="a calibration of fewer points")
    parser.add_argument("--no-pin", action="store_true", help="leave the ranks to the system")
    parser.add_argument("--deepspeed-python", help="the interpreter that has deepspeed")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--merge", action="store_true", help="keep the other parts in that file")
    parser.add_argument("--plot", type=Path, help="draw the ablation here (PNG)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    for name, value in asdict(SIZES).items():
        if name != "is_tied":
            parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.set_defaults(is_tied=False)
    return parser
