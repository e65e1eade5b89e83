"""The options of `moe-serve bench`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from moe_serve.cli.options import REQUIRED, argument, option
from moe_serve.config.sources import API_KEY_VARIABLE

SERVER, LOAD, PROMPTS, TRACES, RESULTS = "Server", "Load", "Prompts", "Traces", "Results"


class EndpointChoice(str, Enum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class DataChoice(str, Enum):
    WORDS = "words"
    TOKENS = "tokens"


def _html() -> Path | None:
    return option(
        None,
        "--html",
        metavar="FILE",
        help="HTML file for a report with diagrams.",
        rich_help_panel=RESULTS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options about the server and the requests to it."""

    url: str | None = option(
        None,
        help="URL of the server, such as http://127.0.0.1:8000. Required, except with --compare.",
        rich_help_panel=SERVER,
    )
    peer_url: str | None = option(
        None,
        help="URL of a second server. It gets the same requests after the first server, and a "
        "table compares the two.",
        rich_help_panel=SERVER,
    )
    model: str | None = option(
        None,
        show_default="the first model that the server lists",
        help="Model name to request.",
        rich_help_panel=SERVER,
    )
    api_key: str | None = option(
        None,
        envvar=[API_KEY_VARIABLE, "OPENAI_API_KEY"],
        show_envvar=True,
        help="API key of the server, or @FILE with the key.",
        rich_help_panel=SERVER,
    )
    endpoint: EndpointChoice = option(
        EndpointChoice.COMPLETIONS,
        help="API route to test: completions (/v1/completions) or chat (/v1/chat/completions).",
        rich_help_panel=SERVER,
    )
    stream: bool = option(
        True,
        help="Stream the answers. With --no-stream, only the time of the whole answer is measured.",
        rich_help_panel=SERVER,
    )
    ignore_eos: bool = option(
        True,
        help="Send ignore_eos, so that each answer has exactly --output-tokens tokens. Not every "
        "server knows this field.",
        rich_help_panel=SERVER,
    )
    event_usage: bool = option(
        False,
        "--event-usage",
        help="Request a token count with each event of a stream, so that the inter-token "
        "latency (ITL) is measured per token (vLLM, SGLang).",
        rich_help_panel=SERVER,
    )
    body: str | None = option(
        None,
        metavar="JSON",
        help="JSON object of fields to add to each request; a null value removes a field.",
        rich_help_panel=SERVER,
    )
    timeout: float = option(
        600.0, min=0.001, help="Time limit for one answer, in seconds.", rich_help_panel=SERVER
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """Options about when requests are sent."""

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
    requests: int | None = option(
        None,
        "--requests",
        "--max-requests",
        min=1,
        rich_help_panel=LOAD,
        show_default="100, or the whole trace",
        help="Number of requests to send.",
    )
    duration: float | None = option(
        None,
        min=0.001,
        help="Stop sending after this many seconds. Default: no limit.",
        rich_help_panel=LOAD,
    )
    max_in_flight: int | None = option(
        None,
        min=1,
        show_default="10000",
        help="Open loop: largest number of requests in progress. Further requests wait in the "
        "client and are reported as late.",
        rich_help_panel=LOAD,
    )
    warmup: int | None = option(
        None,
        min=0,
        show_default="--concurrency or 8, at most 32",
        help="Number of requests to send before the measurement, with other prompts.",
        rich_help_panel=LOAD,
    )
    seed: int | None = option(
        None,
        min=0,
        max=2**31 - 1,
        show_default="a new one for each run",
        rich_help_panel=LOAD,
        help="Seed of the random numbers. The same seed sends the same requests; a server may "
        "have cached them in an earlier run.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options about prompts and answers."""

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
    data: DataChoice = option(
        DataChoice.WORDS,
        help="Content of the random prompts: words, or tokens (random token ids; only with "
        "--endpoint completions).",
        rich_help_panel=PROMPTS,
    )
    vocab_size: int = option(
        1000,
        min=32,
        help="With --data tokens, the random token ids are below this number.",
        rich_help_panel=PROMPTS,
    )
    prompts: Path | None = option(
        None,
        metavar="FILE",
        help="File of prompts to send: text lines, or JSON lines with `prompt` or "
        "`messages` and, optionally, `output_tokens`.",
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
class ResultOptions:
    """Options about the report."""

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
    html: Path | None = _html()
    compare: tuple[Path, Path] | None = option(
        None,
        metavar="A.json B.json",
        help="Compare two saved reports instead of sending requests.",
        rich_help_panel=RESULTS,
    )
    max_error_rate: float = option(
        0.0,
        min=0.0,
        max=1.0,
        help="Exit with code 1 if more than this share of the requests fails.",
        rich_help_panel=RESULTS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `bench`."""

    server: ServerOptions
    load: ArrivalOptions
    prompts: PromptOptions
    trace: TraceOptions
    results: ResultOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReportsOptions:
    """Options of `bench compare`."""

    a: Path = argument(REQUIRED, help="Report written by `moe-serve bench --json`.")
    b: Path = argument(REQUIRED, help="Second report to compare with the first.")
    html: Path | None = _html()
