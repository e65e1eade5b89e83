"""The streams, files and tables of a command.

The standard streams may be closed, full, or a pipe whose reader has gone. A command whose output is
lost ends with one sentence. A server continues: its ready message matters less than its answers.
Tables of figures are never cut: files and pipes have no width, and a narrow terminal wraps longer
lines by itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment
from rich.table import Table

from moe_serve.errors import ConfigError, MoeServeError, printable

_LOGGER = logging.getLogger(__name__)


class OutputError(MoeServeError):
    """The standard output did not take the output of a command."""


def open_missing_streams() -> None:
    """Replaces standard streams that were closed (`>&-`) by /dev/null.

    Otherwise the next file or socket gets the number of the missing stream, and printed text goes
    there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - for the whole process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Runs a command, and raises OutputError if the standard output did not take all of it.

    A pipe whose reader has gone (`| head -1`) ends the command without a message, with exit code 1.
    """
    try:
        yield
    except OSError as error:
        if _output_failure() is None:
            raise
        _fail(error)
    except SystemExit as end:
        failure = _output_failure()
        if failure is None or end.code:
            raise
        _fail(failure)
    except BaseException:
        _output_failure()
        raise
    else:
        if (failure := _output_failure()) is not None:
            _fail(failure)


@contextlib.contextmanager
def optional_output(summary: str) -> Iterator[None]:
    """Prints text that is not essential. If printing fails, `summary` is logged instead."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _discard_output()
        _LOGGER.warning("%s (the standard output cannot be written: %s)", summary, error.strerror)


def _fail(error: OSError) -> None:
    if error.errno == errno.EPIPE:
        sys.exit(1)
    raise OutputError(f"cannot write to the standard output: {error.strerror}.") from error


def _output_failure() -> OSError | None:
    """Flushes the buffer and returns the error. An output that fails is discarded from then on."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")  # an unbuffered stream has nothing to flush
    except OSError as error:
        if error.errno is None:  # io.UnsupportedOperation: a stream in memory
            return None
        _discard_output()
        return error
    return None


def _discard_output() -> None:
    """Redirects the standard output to /dev/null, as Python flushes its buffer once more at
    exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


@contextlib.contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """Makes Ctrl-C end the process at once. Use it while large modules are imported: nothing is
    open then that must be closed, and some modules swallow a KeyboardInterrupt and are broken
    afterwards.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def interrupted_by_terminate() -> Iterator[None]:
    """Makes SIGTERM a KeyboardInterrupt, so that a command removes what it has not finished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_output(*paths: Path | None) -> None:
    """Raises ConfigError if a path is a folder, or lies in a folder that does not exist."""
    for path in paths:
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.parent} is not a folder.")
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder.")


def check_output_folder(path: Path) -> None:
    """Raises ConfigError if an output folder is a file, or lies in a folder that does not exist."""
    refuse_a_file(path)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: {path.absolute().parent} is not a folder.")


def refuse_a_file(folder: Path) -> None:
    """Raises ConfigError if --out is a file where a folder is needed."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"--out {folder} is a file, but it must be a folder into which the files are "
            "written: name another, or remove the file."
        )


_COLUMNS = 180
_ANY_WIDTH = 10_000


def wide_console() -> Console:
    """Returns a console for the standard output."""
    console = _PlainConsole(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _COLUMNS
    console.push_render_hook(_WholeFigures(console))
    return console


class _PlainConsole(Console):
    """Escapes control characters in text from files and servers."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else segment._replace(text=printable(segment.text))


class _WholeFigures(RenderHook):
    """Makes columns of tables with headers as wide as their content; other grids are folded."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unbound = console.options.update_width(_ANY_WIDTH)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        for table in renderables:
            if not (isinstance(table, Table) and table.show_header):
                continue
            for column in table.columns:
                cells = [_as_shown(cell) for cell in (column.header, *column.cells)]
                measured = [self._console.measure(cell, options=self._unbound) for cell in cells]
                column.min_width = max(each.maximum for each in measured)
        return renderables


def _as_shown(cell: RenderableType) -> RenderableType:
    return printable(cell) if isinstance(cell, str) else cell


def counted(number: int, noun: str) -> str:
    """Returns a count with its noun, such as "1 node" or "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
