"""What DeepSpeed's launcher is told; it itself is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.cluster.launch.deployment import LaunchCommand
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.launchers import deepspeed_command, run_deepspeed
from moe_serve.errors import ConfigError

COMMAND = LaunchCommand(model="m", attention_ranks=1, expert_ranks=2, secret_file="/etc/s")
AT = HostPort("worker-1", 7000)


def test_the_command() -> None:
    argv = deepspeed_command(Path("/hosts"), COMMAND, AT, find=lambda name: f"/bin/{name}")
    module = argv.index("--module")
    assert argv[0] == "/bin/deepspeed"
    assert argv[module + 1 :] == ("moe_serve", *COMMAND.arguments())
    options = dict(zip(argv[1:module:2], argv[2:module:2], strict=False))
    assert options["--hostfile"] == "/hosts"
    assert "--no_local_rank" in argv[:module], "else it adds --local_rank to our flags"
    assert argv[argv.index("--master_addr") + 1] == "worker-1"
    assert argv[argv.index("--master_port") + 1] == "7000"


@pytest.mark.parametrize(
    ("missing", "message"),
    [("deepspeed", "pip install 'moe-serve.deepspeed.'"), ("pdsh", "pdsh, which is not installed")],
)
def test_what_is_missing_is_said(missing: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepspeed_command(Path("h"), COMMAND, AT, lambda name: None if name == missing else name)


def test_it_passes_no_secret_on() -> None:
    command = LaunchCommand(model="m", attention_ranks=1, expert_ranks=2)
    with pytest.raises(ConfigError, match="give --secret-file FILE"):
        deepspeed_command(Path("h"), command, AT, find=lambda name: name)


def test_its_exit_code_is_ours() -> None:
    assert run_deepspeed(("sh", "-c", "exit 4")) == 4
