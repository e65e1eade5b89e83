"""Options about a load and the report on it, shared by the commands that run or simulate a load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_serve.cli.options import option

LOAD, PROMPTS, TRACES, RESULTS = "Load", "Prompts", "Traces", "Results"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """Options about when requests arrive."""

    concurrency: int | None = option(
        None,
        min=1,
        max=20000,
        help="Closed loop: keep this many requests in progress; a new one starts when another "
        "ends.",
        rich_help_panel=LOAD,
    )
    rate: float | None = option(
        None,
        min=0.0001,
        help="Open loop: send this many requests per second, even if earlier ones are not "
        "answered yet.",
        rich_help_panel=LOAD,
    )
    burstiness: float = option(
        1.0,
        min=0.0,
        max=1000.0,
        help="Variation of the times between the requests of --rate: 0 is equal times, 1 is "
        "Poisson arrivals, larger values send bursts.",
        rich_help_panel=LOAD,
    )
    swing: float = option(
        0.0,
        min=0.0,
        max=0.99,
        help="Variation of --rate over time, as a wave: 0.8 begins with a fifth of the rate and "
        "has 1.8 times the rate half a period later.",
        rich_help_panel=LOAD,
    )
    period: float = option(
        86400.0,
        min=1.0,
        max=31622400.0,
        help="Seconds of one wave of --swing.",
        rich_help_panel=LOAD,
    )
    requests: int | None = option(
        None,
        "--requests",
        "--max-requests",
        min=1,
        rich_help_panel=LOAD,
        show_default="100, or the whole trace",
        help="Number of requests.",
    )
    duration: float | None = option(
        None,
        min=0.001,
        help="Time in seconds after which no more requests arrive. Default: no limit.",
        rich_help_panel=LOAD,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    """Options about the lengths of prompts and answers."""

    prompt_tokens: str = option(
        "512",
        metavar="N|LOW:HIGH",
        help="Number of tokens in each prompt, or a range from which each number is drawn.",
        rich_help_panel=PROMPTS,
    )
    output_tokens: str = option(
        "64",
        metavar="N|LOW:HIGH",
        help="Number of tokens in each answer, or a range from which each number is drawn.",
        rich_help_panel=PROMPTS,
    )
    prefix_tokens: int = option(
        0,
        min=0,
        help="Number of tokens of a shared prefix in front of each random prompt.",
        rich_help_panel=PROMPTS,
    )
    num_prefixes: int = option(
        1,
        min=1,
        help="Number of different shared prefixes that --prefix-tokens makes.",
        rich_help_panel=PROMPTS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options about a trace to replay."""

    trace: Path | None = option(
        None,
        "--trace",
        metavar="FILE",
        help="Trace of requests to replay: a CSV file of Azure or BurstGPT, or JSON lines of "
        "Mooncake or moe-serve. The file may be compressed (.gz, .xz).",
        rich_help_panel=TRACES,
    )
    trace_start: float = option(
        0.0,
        min=0.0,
        help="Skip this many seconds at the start of the trace.",
        rich_help_panel=TRACES,
    )
    scale_time: float = option(
        1.0,
        min=1e-6,
        help="Factor for the arrival times of the trace; 0.5 replays it twice as fast.",
        rich_help_panel=TRACES,
    )
    scale_prompt: float = option(
        1.0,
        min=1e-6,
        help="Factor for the prompt lengths of the trace, shared prefixes included.",
        rich_help_panel=TRACES,
    )
    scale_output: float = option(
        1.0, min=1e-6, help="Factor for the answer lengths of the trace.", rich_help_panel=TRACES
    )
    max_prompt: int | None = option(
        None,
        min=1,
        help="Cut the prompts of the trace to this many tokens. Default: no limit.",
        rich_help_panel=TRACES,
    )
    max_output: int | None = option(
        None,
        min=1,
        help="Cut the answers of the trace to this many tokens. Default: no limit.",
        rich_help_panel=TRACES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """The option about service tiers."""

    tiers: Path | None = option(
        None,
        "--tiers",
        metavar="FILE",
        help=(
            "YAML file with `tiers`, in the form of the server's scheduler.tiers, and optionally "
            "`shares` and `priorities` by tier. Requests of a trace keep the tiers of their rows; "
            "other requests get tiers at random, in proportion to the shares. The report has "
            "figures for each tier."
        ),
        rich_help_panel=LOAD,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options about the requests of a load."""

    arrivals: ArrivalOptions
    lengths: LengthOptions
    trace: TraceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options about the report on a run."""

    slo: str | None = option(
        None,
        "--slo",
        metavar="ttft=500ms,tpot=50ms,e2e=5s",
        help="Latency limits that an answer must meet, in ms or s: ttft (time to first token), "
        "tpot (time per output token), e2e (time of the whole answer). The report then has "
        "the goodput, the answers per second that meet all of them.",
        rich_help_panel=RESULTS,
    )
    json: Path | None = option(
        None, "--json", metavar="FILE", help="JSON file for the report.", rich_help_panel=RESULTS
    )
    save_requests: bool = option(
        False,
        "--save-requests",
        help="Also write the figures of every request into the report; comparisons then have "
        "confidence intervals.",
        rich_help_panel=RESULTS,
    )
