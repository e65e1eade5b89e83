"""The options of `moe-serve bench`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from moe_serve.cli.bench.load_options import (
    LOAD,
    PROMPTS,
    RESULTS,
    LoadOptions,
    ReportOptions,
    TierOptions,
)
from moe_serve.cli.options import REQUIRED, argument, option
from moe_serve.config.sources import API_KEY_VARIABLE

SERVER = "Server"


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
class SendingOptions:
    """Options about sending requests to a server."""

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
class ContentOptions:
    """Options about the content of prompts."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Options about the results."""

    report: ReportOptions
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
    load: LoadOptions
    tiers: TierOptions
    sending: SendingOptions
    content: ContentOptions
    results: ResultOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReportsOptions:
    """Options of `bench compare`."""

    a: Path = argument(REQUIRED, help="Report written by `moe-serve bench --json`.")
    b: Path = argument(REQUIRED, help="Second report to compare with the first.")
    html: Path | None = _html()
