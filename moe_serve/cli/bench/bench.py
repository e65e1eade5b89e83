"""`moe-serve bench`: sends load to any server of OpenAI's API and measures its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from moe_serve.cli.bench.bench_options import BenchOptions, CompareReportsOptions, ResultOptions
from moe_serve.cli.options import with_options
from moe_serve.errors import BenchError, BenchServerError

if TYPE_CHECKING:
    from moe_serve.bench.client.endpoint import RunPlan
    from moe_serve.bench.report.report import Report

EXIT_ERRORS = 1
EXIT_INTERRUPTED = 130

bench = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")

T = TypeVar("T")


@bench.callback()
@with_options(BenchOptions)
def run(context: typer.Context, options: BenchOptions) -> None:
    """Send load to an OpenAI-compatible server and measure latency, throughput and errors.

    Choose the load with --concurrency (a fixed number of requests in progress), --rate (a fixed
    number of requests per second) or --trace (a replay). The exit code is 1 if the server cannot be
    reached or too many requests fail (--max-error-rate).
    """
    if context.invoked_subcommand is not None:
        return
    results = options.results
    if results.compare is not None:
        _compare(*results.compare, html=results.html)
        return
    from moe_serve.cli.bench.bench_plan import plan_of

    _run(plan_of(options), options.server.peer_url, results)


@bench.command("compare")
@with_options(CompareReportsOptions)
def compare_reports(options: CompareReportsOptions) -> None:
    """Compare two reports in one table.

    The table has confidence intervals if both reports were written with --save-requests.
    """
    _compare(options.a, options.b, html=options.html)


def _compare(a: Path, b: Path, *, html: Path | None) -> None:
    from moe_serve.bench.report.report import read_report

    _show_pair(read_report(a), read_report(b), html)


def _run(plan: RunPlan, peer_url: str | None, results: ResultOptions) -> None:
    from moe_serve.bench.client.connection import Target
    from moe_serve.bench.report.html_page import write_page

    path, html = results.report.json, results.html
    _check_writable(path, html)
    runs = [(plan.url, path)]
    if peer_url is not None:
        Target.of(peer_url)  # before the first run, because its figures take time to compute
        runs.append((peer_url, path and path.with_stem(f"{path.stem}-peer")))
    reports: list[Report] = []
    for url, path in runs:
        reports.append(_measure(replace(plan, url=url)))
        _keep(reports[-1], path, results.report.save_requests)  # the next run may end in an error
        if reports[-1].is_interrupted:
            break
    if len(reports) == 2:
        _show_pair(reports[0], reports[1], html)
    elif html is not None:
        write_page(html, reports)
        typer.echo(f"page: {html}")
    if any(report.is_interrupted for report in reports):
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(_is_bad(report, results.max_error_rate) for report in reports):
        raise typer.Exit(EXIT_ERRORS)


def _keep(report: Report, path: Path | None, has_records: bool) -> None:
    from moe_serve.bench.report.report_table import print_report
    from moe_serve.cli.console import wide_console

    print_report(wide_console(), report)
    if path is not None:
        report.write(path, has_records=has_records)
        typer.echo(f"report: {path}")


def _is_bad(report: Report, max_error_rate: float) -> bool:
    """Returns whether too many requests failed. A refusal because of a deadline is an answer, not a
    failure."""
    summary, service = report.summary, report.service
    num_refused = 0 if service is None else service.num_refused
    if not summary.num_ok + num_refused:
        return True
    num_ended = max(1, summary.num_ok + summary.num_failed)
    return (summary.num_failed - num_refused) / num_ended > max_error_rate


def _measure(plan: RunPlan) -> Report:
    """Runs one benchmark. If the server cannot be reached, the command ends with exit code 1."""
    from rich.console import Console

    from moe_serve.bench.bench_run import run_bench
    from moe_serve.bench.report.report_table import LiveLine

    try:
        with LiveLine(Console(stderr=True)) as live:
            return _with_uvloop(run_bench(plan, live.start))
    except BenchServerError as error:
        typer.echo(f"error: {_told(error, plan.url)}", err=True)
        raise typer.Exit(EXIT_ERRORS) from None


def _told(error: BenchServerError, url: str) -> str:
    """Returns the message of an error; without a connection, in the same words as the other
    commands."""
    import httpx

    from moe_serve.cli.server_client import no_connection

    if isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout):
        return no_connection(url, error.__cause__)
    return str(error)


def _with_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine with uvloop, which takes less CPU time per event; the server uses it too."""
    try:
        import uvloop
    except ImportError:  # uvloop does not exist for Windows
        return asyncio.run(work)
    return uvloop.run(work)


def _show_pair(a: Report, b: Report, html: Path | None) -> None:
    from moe_serve.bench.report.compare import print_comparison
    from moe_serve.bench.report.html_page import write_page
    from moe_serve.cli.console import wide_console

    print_comparison(wide_console(), a, b)
    if html is not None:
        write_page(html, [a, b])
        typer.echo(f"page: {html}")


def _check_writable(*paths: Path | None) -> None:
    """Checks output paths before the run: an error after the run would lose its figures."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise BenchError(f"cannot write {path}: it is a folder, or its folder does not exist.")
