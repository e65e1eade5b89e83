"""Writes one systemd service for each node, and an example of the file with its secrets."""

from __future__ import annotations

from collections.abc import Mapping

from moe_serve.cluster.launch.emit.deployment import Deployment

_UNIT = """\
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
# Built kernels stay in /var/cache/moe-serve.
CacheDirectory=moe-serve
CacheDirectoryMode=0700
Environment=XDG_CACHE_HOME=%C HOME=%C/moe-serve TRITON_CACHE_DIR=%C/moe-serve/triton

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
_EXAMPLE = """\
# {secrets} on every node: chmod 600, owned by root.
# openssl rand -hex 32 makes a secret; all nodes have the same.
MOE_SERVE_CLUSTER_SECRET=
# Keys of HTTP clients, separated by commas; needed unless server.host is a loopback address.
MOE_SERVE_SERVER_API_KEYS=
# Keys for the routes under /admin; empty: these routes are off.
MOE_SERVE_SERVER_ADMIN_KEYS=
"""


def systemd_files(deployment: Deployment) -> Mapping[str, str]:
    """Returns {file name: text}."""
    coordinator = deployment.fixed_coordinator("systemd")
    secrets = f"/etc/moe-serve/{deployment.name}.env"
    variables = "".join(
        f"Environment={quote(f'{name}={value}')}\n" for name, value in deployment.variables.items()
    )
    files = {f"{deployment.name}.env.example": _EXAMPLE.format(secrets=secrets)}
    for node in range(deployment.num_nodes):
        arguments = deployment.command.arguments(
            node_rank=node, num_nodes=deployment.num_nodes, coordinator=coordinator
        )
        command = ("/usr/bin/env", "moe-serve", *arguments)
        files[f"{deployment.name}-{node}.service"] = _UNIT.format(
            name=deployment.name,
            node=node,
            num_nodes=deployment.num_nodes,
            secrets=secrets,
            variables=variables,
            drain=deployment.drain_timeout_s,
            stop=deployment.stop_timeout_s,
            command=" ".join(quote(word).replace("$", "$$") for word in command),
        )
    return files


def quote(word: str) -> str:
    """Quotes a word of a systemd setting: % starts a specifier, and $ a variable in ExecStart
    alone."""
    assert "\n" not in word, f"a line break in {word!r}"
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    is_plain = bool(word) and not set(word) & set(" \t\"'\\;")
    return escaped if is_plain else f'"{escaped}"'
