"""The options of `moe-serve launch`, and the settings that every node derives from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from moe_serve.cli.serve.setting_flags import KEYS, given_flags
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.launch.cluster_file import ClusterFile, read_cluster_file
from moe_serve.cluster.launch.emit.kubernetes import KubernetesKind
from moe_serve.cluster.launch.environment import NodeFlags, node_flags
from moe_serve.cluster.launch.launch_command import LaunchCommand
from moe_serve.cluster.launch.node_layout import NodeLayout, fill_nodes
from moe_serve.config.sources import LoadedConfig, load_config
from moe_serve.errors import ConfigError

EmitKind = Literal["slurm", "kubernetes", "systemd", "shell"]
Launcher = Literal["ssh", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The command line, checked as far as possible without knowing the node."""

    command: LaunchCommand
    cluster: ClusterFile | None
    node: NodeFlags
    settings: Mapping[str, object]  # by key, as the flags set them
    config_file: Path | None
    secret_file: Path | None
    hostfile: Path | None
    launcher: Launcher
    emit_kind: EmitKind | None
    out: Path | None
    name: str
    kubernetes_kind: KubernetesKind
    image: str | None
    model_claim: str | None

    def load(self, environ: Mapping[str, str]) -> LoadedConfig:
        """Loads the configuration from flags, environment, cluster file and YAML file. Raises
        ConfigError."""
        ranks = {
            "model.path": self.command.model,
            "cluster.attention_ranks": self.command.attention_ranks,
            "cluster.expert_ranks": self.command.expert_ranks,
        }
        stated = {path: value for path, value in ranks.items() if value is not None}
        loaded = load_config(
            flags={**stated, **self.settings},
            environ=environ,
            file=self.config_file,
            settings={} if self.cluster is None else _settings_of(self.cluster),
            settings_source=self.command.cluster_file or "",
        )
        counts = loaded.config.engine.cluster
        if counts.attention_ranks < 1 or counts.expert_ranks < 1:
            raise ConfigError(
                "a launch needs --attention-ranks and --expert-ranks, at least 1 each, "
                "or --cluster."
            )
        return loaded

    def layout(self, loaded: LoadedConfig, num_nodes: int) -> NodeLayout:
        counts = loaded.config.engine.cluster
        if self.cluster is None:
            return fill_nodes(counts.attention_ranks, counts.expert_ranks, num_nodes)
        layout = self.cluster.layout
        placed = (layout.num_ranks("attention"), layout.num_ranks("expert"))
        if placed != (counts.attention_ranks, counts.expert_ranks):
            raise ConfigError(
                f"{self.command.cluster_file} places {placed[0]} attention and {placed[1]} expert "
                f"ranks, but {counts.attention_ranks} and {counts.expert_ranks} are requested."
            )
        return layout

    def devices(self) -> dict[RankName, int]:
        """Returns the accelerator of each rank to which the cluster file gives one."""
        nodes = () if self.cluster is None else self.cluster.nodes
        return {
            rank: device
            for node in nodes
            for rank, device in zip(node.ranks, node.devices, strict=False)
        }


def launch_request(parameters: Mapping[str, Any]) -> LaunchRequest:
    """Builds the request from the parameters of `launch` by name. Raises ConfigError."""
    path: Path | None = parameters["cluster"]
    cluster = None if path is None else read_cluster_file(path)
    keys = list(parameters["api_key"] or ())
    if any(not key.startswith("@") for key in keys):
        raise ConfigError(
            "launch takes keys from files only, as its command line is seen on every node: "
            "--api-key @FILE."
        )
    given = given_flags(parameters, KEYS)
    secret_file: Path | None = parameters["secret_file"]
    config_file: Path | None = parameters["config_file"]
    command = LaunchCommand(
        model=parameters["model"],
        attention_ranks=parameters["attention_ranks"],
        expert_ranks=parameters["expert_ranks"],
        cluster_file=None if path is None else str(path.absolute()),
        secret_file=None if secret_file is None else str(secret_file.absolute()),
        # With --hostfile every host says what it would do.
        serve_flags=_as_flags(given, config_file)
        + (("--print-config",) if parameters["print_config"] else ()),
    )
    return LaunchRequest(
        command=command,
        cluster=cluster,
        node=node_flags(
            parameters["node_rank"], parameters["num_nodes"], parameters["coordinator"]
        ),
        settings={KEYS[name]: value for name, value in given.items()},
        config_file=config_file,
        secret_file=secret_file,
        hostfile=parameters["hostfile"],
        launcher=cast(Launcher, parameters["launcher"]),
        emit_kind=cast("EmitKind | None", parameters["emit_kind"]),
        out=parameters["out"],
        name=parameters["name"] or ("moe-serve" if cluster is None else cluster.name),
        kubernetes_kind=cast(KubernetesKind, parameters["kubernetes_kind"]),
        image=parameters["image"],
        model_claim=parameters["model_claim"],
    )


def _as_flags(given: Mapping[str, Any], config_file: Path | None) -> tuple[str, ...]:
    """Turns settings into flags: {"num_pages": 9} becomes ("--num-pages", "9")."""
    words: list[str] = []
    for name, value in given.items():
        for item in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", str(item)]
    return (*words, *(() if config_file is None else ("--config", str(config_file.absolute()))))


def _settings_of(cluster: ClusterFile) -> dict[str, object]:
    layout = cluster.layout
    settings: dict[str, object] = {
        "cluster.attention_ranks": layout.num_ranks("attention"),
        "cluster.expert_ranks": layout.num_ranks("expert"),
    }
    if cluster.model is not None:
        settings["model.path"] = cluster.model
    return settings | cluster.settings
