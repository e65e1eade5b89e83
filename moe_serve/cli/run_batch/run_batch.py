"""`moe-serve run-batch`: reads a file of requests and writes a file of answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_serve.cli.options import REQUIRED, option, with_options
from moe_serve.cli.run_batch.batch_output import BatchOutput
from moe_serve.cli.run_batch.batch_run import OWN_URL, BatchCount, BatchTarget, run_lines
from moe_serve.cli.server_client import sent_key
from moe_serve.config.sources import API_KEY_VARIABLE, load_config
from moe_serve.errors import ConfigError

EXIT_SOME_FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatchOptions:
    """Options of `run-batch`."""

    input_file: Path = option(
        REQUIRED,
        "-i",
        "--input",
        help="File of requests in the format of OpenAI's Batch API, one JSON object per line.",
    )
    output_file: Path = option(
        REQUIRED,
        "-o",
        "--output",
        help="File for the answers, one JSON object per line. Answers already in the file are "
        "kept.",
    )
    model: str | None = option(
        None,
        help="Folder of a checkpoint to load, or its name on a hub (OWNER/NAME or "
        "OWNER/NAME@REVISION), if no --url is given. Default: the demonstration model.",
    )
    url: str | None = option(
        None,
        help="URL of a running server that answers the requests. Default: this command loads a "
        "model itself.",
    )
    api_key: str | None = option(
        None, envvar=API_KEY_VARIABLE, help="API key of the server at --url, or @FILE with the key."
    )
    concurrency: int = option(
        64, min=1, max=4096, help="Largest number of requests in progress at the same time."
    )
    config_file: Path | None = option(
        None,
        "--config",
        help="YAML file with the configuration for the loaded model, if no --url is given; "
        "configs/serve.yaml lists every key.",
    )


@with_options(RunBatchOptions)
def run_batch(options: RunBatchOptions) -> None:
    """Answer a file of requests, one JSON object per line, and write the answers to a file.

    Run the same command again to continue after an interruption: requests that the output file
    already answers are skipped. Exit codes: 0 all requests were answered, 1 the server cannot be
    reached, 2 the command line or a file is wrong, 3 some requests failed, 130 interrupted.
    """
    if options.url is not None and (options.model is not None or options.config_file is not None):
        raise ConfigError("--url uses a running server, so leave --model and --config out.")
    if options.input_file.resolve() == options.output_file.resolve():
        raise ConfigError(
            f"{options.input_file} is both input and output: name another output file."
        )
    count = BatchCount()
    try:
        num_lines = _count_lines(options.input_file)
        with BatchOutput(options.output_file) as output, _bar(num_lines, count):
            if options.url is not None:
                target = BatchTarget(options.url, sent_key(options.api_key))
                asyncio.run(_run(options.input_file, output, target, options.concurrency, count))
            else:
                _run_here(
                    options.input_file,
                    output,
                    options.model,
                    options.config_file,
                    options.concurrency,
                    count,
                )
    except KeyboardInterrupt:
        _say(count, "interrupted; run the same command again to continue")
        raise
    _say(count, str(options.output_file))
    if count.num_failed:
        raise typer.Exit(EXIT_SOME_FAILED)


def _run_here(
    input_file: Path,
    output: BatchOutput,
    model: str | None,
    config_file: Path | None,
    concurrency: int,
    count: BatchCount,
) -> None:
    flags = {} if model is None else {"model.path": model}
    config = load_config(flags=flags, environ=os.environ, file=config_file).config

    # Imported late, as it is slow: mistakes above must be reported at once.
    from moe_serve.cli.serve.service import offline_app

    with offline_app(config) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        target = BatchTarget(OWN_URL, transport=transport)
        asyncio.run(_run(input_file, output, target, concurrency, count))


async def _run(
    input_file: Path, output: BatchOutput, target: BatchTarget, concurrency: int, count: BatchCount
) -> None:
    async with target:
        await target.check()
        count.begun = time.monotonic()
        await run_lines(_lines(input_file), output, target, concurrency, count)


def _lines(path: Path) -> Iterator[bytes]:
    """Opens the file when it is read: opening a named pipe waits for its writer."""
    try:
        with path.open("rb") as lines:
            yield from lines
    except OSError as error:
        raise _unreadable(path, error) from error


def _count_lines(path: Path) -> int | None:
    """Counts the lines; None for a pipe or terminal, whose content cannot be read twice."""
    if path.is_fifo() or path.is_char_device():
        return None
    try:
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read the lines in {path}: {error.strerror}.")


@contextlib.contextmanager
def _bar(num_lines: int | None, count: BatchCount) -> Iterator[None]:
    """Shows how many lines are done, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lines, {task.fields[failed]} errors"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("batch", total=num_lines, failed=0)
        count.on_change = lambda now: progress.update(
            task, completed=now.num_lines, failed=now.num_failed
        )
        yield


def _say(count: BatchCount, what: str) -> None:
    seconds = max(1e-9, time.monotonic() - (count.begun or time.monotonic()))
    typer.echo(
        f"{count.answered} answered, {count.refused} refused, {count.bad} not sent or lost, "
        f"{count.skipped} already answered; {count.num_tokens} tokens in {seconds:.1f} s "
        f"({count.num_tokens / seconds:.0f}/s): {what}",
        err=True,
    )
