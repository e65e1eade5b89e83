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
    typer.Option(help="Where the server is, e.g. http://127.0.0.1:8000.", rich_help_panel=SERVER),
]
PeerUrl = Annotated[
    str | None,
    typer.Option(
        help="A second server, which gets the same requests afterwards.", rich_help_panel=SERVER
    ),
]
Model = Annotated[
    str | None,
    typer.Option(show_default="the first it serves", help="Its name.", rich_help_panel=SERVER),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=[API_KEY_VARIABLE, "OPENAI_API_KEY"],
        show_envvar=True,
        help="The server's key, or @FILE that holds it.",
        rich_help_panel=SERVER,
    ),
]
EndpointFlag = Annotated[
    EndpointChoice, typer.Option(help="The route under /v1.", rich_help_panel=SERVER)
]
Stream = Annotated[
    bool, typer.Option(help="Without it there are only end-to-end times.", rich_help_panel=SERVER)
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        help="Answers as long as asked for; not every server knows the field.",
        rich_help_panel=SERVER,
    ),
]
EventUsage = Annotated[
    bool,
    typer.Option(
        "--event-usage",
        help="Ask for the usage with each event, for ITL per token (vLLM, SGLang).",
        rich_help_panel=SERVER,
    ),
]
Body = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help="More fields of each request; null removes one.",
        rich_help_panel=SERVER,
    ),
]  # fmt: skip
Timeout = Annotated[
    float, typer.Option(min=0.001, help="Seconds for one answer.", rich_help_panel=SERVER)
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1, max=20000, help="Closed loop: so many requests at once.", rich_help_panel=LOAD
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=0.0001, help="Open loop: requests a second, answered or not.", rich_help_panel=LOAD
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1000.0,
        help="Of --rate: 1 Poisson, above in bursts, 0 evenly.",
        rich_help_panel=LOAD,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests", "--max-requests", min=1, rich_help_panel=LOAD,
        show_default="100, or the whole trace", help="How many.",
    ),
]  # fmt: skip
Duration = Annotated[
    float | None,
    typer.Option(min=0.001, help="Send no more after so many seconds.", rich_help_panel=LOAD),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="10000",
        help="Open loop: more wait in the client, and count as late.",
        rich_help_panel=LOAD,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        min=0,
        show_default="--concurrency or 8, at most 32",
        help="Requests before, of other prompts, that are not measured.",
        rich_help_panel=LOAD,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, max=2**31 - 1, show_default="another each time", rich_help_panel=LOAD,
        help="The same seed sends the same requests; the server may know them by then.",
    ),
]  # fmt: skip
PromptTokens = Annotated[
    str, typer.Option(metavar="N|LOW:HIGH", help="Of each prompt.", rich_help_panel=PROMPTS)
]
OutputTokens = Annotated[
    str, typer.Option(metavar="N|LOW:HIGH", help="Of each answer.", rich_help_panel=PROMPTS)
]
Data = Annotated[
    DataChoice,
    typer.Option(help="Random words, or token ids (completions only).", rich_help_panel=PROMPTS),
]
VocabSize = Annotated[
    int, typer.Option(min=32, help="Token ids are below it.", rich_help_panel=PROMPTS)
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON lines with prompt or messages (and output_tokens), or text lines.",
        rich_help_panel=PROMPTS,
    ),
]
PrefixTokens = Annotated[
    int,
    typer.Option(min=0, help="Before each prompt, shared with others.", rich_help_panel=PROMPTS),
]
NumPrefixes = Annotated[
    int, typer.Option(min=1, help="How many such prefixes.", rich_help_panel=PROMPTS)
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Replay: CSV of Azure or BurstGPT, Mooncake's or our JSON lines (.gz, .xz).",
        rich_help_panel=TRACES,
    ),
]
TraceStart = Annotated[
    float, typer.Option(min=0.0, help="Leave out its first seconds.", rich_help_panel=TRACES)
]
ScaleTime = Annotated[
    float, typer.Option(min=1e-6, help="0.5: twice as fast.", rich_help_panel=TRACES)
]
ScalePrompt = Annotated[
    float, typer.Option(min=1e-6, help="Factor on prompts, prefixes too.", rich_help_panel=TRACES)
]
ScaleOutput = Annotated[
    float, typer.Option(min=1e-6, help="Factor on answers.", rich_help_panel=TRACES)
]
MaxPrompt = Annotated[
    int | None, typer.Option(min=1, help="Cut prompts to so many tokens.", rich_help_panel=TRACES)
]
MaxOutput = Annotated[
    int | None, typer.Option(min=1, help="Cut answers to so many tokens.", rich_help_panel=TRACES)
]
SloText = Annotated[
    str | None,
    typer.Option(
        "--slo", metavar="ttft=500ms,tpot=50ms,e2e=5s", help="For the goodput.",
        rich_help_panel=RESULTS,
    ),
]  # fmt: skip
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Report.", rich_help_panel=RESULTS)
]
SaveRequests = Annotated[
    bool,
    typer.Option(
        "--save-requests",
        help="All requests in it too, for intervals in comparisons.",
        rich_help_panel=RESULTS,
    ),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Page with pictures.", rich_help_panel=RESULTS),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A.json B.json", help="Send nothing: compare two reports.", rich_help_panel=RESULTS
    ),
]
MaxErrorRate = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Exit code 1 above this share.", rich_help_panel=RESULTS),
]
