"""Prints a run on a terminal: its progress while it runs, and the table of its figures."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moe_serve.bench.client.load_client import RunProgress
from moe_serve.bench.client.server_metrics import ServerSide
from moe_serve.bench.figures.cells_figures import CellsFigures
from moe_serve.bench.figures.summary import Spread
from moe_serve.bench.figures.tier_figures import ServiceFigures
from moe_serve.bench.report.report import Report

_REFRESH_PER_S = 4
_BAR = 24


def print_report(console: Console, report: Report) -> None:
    console.print(Text(f"{report.model} at {report.url}: {report.workload['mode']}"), style="bold")
    facts = Table.grid(padding=(0, 2))
    for name, value in report_facts(report):
        facts.add_row(name, Text(value))
    console.print(facts)
    if latency_rows(report):
        console.print(_latencies(report))
    if report.service is not None:
        console.print(_tiers(report.service))
    for note in report.notes:
        console.print(Text(f"note: {note}"), style="yellow")


def report_facts(report: Report) -> Iterator[tuple[str, str]]:
    s = report.summary
    if source := report.workload.get("source"):
        yield "source", str(source)
    text = f"{s.num_ok} answered, {s.num_failed} failed in {s.duration_s:.1f} s"
    if report.is_interrupted:
        text += f"; interrupted with {s.num_unfinished} in flight, which are not counted"
    yield "requests", text
    for kind, times in s.errors.items():
        yield "", f"{times} x {kind}: {s.error_examples.get(kind, '')[:120]}"
    yield "requests/s", f"{s.requests_per_s:.2f}; at most {s.peak_in_flight} in flight"
    unit = "tokens" if s.has_usage else "events"
    yield "output", f"{s.output_tok_s:,.1f} {unit}/s ({s.output_tokens:,} {unit})"
    if s.has_usage:
        text = f"{s.input_tok_s:,.1f} tokens/s ({s.prompt_tokens:,} tokens)"
        if s.cached_share is not None:
            text += f", {s.cached_share:.1%} of them from the server's cache"
        yield "input", text
    if s.goodput is not None:
        good = s.goodput
        yield "goodput", f"{good.requests_per_s:.2f} requests/s, {good.share:.1%} met {good.slo}"
    if report.service is not None:
        yield from service_facts(report.service)
    if report.cells is not None:
        yield from cells_facts(report.cells)
    yield "client", _client(report)
    yield "seed", str(report.workload.get("seed"))
    if report.server is not None:
        yield "server", "; ".join(server_facts(report.server))


def _client(report: Report) -> str:
    health = report.health
    text = f"{health.cpu:.0%} of a core"
    if health.loop_lag is not None:
        text += f", event loop late by {health.loop_lag.p99:.1f} ms (p99)"
    if health.lateness is not None:
        text += f", requests sent late by {health.lateness.p99:.1f} ms (p99)"
    return text


def server_facts(server: ServerSide) -> list[str]:
    facts = [f"{server.num_steps:.0f} steps of {server.tokens_per_step:.1f} tokens"]
    if server.prefix_hit_rate is not None:
        facts.append(f"prefix hits {server.prefix_hit_rate:.1%}")
    if server.experts_needed_per_step is not None:
        facts.append(f"{server.experts_needed_per_step:.1f} experts needed per step, all layers")
    if server.expert_hit_rate is not None:
        facts.append(f"{server.expert_hit_rate:.1%} of them in memory")
    if server.predicted_experts_per_step is not None:
        facts.append(f"{server.predicted_experts_per_step:.0f} experts predicted for the last step")
    for count, num in server.steps_by_micro_batches.items():
        facts.append(f"{num:.0f} steps with {count} micro-batch{'' if count == '1' else 'es'}")
    if server.placement_switches is not None:
        facts.append(f"{server.placement_switches:.0f} switches of the placement")
    if server.num_preemptions:
        facts.append(f"{server.num_preemptions:.0f} preemptions")
    if server.runaways:
        by_tier = ", ".join(f"{num:.0f} of {tier}" for tier, num in server.runaways.items())
        facts.append(f"runaway answers: {by_tier}")
    return facts


def latency_rows(report: Report) -> list[tuple[str, Spread]]:
    s = report.summary
    rows = [("TTFT", s.ttft_ms), ("TPOT", s.tpot_ms), ("ITL", s.itl_ms), ("end to end", s.e2e_ms)]
    if report.is_open:
        rows[1:1] = [("TTFT from sending", s.ttft_sent_ms)]
        rows.append(("end to end from sending", s.e2e_sent_ms))
    return [(name, spread) for name, spread in rows if spread is not None]


def _latencies(report: Report) -> Table:
    table = Table("milliseconds")
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for name, spread in latency_rows(report):
        values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
        table.add_row(name, *(f"{value:,.2f}" for value in values))
    return table


def service_facts(service: ServiceFigures) -> Iterator[tuple[str, str]]:
    """Yields the figures of all tiers and tenants together."""
    text = f"{service.attained:.1%} met their tier's targets, {service.goodput_per_s:.2f} a second"
    text += f"; weighted tardiness {service.weighted_tardiness_s:.2f} s"
    if service.longest_wait_s is not None:
        text += f"; longest wait {service.longest_wait_s:.1f} s"
    yield "tiers", text
    if service.num_promised or service.num_refused:
        text = f"{service.num_kept} of {service.num_promised} promises kept"
        text += f", {service.num_refused} requests refused"
        if service.forecast_error is not None:
            text += f"; median error of the forecasts {service.forecast_error:.0%}"
        yield "promises", text
    if service.jain is not None:
        top = service.tenants[0]
        text = f"Jain index {service.jain:.2f}; most service: {top.name} with "
        yield "tenants", text + f"{top.service_tokens:,} tokens of {top.num} requests"


def cells_facts(cells: CellsFigures) -> Iterator[tuple[str, str]]:
    """Yields a line for each shape of cells, for the hand-overs, and for their numbers."""
    for shape in dict.fromkeys(cell.shape for cell in cells.cells):
        alike = [cell for cell in cells.cells if cell.shape == shape]
        tokens = sum(cell.num_tokens for cell in alike)
        started = sum(cell.num_started for cell in alike)
        text = f"{tokens:,} tokens, {started:,} first tokens, "
        yield f"{len(alike)}x{shape}", text + f"{sum(cell.num_steps for cell in alike):,} steps"
    if cells.num_hand_overs or cells.num_migrations:
        text = f"{cells.num_hand_overs:,} after prompts, {cells.num_migrations:,} migrations, "
        text += f"{cells.num_given_up:,} given up; {cells.num_bytes / 1e9:,.2f} GB in "
        text += f"{cells.num_parcels:,} parcels"
        if cells.exposed_ms is not None and cells.exposed_share is not None:
            text += f"; exposed {cells.exposed_ms.p50:.1f} ms (p50), {cells.exposed_ms.p99:.1f} ms "
            text += f"(p99), {cells.exposed_share:.1%} of TTFT"
        yield "moves", text
    if cells.scale is not None:
        scale = cells.scale
        text = f"{scale.device_hours:,.1f} device hours, {scale.share:.0%} of all cells'; "
        text += f"{scale.num_changes} changes, at most {scale.most_changes_per_hour} in an hour"
        yield f"autoscaling, {scale.policy}", text


TIER_HEADS = ("tier", "requests", "refused", "met", "TTFT p50", "p99", "longest", "tardiness")


def tier_rows(service: ServiceFigures) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each tier, under `TIER_HEADS`."""
    for tier in service.tiers:
        p50, p99 = ("-", "-") if tier.ttft_ms is None else _seconds(tier.ttft_ms)
        yield (
            f"{tier.name}, weight {tier.weight:g}, {tier.targets or 'no target'}",
            str(tier.num),
            str(tier.num_refused),
            f"{tier.attained:.1%}",
            p50,
            p99,
            "-" if tier.longest_wait_s is None else f"{tier.longest_wait_s:,.2f} s",
            f"{tier.mean_tardiness_s:,.2f} s",
        )


