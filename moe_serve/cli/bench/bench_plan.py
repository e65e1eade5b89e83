"""Turns the options of `moe-serve bench` into a plan and reports contradictions at once."""

from __future__ import annotations

import json
import math
import secrets
from pathlib import Path
from typing import Any

import typer

from moe_serve.bench.client.endpoint import Endpoint, RunPlan
from moe_serve.bench.figures.summary import Slo
from moe_serve.bench.workload.prompt_maker import read_prompts
from moe_serve.bench.workload.tier_mix import read_tier_mix
from moe_serve.bench.workload.trace_rows import Trace, TraceCut, read_trace
from moe_serve.bench.workload.workload import GammaArrivals, Lengths, SharedPrefixes, Workload
from moe_serve.cli.bench.bench_options import BenchOptions
from moe_serve.cli.bench.load_options import ArrivalOptions, LoadOptions, TraceOptions
from moe_serve.cli.options import option_values
from moe_serve.config.sources import read_secret_file
from moe_serve.errors import BenchError
from moe_serve.json_text import parse_json

_DEFAULT_REQUESTS = 100
_MAX_SEED = 2**31


def plan_of(options: BenchOptions) -> RunPlan:
    """Returns the plan. Raises BenchError, ConfigError."""
    server, content, sending = options.server, options.content, options.sending
    if server.url is None:
        raise BenchError("give the URL of the server: --url http://127.0.0.1:8000.")
    _check(options)
    key = server.api_key
    if key is not None and key.startswith("@"):
        key = read_secret_file(key[1:])[0]
    _check_key(key)
    return RunPlan(
        url=server.url,
        workload=workload_of(options.load, sending.seed, content.prompts, options.tiers.tiers),
        endpoint=Endpoint(
            name=server.endpoint.value,
            model=server.model or "",
            is_stream=server.stream,
            ignore_eos=server.ignore_eos,
            counts_each_event=server.event_usage,
            extra=_extra(server.body),
        ),
        api_key=key,
        data=content.data.value,
        vocab_size=content.vocab_size,
        timeout_s=server.timeout,
        num_warm_up=sending.warmup,
        max_in_flight=sending.max_in_flight,
        slo=_slo(options.results.report.slo, is_stream=server.stream),
    )


def _check(options: BenchOptions) -> None:
    server, load, content = options.server, options.load, options.content
    report = options.results.report
    for name, value in option_values(options).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BenchError(f"--{name.replace('_', '-')} must be a finite number, got {value}.")
    arrivals = load.arrivals
    if arrivals.concurrency is None and arrivals.rate is None and load.trace.trace is None:
        raise BenchError(
            "choose how requests arrive: --concurrency N, --rate R, or --trace FILE with its times."
        )
    check_load(load, content.prompts)
    if content.data.value == "tokens" and server.endpoint.value == "chat":
        raise BenchError(
            "--data tokens needs --endpoint completions, because a chat accepts only text."
        )
    if server.event_usage and not server.stream:
        raise BenchError("--event-usage and --no-stream cannot be combined.")
    if report.save_requests and report.json is None:
        raise BenchError(
            "--save-requests needs --json FILE, the report into which the requests are written."
        )


def check_load(load: LoadOptions, prompts: Path | None = None) -> None:
    """Refuses options of a load that contradict each other. `prompts` is a file of prompts. Raises
    BenchError.
    """
    arrivals, trace = load.arrivals, load.trace
    if arrivals.concurrency is not None and arrivals.rate is not None:
        raise BenchError("--concurrency and --rate cannot be combined: give one of them.")
    if arrivals.swing and arrivals.rate is None:
        raise BenchError("--swing only applies to --rate: give --rate, or leave --swing out.")
    if arrivals.period != ArrivalOptions().period and not arrivals.swing:
        raise BenchError("--period only applies to --swing: give --swing, or leave --period out.")
    if trace.trace is not None and prompts is not None:
        raise BenchError("--trace and --prompts cannot be combined: give one of them.")
    if arrivals.burstiness != 1.0 and arrivals.rate is None:
        raise BenchError(
            "--burstiness only applies to --rate: give --rate, or leave --burstiness out."
        )
    if load.lengths.prefix_tokens and (trace.trace is not None or prompts is not None):
        raise BenchError(
            "--prefix-tokens only applies to random prompts: leave it out with --trace and "
            "--prompts."
        )
    changed = [
        name
        for name, value in option_values(trace).items()
        if name != "trace" and value != getattr(TraceOptions(), name)
    ]
    if changed and trace.trace is None:
        raise BenchError(
            f"--{changed[0].replace('_', '-')} only applies to --trace: give --trace FILE, or "
            "leave it out."
        )


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
        raise BenchError(
            "the API key contains a character that an HTTP header cannot carry, such as a line "
            "break: check --api-key."
        )


def workload_of(
    load: LoadOptions, seed: int | None, prompts: Path | None = None, tiers: Path | None = None
) -> Workload:
    """Returns the workload that these options describe, and reads its trace, its prompts and its
    tiers. With `seed` None the seed is random. Raises BenchError.
    """
    arrivals, lengths, path = load.arrivals, load.lengths, load.trace.trace
    num_requests, rate = arrivals.requests, arrivals.rate
    if num_requests is None and arrivals.duration is None and path is None:
        num_requests = _DEFAULT_REQUESTS
    cut = None if path is None else _cut(load.trace, arrivals.requests)
    trace = None if path is None or cut is None else _trace(path, cut)
    source = path or prompts
    if trace is not None and num_requests is None and arrivals.duration is None:
        num_requests = len(trace.rows)
    return Workload(
        seed=secrets.randbelow(_MAX_SEED) if seed is None else seed,
        concurrency=arrivals.concurrency,
        arrivals=(
            None
            if rate is None
            else GammaArrivals(
                rate=rate,
                burstiness=arrivals.burstiness,
                swing=arrivals.swing,
                period_s=arrivals.period,
            )
        ),
        trace=trace,
        cut=cut,
        source=None if source is None else source.name,
        files=() if prompts is None else read_prompts(prompts),
        prompt_tokens=Lengths.parse("--prompt-tokens", lengths.prompt_tokens),
        output_tokens=Lengths.parse("--output-tokens", lengths.output_tokens),
        prefixes=SharedPrefixes(
            num_tokens=lengths.prefix_tokens, num_prefixes=lengths.num_prefixes
        ),
        num_requests=num_requests,
        duration_s=arrivals.duration,
        tiers=None if tiers is None else read_tier_mix(tiers),
    )


def _cut(trace: TraceOptions, max_requests: int | None) -> TraceCut:
    return TraceCut(
        start_s=trace.trace_start,
        max_requests=max_requests,
        scale_time=trace.scale_time,
        scale_prompt=trace.scale_prompt,
        scale_output=trace.scale_output,
        max_prompt=trace.max_prompt,
        max_output=trace.max_output,
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
