"""Runs a benchmark against one server: probe, warm up, send load, report.

The probe asks for the model, the words-to-tokens ratio, and the metrics before and after the load.
"""

from __future__ import annotations

import os
import platform
import ssl
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import httpx

from moe_serve import __version__
from moe_serve.bench.client.connection import Target
from moe_serve.bench.client.endpoint import Endpoint, RunPlan
from moe_serve.bench.client.load_client import LoadClient, allow_open_files
from moe_serve.bench.client.server_metrics import Metrics, ServerSide
from moe_serve.bench.figures.request_record import RequestRecord, RunTimeline
from moe_serve.bench.figures.summary import Samples, notes_of, quantiles_ms, summarize
from moe_serve.bench.figures.tier_figures import ServiceFigures
from moe_serve.bench.load import Load, OnStart, WallTimer, make_requests, warm_up
from moe_serve.bench.report.report import Report
from moe_serve.bench.workload.prompt_maker import PromptMaker, TextScale, probe_prompts
from moe_serve.bench.workload.workload import Workload
from moe_serve.errors import BenchError, BenchServerError, plain

_METRICS_LIMIT_S = 5.0


class ServerProbe:
    """Sends the few requests of a probe, with an ordinary client. Close it, or use `async with`."""

    def __init__(self, target: Target, api_key: str | None, timeout_s: float) -> None:
        self._url = target.url
        self._client = httpx.AsyncClient(
            base_url=target.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=False,  # like the load: no proxy in between
            verify=ssl.create_default_context() if target.is_tls else False,  # used by the load too
        )

    async def __aenter__(self) -> ServerProbe:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """Returns the name of the first model that the server serves."""
        answer = await self._ask("GET", "/v1/models")
        try:
            return plain(str(answer["data"][0]["id"]))
        except (LookupError, TypeError):
            raise BenchServerError(
                f"{self._url} lists no model at /v1/models: name one with --model."
            ) from None

    async def text_scale(self, endpoint: Endpoint, seed: int) -> TextScale | None:
        """Measures tokens per word with two one-token requests; None if the server reports no
        usage."""
        counts: list[tuple[int, int]] = []
        for num_words, text in probe_prompts(seed):
            body = endpoint.body(text, 1)
            answer = await self._ask("POST", endpoint.path, body)
            try:
                counts.append((num_words, int(answer["usage"]["prompt_tokens"])))
            except (LookupError, TypeError, ValueError):
                return None
        return TextScale.through(counts[0], counts[1])

    async def metrics(self) -> Metrics:
        """Returns the server's metrics; empty if it has none, as they are optional."""
        try:
            response = await self._client.get("/metrics", timeout=_METRICS_LIMIT_S)
            return Metrics.parse(response.text if response.status_code == 200 else "")
        except httpx.HTTPError:
            return Metrics(values={})

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        try:
            response = await self._client.request(
                method, path, content=body, headers={"Content-Type": "application/json"}
            )
            answer = response.json()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise BenchServerError(f"no server answers at {self._url}: {error}.") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise BenchServerError(f"the connection to {self._url} broke: {why}.") from None
        except ValueError:
            raise BenchServerError(
                f"{self._url} answers, but not like an OpenAI-compatible server "
                f"({response.status_code} without JSON at {path})."
            ) from None
        if response.is_error:
            raise BenchServerError(
                f"{self._url}{path} refused ({response.status_code}): {_message(answer)}"
            )
        return answer


def _message(answer: Any) -> str:
    inner = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return plain(str(message))


_SPARE_FILES = 64  # files that the process has open besides its connections
_DEFAULT_IN_FLIGHT = 10_000


