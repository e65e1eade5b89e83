"""The standard streams of a command: closed, full, or a pipe whose reader has gone.

A command whose output is lost ends with one sentence. A server continues: its ready message matters
less than its answers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Iterator

from moe_serve.errors import MoeServeError

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
    """Prints text that the process can do without; if that fails, `summary` is logged."""
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
