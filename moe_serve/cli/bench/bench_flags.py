"""The flags of `moe-serve bench`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from moe_serve.config.sources import API_KEY_VARIABLE

SERVER, LOAD, PROMPTS, TRACES, RESULTS = "Server", "Load", "Prompts", "Traces", "Results"


class EndpointChoice(str, Enum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class DataChoice(str, Enum):
    WORDS = "words"
    TOKENS = "tokens"


Url = Annotated[
    str | None,
    typer.Option(
        help="URL of the server, such as http://127.0.0.1:8000. Required, except with --compare.",
        rich_help_panel=SERVER,
    ),
]
PeerUrl = Annotated[
    str | None,
    typer.Option(
        help="URL of a second server. It gets the same requests after the first server, and a "
        "table compares the two.",
        rich_help_panel=SERVER,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        show_default="the first it serves", help="Model name to request.", rich_help_panel=SERVER
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=[API_KEY_VARIABLE, "OPENAI_API_KEY"],
        show_envvar=True,
        help="API key of the server, or @FILE with the key.",
        rich_help_panel=SERVER,
    ),
]
EndpointFlag = Annotated[
    EndpointChoice,
    typer.Option(
        help="API route to test: completions (/v1/completions) or chat (/v1/chat/completions).",
        rich_help_panel=SERVER,
    ),
]
Stream = Annotated[
    bool,
    typer.Option(
        help="Stream the answers. With --no-stream, only the time of the whole answer is measured.",
        rich_help_panel=SERVER,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        help="Send ignore_eos, so that each answer has exactly --output-tokens tokens. Not "
        "every server knows this field.",
        rich_help_panel=SERVER,
    ),
]
EventUsage = Annotated[
    bool,
    typer.Option(
        "--event-usage",
        help="Request a token count with each event of a stream, so that the inter-token "
        "latency (ITL) is measured per token (vLLM, SGLang).",
        rich_help_panel=SERVER,
    ),
]
Body = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="JSON object of fields to add to each request; a null value removes a field.",
        rich_help_panel=SERVER,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(min=0.001, help="Time limit for one answer, in seconds.", rich_help_panel=SERVER),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=20000,
        help="Closed loop: keep this many requests in progress; a new one starts when another "
        "ends.",
        rich_help_panel=LOAD,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=0.0001,
        help="Open loop: send this many requests per second, even if earlier ones are not "
        "answered yet.",
        rich_help_panel=LOAD,
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1000.0,
        help="Variation of the times between the requests of --rate: 0 is equal times, 1 is "
        "Poisson arrivals, larger values send bursts.",
        rich_help_panel=LOAD,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        "--max-requests",
        min=1,
        rich_help_panel=LOAD,
        show_default="100, or the whole trace",
        help="Number of requests to send.",
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Stop sending after this many seconds. Default: no limit.",
        rich_help_panel=LOAD,
    ),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="10000",
        help="Open loop: largest number of requests in progress. Further requests wait in the "
        "client and are reported as late.",
        rich_help_panel=LOAD,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        min=0,
        show_default="--concurrency or 8, at most 32",
        help="Number of requests to send before the measurement, with other prompts.",
        rich_help_panel=LOAD,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**31 - 1,
        show_default="a new one for each run",
        rich_help_panel=LOAD,
        help="Seed of the random numbers. The same seed sends the same requests; a server may "
        "have cached them in an earlier run.",
    ),
]
PromptTokens = Annotated[
    str,
    typer.Option(
        metavar="N|LOW:HIGH",
        help="Number of tokens in each prompt, or a range from which each number is drawn.",
        rich_help_panel=PROMPTS,
    ),
]
OutputTokens = Annotated[
    str,
    typer.Option(
        metavar="N|LOW:HIGH",
        help="Number of tokens in each answer, or a range from which each number is drawn.",
        rich_help_panel=PROMPTS,
    ),
]
Data = Annotated[
    DataChoice,
    typer.Option(
        help="Content of the random prompts: words, or tokens (random token ids; only with "
        "--endpoint completions).",
        rich_help_panel=PROMPTS,
    ),
]
VocabSize = Annotated[
    int,
    typer.Option(
        min=32,
        help="With --data tokens, the random token ids are below this number.",
        rich_help_panel=PROMPTS,
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of prompts to send: text lines, or JSON lines with `prompt` or "
        "`messages` and, optionally, `output_tokens`.",
        rich_help_panel=PROMPTS,
    ),
]
PrefixTokens = Annotated[
    int,
    typer.Option(
        min=0,
        help="Number of tokens of a shared prefix in front of each random prompt.",
        rich_help_panel=PROMPTS,
    ),
]
NumPrefixes = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of different shared prefixes that --prefix-tokens makes.",
        rich_help_panel=PROMPTS,
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Trace of requests to replay: a CSV file of Azure or BurstGPT, or JSON lines of "
        "Mooncake or moe-serve. The file may be compressed (.gz, .xz).",
        rich_help_panel=TRACES,
    ),
]
TraceStart = Annotated[
    float,
    typer.Option(
        min=0.0, help="Skip this many seconds at the start of the trace.", rich_help_panel=TRACES
    ),
]
ScaleTime = Annotated[
    float,
    typer.Option(
        min=1e-6,
        help="Factor for the arrival times of the trace; 0.5 replays it twice as fast.",
        rich_help_panel=TRACES,
    ),
]
ScalePrompt = Annotated[
    float,
    typer.Option(
        min=1e-6,
        help="Factor for the prompt lengths of the trace, shared prefixes included.",
        rich_help_panel=TRACES,
    ),
]
ScaleOutput = Annotated[
    float,
    typer.Option(
        min=1e-6, help="Factor for the answer lengths of the trace.", rich_help_panel=TRACES
    ),
]
MaxPrompt = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cut the prompts of the trace to this many tokens. Default: no limit.",
        rich_help_panel=TRACES,
    ),
]
MaxOutput = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cut the answers of the trace to this many tokens. Default: no limit.",
        rich_help_panel=TRACES,
    ),
]
SloText = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="ttft=500ms,tpot=50ms,e2e=5s",
        help="Latency limits that an answer must meet, in ms or s: ttft (time to first token), "
        "tpot (time per output token), e2e (time of the whole answer). The report then has "
        "the goodput, the answers per second that meet all of them.",
        rich_help_panel=RESULTS,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="JSON file for the report.", rich_help_panel=RESULTS
    ),
]
SaveRequests = Annotated[
    bool,
    typer.Option(
        "--save-requests",
        help="Also write the figures of every request into the report; comparisons then have "
        "confidence intervals.",
        rich_help_panel=RESULTS,
    ),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="HTML file for a report with diagrams.",
        rich_help_panel=RESULTS,
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A.json B.json",
        help="Compare two saved reports instead of sending requests.",
        rich_help_panel=RESULTS,
    ),
]
MaxErrorRate = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Exit with code 1 if more than this share of the requests fails.",
        rich_help_panel=RESULTS,
    ),
]
