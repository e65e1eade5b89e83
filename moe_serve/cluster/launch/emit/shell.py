"""Writes a script to start by hand, with the node's number: `bash NAME.sh 0`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from moe_serve.cluster.launch.emit.deployment import Deployment

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