def _tiers(service: ServiceFigures) -> Table:
    name, *others = TIER_HEADS
    table = Table(name)
    for other in others:
        table.add_column(other, justify="right")
    for cells in tier_rows(service):
        table.add_row(*cells)
    return table


def _seconds(spread: Spread) -> tuple[str, str]:
    return f"{spread.p50 / 1e3:,.2f} s", f"{spread.p99 / 1e3:,.2f} s"


class LiveLine:
    """A progress line. Use `with`, and pass `start` to the run. A thread of rich redraws it four
    times a second."""

    def __init__(self, console: Console) -> None:
        self._progress: RunProgress | None = None
        self._planned: int | None = None
        self._since = 0.0
        self._live = Live(
            console=console,
            get_renderable=self._line,
            refresh_per_second=_REFRESH_PER_S,
            transient=True,
            auto_refresh=console.is_terminal,
        )

    def __enter__(self) -> LiveLine:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def start(self, progress: RunProgress, planned: int | None) -> None:
        self._progress, self._planned = progress, planned
        self._since = time.perf_counter()

    def _line(self) -> Text:
        progress = self._progress
        if progress is None:
            return Text("asking the server, warming up ...", style="dim")
        seconds = max(1e-9, time.perf_counter() - self._since)
        num_done = progress.num_ok + progress.num_failed
        line = Text()
        if self._planned:
            filled = round(_BAR * num_done / self._planned)
            line.append("█" * filled + "░" * (_BAR - filled), style="green")
            line.append(f" {num_done}/{self._planned}")
        else:
            line.append(f"{num_done} done")
        line.append(f"  {progress.num_in_flight} in flight")
        line.append(f"  {progress.num_ok / seconds:.1f} requests/s")  # as the report counts them
        line.append(f"  {progress.num_events / seconds:,.0f} events/s")
        line.append(f"  {seconds:.0f} s")
        if progress.num_failed:
            line.append(f"  {progress.num_failed} failed", style="red")
        return line
