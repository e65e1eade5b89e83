"""Turns the flags of `moe-serve bench` into a plan and reports contradictions at once."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from moe_serve.bench.client.endpoint import Endpoint
from moe_serve.bench.figures.slo import Slo
from moe_serve.bench.run_plan import RunPlan
from moe_serve.bench.workload.prompts import read_prompts
from moe_serve.bench.workload.trace_rows import Trace, TraceCut, read_trace
from moe_serve.bench.workload.workload import GammaArrivals, Lengths, SharedPrefixes, Workload
from moe_serve.config.sources import read_secret_file
from moe_serve.errors import BenchError
from moe_serve.json_text import parse_json

_DEFAULT_REQUESTS = 100
_MAX_SEED = 2**31


def plan_of(given: Mapping[str, Any]) -> RunPlan:
    """Returns the plan; `given` maps the command's parameters to their values."""
    if given["url"] is None:
        raise BenchError("give the URL of the server: --url http://127.0.0.1:8000.")
    _check(given)
    key = given["api_key"]
    if key is not None and key.startswith("@"):
        key = read_secret_file(key[1:])[0]
    _check_key(key)
    return RunPlan(
        url=given["url"],
        workload=_workload(given),
        endpoint=Endpoint(
            name=given["endpoint"].value,
            model=given["model"] or "",
            is_stream=given["stream"],
            ignore_eos=given["ignore_eos"],
            counts_each_event=given["event_usage"],
            extra=_extra(given["body"]),
        ),
        api_key=key,
        data=given["data"].value,
        vocab_size=given["vocab_size"],
        timeout_s=given["timeout"],
        num_warm_up=given["warmup"],
        max_in_flight=given["max_in_flight"],
        slo=_slo(given["slo"], is_stream=given["stream"]),
    )


def _check(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BenchError(f"--{name.replace('_', '-')} takes a finite number, not {value}.")
    is_timed = given["trace"] is not None
    if given["concurrency"] is not None and given["rate"] is not None:
        raise BenchError("--concurrency and --rate cannot be combined: give one of them.")
    if given["concurrency"] is None and given["rate"] is None and not is_timed:
        raise BenchError(
            "choose how requests arrive: --concurrency N, --rate R, or --trace FILE with its times."
        )
    if given["trace"] is not None and given["prompts"] is not None:
        raise BenchError("--trace and --prompts cannot be combined: give one of them.")
    if given["burstiness"] != 1.0 and given["rate"] is None:
        raise BenchError("--burstiness belongs to --rate.")
    if given["data"].value == "tokens" and given["endpoint"].value == "chat":
        raise BenchError("--data tokens takes --endpoint completions: a chat has text.")
    if given["event_usage"] and not given["stream"]:
        raise BenchError("--event-usage and --no-stream cannot be combined.")
    if given["save_requests"] and given["json"] is None:
        raise BenchError("--save-requests takes --json FILE, into which they go.")
    if given["prefix_tokens"] and (given["trace"] is not None or given["prompts"] is not None):
        raise BenchError("--prefix-tokens is for random prompts, not for --trace or --prompts.")
    if not is_timed:
        names = ("trace_start", "scale_time", "scale_prompt", "scale_output")
        changed = [name for name, default in zip(names, (0, 1, 1, 1), strict=True)
                   if given[name] != default]  # fmt: skip
        changed += [n for n in ("max_prompt", "max_output") if given[n] is not None]
        if changed:
            raise BenchError(f"--{changed[0].replace('_', '-')} belongs to --trace.")


def _slo(text: str | None, *, is_stream: bool) -> Slo | None:
    """Parses --slo. Limits on values that are not measured are refused: every answer would meet
    them."""
    slo = None if text is None else Slo.parse(text)
    if slo is not None and not is_stream and (slo.ttft_s, slo.tpot_s) != (None, None):
        raise BenchError(
            f"--slo {text} has limits that --no-stream does not measure: leave ttft and tpot out."
        )
    return slo


def _check_key(key: str | None) -> None:
    """Checks the API key, which becomes a header: a line break in it would begin another header."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise BenchError("the API key has characters that a header cannot carry.")


def _workload(given: Mapping[str, Any]) -> Workload:
    seed = given["seed"]
    rate = given["rate"]
    num_requests = given["requests"]
    if num_requests is None and given["duration"] is None and given["trace"] is None:
        num_requests = _DEFAULT_REQUESTS
    cut = None if given["trace"] is None else _cut(given)
    trace = None if cut is None else _trace(given["trace"], cut)
    source = given["trace"] or given["prompts"]
    if trace is not None and num_requests is None and given["duration"] is None:
        num_requests = len(trace.rows)
    return Workload(
        seed=secrets.randbelow(_MAX_SEED) if seed is None else seed,
        concurrency=given["concurrency"],
        arrivals=None if rate is None else GammaArrivals(rate=rate, burstiness=given["burstiness"]),
        trace=trace,
        cut=cut,
        source=None if source is None else source.name,
        files=() if given["prompts"] is None else read_prompts(given["prompts"]),
        prompt_tokens=Lengths.parse("--prompt-tokens", given["prompt_tokens"]),
        output_tokens=Lengths.parse("--output-tokens", given["output_tokens"]),
        prefixes=SharedPrefixes(
            num_tokens=given["prefix_tokens"], num_prefixes=given["num_prefixes"]
        ),
        num_requests=num_requests,
        duration_s=given["duration"],
    )


def _cut(given: Mapping[str, Any]) -> TraceCut:
    return TraceCut(
        start_s=given["trace_start"],
        max_requests=given["requests"],
        scale_time=given["scale_time"],
        scale_prompt=given["scale_prompt"],
        scale_output=given["scale_output"],
        max_prompt=given["max_prompt"],
        max_output=given["max_output"],
    )


def _trace(path: Path, cut: TraceCut) -> Trace:
    whole = read_trace(path)
    trace = cut.of(whole)
    text = f"trace: {len(trace.rows)} of {len(whole.rows)} requests"
    text += f" over {trace.rows[-1].at_s:.1f} s"
    if whole.num_skipped:
        text += f"; {whole.num_skipped} rows without tokens are left out"
    if num_cut := cut.num_cut(whole):
        text += f"; {num_cut} cut to --max-prompt or --max-output"
    typer.echo(text, err=True)
    return trace


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = parse_json(text)
        json.dumps(fields, allow_nan=False)
    except ValueError as error:
        raise BenchError(f"--body is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise BenchError(f"--body takes a JSON object, not {text[:60]}.")
    return fields
