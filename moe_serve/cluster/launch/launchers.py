"""Starts the nodes of a launch from one of them: `--launcher ssh` and `--launcher deepspeed`.

One command runs on each host. When one fails, or on Ctrl-C, all are ended.

ssh runs the same command on every host of a hostfile. All hosts need the same Python and working
folder at the same paths (a shared file system, or the same image). Variables go through standard
input, so that no secret is in an argument list, on either side. When that input ends, because we
stop or because the connection breaks, the command gets SIGTERM.

DeepSpeed's launcher gets the hostfile and our command. It starts one process for each slot; the
first one of a host stays (`is_spare_copy`). It does not pass our variables on, so the secret must
be in a file on each host.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.launch.deployment import LaunchCommand
from moe_serve.cluster.launch.hosts import Host, HostPort
from moe_serve.cluster.members.output_pump import OutputPump
from moe_serve.errors import ConfigError

STOP_TIMEOUT_S = 60.0  # from the end of standard input to SIGKILL; a server drains before
EXIT_INTERRUPTED = 130
_POLL_S = 0.05
PASSED_ON = ("MOE_SERVE_", "NCCL_", "GLOO_", "HF_", "PYTHONPATH")  # prefixes of names
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
# Standard input of a background command is /dev/null, so it is kept as 3. A process that holds the
# connection's output open would keep ssh waiting, so the watcher has no output.
_REMOTE = """\
IFS= read -r variables && eval "$variables" || exit 2
cd {folder} || exit 2
exec 3<&0
{command} </dev/null 3<&- &
pid=$!
(cat <&3; kill -TERM "$pid") >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait "$pid"
code=$?
kill "$watcher" 2>/dev/null
exit "$code"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """A command. `first_line` is written to its standard input, whose end tells it to exit."""

    name: str
    argv: tuple[str, ...]
    first_line: str | None = field(default=None, repr=False)  # may hold secrets


def write_to_stdout(line: str) -> None:
    with contextlib.suppress(OSError):  # no reader or no space: the hosts continue
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
    """Starts a command in its own session, so that we pass on Ctrl-C in the right order."""
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
    """Ends commands by closing their standard input, and kills those that do not end.

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


def ssh_commands(
    hosts: Sequence[Host],
    command: LaunchCommand,
    coordinator: HostPort,
    secret: ClusterSecret,
    *,
    environ: Mapping[str, str],
    python: str,
    folder: str,
) -> tuple[HostCommand, ...]:
    """Returns one command for each host, in the order of the nodes."""
    variables = _variables(environ, secret)
    commands = []
    for node, host in enumerate(hosts):
        arguments = command.arguments(node_rank=node, num_nodes=len(hosts), coordinator=coordinator)
        script = _REMOTE.format(
            folder=shlex.quote(folder), command=shlex.join((python, "-m", "moe_serve", *arguments))
        )
        # The remote login shell may be any; it starts sh.
        remote = f"exec sh -c {shlex.quote(script)}"
        argv = ("ssh", *_OPTIONS, host.name, remote)
        commands.append(HostCommand(name=host.name, argv=argv, first_line=variables))
    return tuple(commands)


def _variables(environ: Mapping[str, str], secret: ClusterSecret) -> str:
    """Returns the variables as one line for a shell to evaluate."""
    passed = {name: value for name, value in environ.items() if name.startswith(PASSED_ON)}
    passed |= secret.environment()
    broken = [name for name, value in passed.items() if "\n" in value]
    if broken:
        raise ConfigError(f"{broken[0]} has a line break and cannot be passed on through ssh.")
    return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in passed.items())


def deepspeed_command(
    hostfile: Path,
    command: LaunchCommand,
    coordinator: HostPort,
    find: Callable[[str], str | None] = shutil.which,
) -> tuple[str, ...]:
    """Returns DeepSpeed's command line; raises ConfigError if a program or the secret is
    missing."""
    program = find("deepspeed")
    if program is None:
        raise ConfigError(
            "the DeepSpeed launcher is not installed; install it with "
            "pip install 'moe-serve[deepspeed]', or use --launcher ssh."
        )
    if find("pdsh") is None:
        raise ConfigError(
            "the DeepSpeed launcher reaches other hosts through pdsh, which is not installed; "
            "install it, or use --launcher ssh."
        )
    if command.secret_file is None:
        raise ConfigError(
            "the DeepSpeed launcher does not pass the cluster secret on: put it into a file on "
            "each host, and give --secret-file FILE."
        )
    return (
        program,
        "--hostfile",
        str(hostfile.absolute()),
        "--force_multi",  # one host in the file is a remote host too
        "--master_addr",
        coordinator.host,
        "--master_port",
        str(coordinator.port),
        "--no_local_rank",
        "--module",
        "moe_serve",
        *command.arguments(),
    )


def run_deepspeed(argv: tuple[str, ...]) -> int:
    """Runs DeepSpeed and returns its exit code. Ctrl-C reaches it too, and it ends its
    processes."""
    with subprocess.Popen(argv) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
