"""`moe-serve top`: shows the work of a running server live in a terminal."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.live import Live

from moe_serve.cli.options import option, with_options
from moe_serve.cli.server_client import NotReachedError, sent_key
from moe_serve.cli.top.top_source import StateView, TopSource
from moe_serve.cli.top.top_view import frame
from moe_serve.config.sources import API_KEY_VARIABLE
from moe_serve.errors import ConfigError

_TICK_S = 0.2  # how soon a key or a new size of the terminal is noticed
_PLAIN_COLUMNS = 140  # of a frame that goes to a file or a pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """Options of `top`."""

    url: str = option("http://127.0.0.1:8000", help="URL of the server.")
    api_key: str | None = option(
        None, envvar=API_KEY_VARIABLE, help="API key of the server, or @FILE with the key."
    )
    interval: float = option(1.0, min=0.2, max=60.0, help="Seconds between two updates.")
    once: bool = option(False, "--once", help="Print one frame and exit.")


@with_options(TopOptions)
def top(options: TopOptions) -> None:
    """Watch a running server: requests, tokens, latencies, KV pages, experts, ranks, events.

    Press q or Ctrl-C to quit. Without a terminal the command prints one frame. The exit code is 1
    if the server cannot be reached.
    """
    if math.isnan(options.interval):  # no comparison with a range refuses it
        raise ConfigError("--interval must be 0.2 to 60 seconds, got nan.")
    console = Console(highlight=False)
    with TopSource(options.url, sent_key(options.api_key)) as source:
        try:
            state = source.fetch()
            if options.once or not console.is_terminal:
                _print_once(console, source, state)
            else:
                _watch(console, source, state, options.interval)
        except NotReachedError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


def _print_once(console: Console, source: TopSource, state: StateView) -> None:
    if source.is_plain:  # speeds are differences of two looks
        time.sleep(1.0)
        state = source.fetch()
    if not console.is_terminal:
        console.width = _PLAIN_COLUMNS
    console.print(frame(state, console, is_bounded=False))


def _watch(console: Console, source: TopSource, state: StateView, interval: float) -> None:
    live = Live(console=console, screen=True, auto_refresh=False)
    with single_keys():
        try:  # not `with`: Ctrl-C may arrive while it starts
            live.start()
            _follow(live, source, state, interval)
        finally:
            live.stop()


def _follow(live: Live, source: TopSource, state: StateView, interval: float) -> None:
    """Updates the view until q is typed. A server that goes away is waited for."""
    console, trouble = live.console, ""
    next_look, size = time.monotonic() + interval, None
    while True:
        is_due = time.monotonic() >= next_look
        if is_due:
            next_look = time.monotonic() + interval
            try:
                state, trouble = source.fetch(), ""
            except NotReachedError as error:
                trouble = str(error)
        if is_due or console.size != size:
            size = console.size
            live.update(frame(state, console, trouble=trouble or None), refresh=True)
        if "q" in wait_for_key(_TICK_S).lower():
            return


@contextlib.contextmanager
def single_keys() -> Iterator[None]:
    """Makes the terminal deliver keys at once, and restores it afterwards. Ctrl-C keeps its
    meaning."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def wait_for_key(seconds: float) -> str:
    """Returns the keys that were typed; empty if none was typed within the time."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    descriptor = sys.stdin.fileno()
    ready, _, _ = select.select([descriptor], [], [], seconds)
    return os.read(descriptor, 64).decode("utf-8", errors="replace") if ready else ""
