"""Commands on many hosts; the hosts are this one."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_serve.cluster.control.secret import new_secret
from moe_serve.cluster.launch.deployment import LaunchCommand
from moe_serve.cluster.launch.hosts import Host, HostPort
from moe_serve.cluster.launch.launchers import HostCommand, run_on_hosts, ssh_commands
from moe_serve.errors import ConfigError

# What sshd does: the command line goes to a shell; the host name is what comes before it.
FAKE_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
FAKE_HOST="$1" exec sh -c "$2"
"""
# What `python -m moe_serve` would be: says what it got, then does what its host is to do.
FAKE_SERVER = """#!/bin/sh
echo "secret ${#MOE_SERVE_CLUSTER_SECRET} key $MOE_SERVE_SERVER_API_KEYS in $(pwd)"
echo "$@"
case $FAKE_HOST in
  *fails) until [ -e a-waits ]; do sleep 0.05; done; exit 3 ;;
  *waits) trap 'echo drained; exit 0' TERM; touch "$FAKE_HOST"; sleep 1000 & wait ;;
esac
"""
COMMAND = LaunchCommand(model="it's a $model", attention_ranks=1, expert_ranks=2)


def shell(name: str, script: str, **options: str) -> HostCommand:
    return HostCommand(name=name, argv=("sh", "-c", script), **options)


def run(*commands: HostCommand) -> tuple[int, list[str]]:
    lines: list[str] = []
    return run_on_hosts(commands, lines.append, stop_timeout_s=60.0), lines


def test_output_has_the_hosts_name() -> None:
    code, lines = run(shell("a", "echo one; echo two >&2"), shell("b", "printf three"))
    assert code == 0
    assert sorted(lines) == ["[a] one", "[a] two", "[b] three"]


def test_the_first_line_reaches_standard_input() -> None:
    code, lines = run(shell("a", "read -r line; echo $line", first_line="hello"))
    assert (code, lines) == (0, ["[a] hello"])
    assert "hello" not in repr(shell("a", "", first_line="hello")), "it may be a secret"


def test_the_first_failure_stops_the_others() -> None:
    code, lines = run(shell("a", "cat; echo leaving"), shell("b", "exit 5"))
    assert code == 5
    assert "b ended with status 5: stopping the others" in lines
    assert "[a] leaving" in lines, "the end of its input tells it"


def test_a_signal_is_a_failure() -> None:
    assert run(shell("a", "kill -9 $$"))[0] == 137


def test_who_does_not_leave_is_killed() -> None:
    stubborn = shell("a", "trap '' TERM; sleep 1000")
    lines: list[str] = []
    assert run_on_hosts((stubborn, shell("b", "exit 1")), lines.append, stop_timeout_s=0.1) == 1


def test_a_program_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="cannot run no-such-ssh: No such file"):
        run(HostCommand(name="a", argv=("no-such-ssh",)))


def ssh(folder: Path, *hosts: str, **environ: str) -> tuple[HostCommand, ...]:
    for name, text in (("ssh", FAKE_SSH), ("python", FAKE_SERVER)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return ssh_commands(
        [Host(name=host, slots=None) for host in hosts],
        COMMAND,
        HostPort("10.0.0.1", 7000),
        new_secret(),
        environ=environ,
        python=str(folder / "python"),
        folder=str(folder),
    )


@pytest.fixture
def _fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("_fake_ssh")
def test_ssh_starts_the_same_command_with_the_nodes_number(tmp_path: Path) -> None:
    commands = ssh(tmp_path, "me@a", "b", MOE_SERVE_SERVER_API_KEYS="k'1", HOME="/root")
    code, lines = run(*commands)
    assert code == 0, lines
    for node, host in enumerate(("me@a", "b")):
        words = " ".join(
            COMMAND.arguments(node_rank=node, num_nodes=2, coordinator="10.0.0.1:7000")
        )
        assert [line for line in lines if line.startswith(f"[{host}]")] == [
            f"[{host}] secret 64 key k'1 in {tmp_path}",
            f"[{host}] -m moe_serve {words}",
        ]


def test_secrets_are_in_no_argument(tmp_path: Path) -> None:
    commands = ssh(tmp_path, "a", MOE_SERVE_SERVER_API_KEYS="my-key", NCCL_DEBUG="INFO", OTHER="x")
    (command,) = commands
    assert "my-key" not in " ".join(command.argv) and command.first_line is not None
    names = [word.partition("=")[0] for word in command.first_line.split()[1:]]
    assert names == ["MOE_SERVE_SERVER_API_KEYS", "NCCL_DEBUG", "MOE_SERVE_CLUSTER_SECRET"]
    with pytest.raises(ConfigError, match="MOE_SERVE_X has a line break"):
        ssh(tmp_path, "a", MOE_SERVE_X="1\n2")


@pytest.mark.usefixtures("_fake_ssh")
def test_a_host_that_fails_stops_the_others(tmp_path: Path) -> None:
    code, lines = run(*ssh(tmp_path, "a-waits", "b-fails"))
    assert code == 3
    assert "[a-waits] drained" in lines, "its command got SIGTERM"


def test_sigterm_drains_every_host(tmp_path: Path) -> None:
    ssh(tmp_path)
    script = (
        "import sys, pathlib\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "from test_host_commands import ssh, run_on_hosts\n"
        f"commands = ssh(pathlib.Path({str(tmp_path)!r}), 'a-waits', 'b-waits')\n"
        "sys.exit(run_on_hosts(commands))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert process.stdout is not None
    with process.stdout:
        for _ in range(4000):
            if all((tmp_path / host).exists() for host in ("a-waits", "b-waits")):
                break
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        text = process.stdout.read()
    assert "[a-waits] drained" in text and "[b-waits] drained" in text, text
