"""Starts the nodes of a launch from one of them: `--launcher ssh` and `--launcher deepspeed`.

ssh runs the same command on every host of a hostfile. All hosts need the same Python and working
folder at the same paths (a shared file system, or the same image). Variables go through standard
input, so that no secret is in an argument list, on either side. When that input ends, because we
stop or because the connection breaks, the command gets SIGTERM.

DeepSpeed's launcher gets the hostfile and our command. It starts one process for each slot; the
first one of a host stays (`is_spare_copy`). It does not pass our variables on, so the secret must
be in a file on each host.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.launch.host_commands import HostCommand
from moe_serve.cluster.launch.host_port import HostPort
from moe_serve.cluster.launch.hosts import Host
from moe_serve.cluster.launch.launch_command import LaunchCommand
from moe_serve.errors import ConfigError

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
