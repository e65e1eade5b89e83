"""Runs commands on many hosts at once; when one fails, or on Ctrl-C, all are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moe_serve.cluster.members.output_pump import OutputPump
from moe_serve.errors import ConfigError

STOP_TIMEOUT_S = 60.0  # from the end of standard input to SIGKILL; a server drains before
EXIT_INTERRUPTED = 130
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """A command. `first_line` is written to its standard input, whose end tells it to exit."""

    name: str
    argv: tuple[str, ...]
    first_line: str | None = field(default=None, repr=False)  # may hold secrets


def write_to_stdout(line: str) -> None:
    with contextlib.suppress(OSError):  # no reader or no space: the hosts go on
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def run_on_hosts(
    commands: Sequence[HostCommand],
    write: Callable[[str], None] = write_to_stdout,
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """Returns the exit code of the first command that failed, else 0; 130 after Ctrl-C or
    SIGTERM.

    The first command is node 0's. Every line of output is prefixed with the host's name. No process
    is left behind; a second Ctrl-C kills those that still drain.
    """
    pump = OutputPump(write)
    running: list[tuple[HostCommand, subprocess.Popen[bytes]]] = []
    code = 0
    try:
        with _sigterm_interrupts():
            for command in commands:
                running.append((command, _start(command, pump)))
            code = _wait(running, write)
    except KeyboardInterrupt:
        write("stopping all hosts")
        code = EXIT_INTERRUPTED
    finally:
        processes = [process for _, process in running]
        try:
            _stop(processes, stop_timeout_s)
        except KeyboardInterrupt:
            _stop(processes, 0.0)
        pump.close()
    return code


def _start(command: HostCommand, pump: OutputPump) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own, so that Ctrl-C is passed on by us, in order."""
    try:
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"cannot run {command.argv[0]}: {error.strerror or error}.") from error
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    pump.add(command.name, os.dup(process.stdout.fileno()))
    process.stdout.close()
    if command.first_line is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(command.first_line.encode() + b"\n")
            process.stdin.flush()
    return process


def _wait(
    running: Sequence[tuple[HostCommand, subprocess.Popen[bytes]]], write: Callable[[str], None]
) -> int:
    """Waits until all have ended, or one failed."""
    while True:
        codes = [(command, process.poll()) for command, process in running]
        for command, code in codes:
            if code:
                status = 128 - code if code < 0 else code
                write(f"{command.name} ended with status {status}: stopping the others")
                return status
        if all(code == 0 for _, code in codes):
            return 0
        time.sleep(_POLL_S)


def _stop(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Ends commands by the end of their standard input, and kills those that stay.

    The first one ends before the others: node 0 finishes its requests while it still has all ranks,
    and then dismisses the other nodes.
    """
    deadline = time.monotonic() + timeout_s
    for process in processes:
        assert process.stdin is not None, "its input is a pipe"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # includes children that it left
        process.wait()


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, which alone may handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
