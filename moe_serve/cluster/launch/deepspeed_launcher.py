"""`--launcher deepspeed`: hands the hostfile and our command to DeepSpeed's launcher.

DeepSpeed starts one process for each slot; the first one of a host stays (`is_spare_copy`). It does
not pass our variables on, so the secret must be in a file on each host.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from moe_serve.cluster.launch.endpoint import Endpoint
from moe_serve.cluster.launch.launch_command import LaunchCommand
from moe_serve.errors import ConfigError


def deepspeed_command(
    hostfile: Path,
    command: LaunchCommand,
    coordinator: Endpoint,
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