async def run_bench(plan: RunPlan, on_start: OnStart | None = None) -> Report:
    """Runs a plan. `on_start` gets the counters when the load begins. Ctrl-C ends the load but not
    the report."""
    target = Target.of(plan.url)
    max_in_flight, notes = _allowed_in_flight(plan)
    async with ServerProbe(target, plan.api_key, plan.timeout_s) as probe:
        endpoint = plan.endpoint
        if not endpoint.model:
            endpoint = replace(endpoint, model=await probe.model())
        scale = None
        if plan.data == "words" and _has_made_prompts(plan.workload):
            scale = await probe.text_scale(replace(endpoint, is_stream=False), plan.workload.seed)
            if scale is None:
                notes.append("the server gives no usage: one word is taken for one token.")
        timer = WallTimer()
        client = LoadClient(
            target,
            path=endpoint.path,
            api_key=plan.api_key,
            is_stream=endpoint.is_stream,
            timeout_s=plan.timeout_s,
            now=timer.now,
        )
        maker = PromptMaker(
            kind=plan.data, seed=plan.workload.seed, vocab_size=plan.vocab_size, scale=scale
        )
        try:
            await warm_up(plan, endpoint, client, timer, scale)
            before = await probe.metrics()
            load = Load(plan, make_requests(plan.workload, endpoint, maker), timer, max_in_flight)
            await load.run(client, on_start)
        finally:
            client.close()
        return _report(plan, endpoint, load, notes, (before, await probe.metrics()))


def _allowed_in_flight(plan: RunPlan) -> tuple[int, list[str]]:
    """Returns how many connections may be open; prints a note if the system allows fewer than
    wanted."""
    closed = plan.workload.concurrency
    wanted = closed or plan.max_in_flight or _DEFAULT_IN_FLIGHT
    allowed = allow_open_files(wanted + _SPARE_FILES) - _SPARE_FILES
    if allowed >= wanted:
        return wanted, []
    text = f"the system allows {allowed + _SPARE_FILES} open files (`ulimit -Hn`)"
    if closed is not None or plan.max_in_flight is not None or allowed < 1:
        raise BenchError(
            f"{wanted} requests in progress need {wanted + _SPARE_FILES} open files, but "
            f"{text}: raise the limit, or lower --concurrency or --max-in-flight."
        )
    return allowed, [f"{text}: more than {allowed} requests at once wait in the client."]


def _has_made_prompts(workload: Workload) -> bool:
    if workload.trace is not None:
        return any(row.prompt is None for row in workload.trace.rows)
    return not workload.files


def _report(
    plan: RunPlan,
    endpoint: Endpoint,
    load: Load,
    notes: list[str],
    metrics: tuple[Metrics, Metrics],
) -> Report:
    assert load.health is not None, "the load has run"
    workload, records = plan.workload, load.records
    summary = summarize(
        records,
        slo=plan.slo,
        num_unfinished=load.num_unfinished,
        peak_in_flight=load.progress.peak_in_flight,
    )
    samples = Samples.of(records)
    notes = notes + notes_of(
        summary, shares_prompts=workload.shares_prompts, ignores_eos=endpoint.ignore_eos
    )
    return Report(
        url=plan.url,
        model=endpoint.model,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        moe_serve_version=__version__,
        workload=_workload_json(plan, endpoint),
        client=describe_client(),
        summary=summary,
        health=load.health,
        timeline=RunTimeline.of(records, summary.duration_s),
        quantiles_ms={
            "ttft": quantiles_ms(samples.ttft_R),
            "tpot": quantiles_ms(samples.tpot_R),
            "itl": quantiles_ms(samples.itl_G),
            "e2e": quantiles_ms(samples.e2e_R),
        },
        server=ServerSide.between(*metrics),
        notes=notes + load.health.warnings(),
        service=_service(plan, records, summary.duration_s),
        is_interrupted=load.is_interrupted,
        records=tuple(records),
    )


def _service(
    plan: RunPlan, records: Sequence[RequestRecord], duration_s: float
) -> ServiceFigures | None:
    tiers, slo = plan.workload.tiers, plan.endpoint.extra.get("slo")
    if tiers is None:
        return None
    is_strict = isinstance(slo, dict) and slo.get("strict") is True
    return ServiceFigures.of(records, tiers.tiers, duration_s, is_strict=is_strict)


def _workload_json(plan: RunPlan, endpoint: Endpoint) -> dict[str, object]:
    return {
        **plan.workload.facts(),
        "data": plan.data,
        "endpoint": endpoint.name,
        "is_stream": endpoint.is_stream,
        "ignore_eos": endpoint.ignore_eos,
        "body": dict(endpoint.extra),
        "timeout_s": plan.timeout_s,
    }


def describe_client() -> dict[str, str]:
    """Describes the machine that sends the load."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }
