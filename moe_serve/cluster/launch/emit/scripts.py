"""Writes files that start each node: a shell script, a batch script for Slurm, systemd services."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from moe_serve.cluster.launch.deployment import Deployment

_SCRIPT = """\
#!/usr/bin/env bash
# {name} on {num_nodes} nodes. On each node, with its number from 0:
#
#     export MOE_SERVE_CLUSTER_SECRET=@/path/to/secret   # one file, the same everywhere
#     bash {name}.sh NODE
#
# Node 0 is {host} and serves HTTP on port {http_port}.
set -euo pipefail

if [ "$#" -ne 1 ] || ! [ "$1" -ge 0 ] 2>/dev/null || [ "$1" -ge {num_nodes} ]; then
  echo "usage: bash {name}.sh NODE    (0 to {last})" >&2
  exit 2
fi
{check}{exports}
exec {command}
"""
_CHECK = """\
if [ -z "${MOE_SERVE_CLUSTER_SECRET:-}" ]; then
  echo "set MOE_SERVE_CLUSTER_SECRET: a secret, or @FILE; make one with: openssl rand -hex 32" >&2
  exit 2
fi
"""
_SBATCH = """\
#!/usr/bin/env bash
# {name} on {num_nodes} nodes: sbatch {name}.sbatch
#
# Clients reach the first node of the job on port {http_port}: squeue --me, or the top of the log.
# To end it: scancel --signal=TERM JOB, which drains; scancel alone kills what is not done after
# the cluster's KillWait (30 s). At its time limit the job drains too, by --signal.
#SBATCH --job-name={name}
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@{stop}
{gpus}#SBATCH --output={name}-%j.log
set -euo pipefail

# Every node inherits the secret of the control connections, which is in no file or argument.
if [ -z "${{MOE_SERVE_CLUSTER_SECRET:-}}" ]; then
  MOE_SERVE_CLUSTER_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
fi
export MOE_SERVE_CLUSTER_SECRET
{exports}
echo "job $SLURM_JOB_ID: node 0 is the first of $SLURM_JOB_NODELIST"

# srun does not pass on the CPUs of sbatch; without the count a task would get one core.
exec srun --nodes={num_nodes} --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
  --kill-on-bad-exit=1 --label \\
  {command}
"""
_SYSTEMD_UNIT = """\
# /etc/systemd/system/{name}-{node}.service on node {node}; then:
#
#     systemctl daemon-reload && systemctl enable --now {name}-{node}
#
# Secrets are in {secrets}, mode 0600, the same on every node; see {name}.env.example.
[Unit]
Description=moe-serve {name}, node {node} of {num_nodes}
After=network-online.target
Wants=network-online.target

[Service]
Type=exec
# Root, until you name a user that may read the model; moe-serve must be on this PATH.
#User=moe-serve
#Environment=PATH=/opt/moe-serve/bin:/usr/bin:/bin
EnvironmentFile={secrets}
{variables}ExecStart={command}
# Built kernels and models fetched by name stay in /var/cache/moe-serve.
CacheDirectory=moe-serve
CacheDirectoryMode=0700
Environment=XDG_CACHE_HOME=%C HOME=%C/moe-serve TRITON_CACHE_DIR=%C/moe-serve/triton
Environment=HF_HOME=%C/moe-serve/huggingface

# Without a limit on starts: a node that waits for the others may need many.
Restart=on-failure
RestartSec=5
# 2 is a user's mistake, such as an unknown key: a restart does not help.
RestartPreventExitStatus=2
# Stopped while it loads, it ends with 143; while it serves, it drains and ends with 0.
SuccessExitStatus=143
# SIGTERM drains for server.drain_timeout_s ({drain:g} s); the main process ends its ranks itself.
KillMode=mixed
TimeoutStopSec={stop}

LimitNOFILE=65536
LimitMEMLOCK=infinity
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""
_SYSTEMD_SECRETS = """\
# {secrets} on every node: chmod 600, owned by root.
# openssl rand -hex 32 makes a secret; all nodes have the same.
MOE_SERVE_CLUSTER_SECRET=
# Keys of HTTP clients, separated by commas; needed unless server.host is a loopback address.
MOE_SERVE_SERVER_API_KEYS=
# Keys for the routes under /admin; empty: these routes are off.
MOE_SERVE_SERVER_ADMIN_KEYS=
"""


def shell_files(deployment: Deployment) -> Mapping[str, str]:
    """Returns {file name: text}."""
    coordinator = deployment.fixed_coordinator("shell")
    rank = "@NODE@"
    arguments = deployment.command.arguments(
        node_rank=rank, num_nodes=deployment.num_nodes, coordinator=coordinator
    )
    command = " ".join('"$1"' if word == rank else shlex.quote(word) for word in arguments)
    exports = [
        f"export {name}={shlex.quote(value)}\n" for name, value in deployment.variables.items()
    ]
    text = _SCRIPT.format(
        name=deployment.name,
        num_nodes=deployment.num_nodes,
        last=deployment.num_nodes - 1,
        host=coordinator.host,
        http_port=deployment.http_port,
        check="" if deployment.command.secret_file else _CHECK,
        exports="".join(exports),
        command=f"moe-serve {command}",
    )
    return {f"{deployment.name}.sh": text}


def slurm_files(deployment: Deployment) -> Mapping[str, str]:
    """Returns {file name: text}."""
    gpus = deployment.num_devices
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in deployment.variables.items()
    ]
    text = _SBATCH.format(
        name=deployment.name,
        num_nodes=deployment.num_nodes,
        http_port=deployment.http_port,
        stop=deployment.stop_timeout_s,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        exports="".join(f"{line}\n" for line in exports),
        command=shlex.join(("moe-serve", *deployment.command.arguments())),
    )
    return {f"{deployment.name}.sbatch": text}


def systemd_files(deployment: Deployment) -> Mapping[str, str]:
    """Returns {file name: text}."""
    coordinator = deployment.fixed_coordinator("systemd")
    secrets = f"/etc/moe-serve/{deployment.name}.env"
    variables = "".join(
        f"Environment={systemd_quote(f'{name}={value}')}\n"
        for name, value in deployment.variables.items()
    )
    files = {f"{deployment.name}.env.example": _SYSTEMD_SECRETS.format(secrets=secrets)}
    for node in range(deployment.num_nodes):
        arguments = deployment.command.arguments(
            node_rank=node, num_nodes=deployment.num_nodes, coordinator=coordinator
        )
        command = ("/usr/bin/env", "moe-serve", *arguments)
        files[f"{deployment.name}-{node}.service"] = _SYSTEMD_UNIT.format(
            name=deployment.name,
            node=node,
            num_nodes=deployment.num_nodes,
            secrets=secrets,
            variables=variables,
            drain=deployment.drain_timeout_s,
            stop=deployment.stop_timeout_s,
            command=" ".join(systemd_quote(word).replace("$", "$$") for word in command),
        )
    return files


def systemd_quote(word: str) -> str:
    """Quotes a word of a systemd setting: % starts a specifier, and $ a variable in ExecStart
    alone."""
    assert "\n" not in word, f"a line break in {word!r}"
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    is_plain = bool(word) and not set(word) & set(" \t\"'\\;")
    return escaped if is_plain else f'"{escaped}"'
