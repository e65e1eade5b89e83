"""The options of `moe-serve launch`, and the settings that every node derives from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.cli.launch.launch_options import EmitKind, Launcher, LaunchOptions
from moe_serve.cli.options import setting_flags, settings
from moe_serve.cli.serve.server_options import RankCounts, number_settings
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.launch.cluster_file import ClusterFile, read_cluster_file
from moe_serve.cluster.launch.emit.kubernetes import KubernetesKind
from moe_serve.cluster.launch.environment import NodeFlags, node_flags
from moe_serve.cluster.launch.launch_command import LaunchCommand
from moe_serve.cluster.launch.node_layout import NodeLayout, fill_nodes
from moe_serve.config.sources import LoadedConfig, load_config
from moe_serve.errors import ConfigError


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


def launch_request(options: LaunchOptions) -> LaunchRequest:
    """Builds the request from the options of `launch`. Raises ConfigError."""
    nodes, files, run = options.nodes, options.files, options.run
    path = nodes.cluster
    cluster = None if path is None else read_cluster_file(path)
    if any(not key.startswith("@") for key in options.api_key or ()):
        raise ConfigError(
            "launch takes keys from files only, as its command line is seen on every node: "
            "--api-key @FILE."
        )
    rest = replace(options, counts=RankCounts())  # the nodes' part sets these
    flags = setting_flags(rest)
    if run.config_file is not None:
        flags += ("--config", str(run.config_file.absolute()))
    if run.print_config:  # with --hostfile every host says what it would do
        flags += ("--print-config",)
    command = LaunchCommand(
        model=options.model,
        attention_ranks=options.counts.attention_ranks,
        expert_ranks=options.counts.expert_ranks,
        cluster_file=None if path is None else str(path.absolute()),
        secret_file=None if nodes.secret_file is None else str(nodes.secret_file.absolute()),
        serve_flags=flags,
    )
    return LaunchRequest(
        command=command,
        cluster=cluster,
        node=node_flags(nodes.node_rank, nodes.num_nodes, nodes.coordinator),
        settings=number_settings(settings(rest)),
        config_file=run.config_file,
        secret_file=nodes.secret_file,
        hostfile=options.start.hostfile,
        launcher=options.start.launcher,
        emit_kind=files.emit_kind,
        out=files.out,
        name=files.name or ("moe-serve" if cluster is None else cluster.name),
        kubernetes_kind=files.kubernetes_kind,
        image=files.image,
        model_claim=files.model_claim,
    )


def _settings_of(cluster: ClusterFile) -> dict[str, object]:
    layout = cluster.layout
    settings: dict[str, object] = {
        "cluster.attention_ranks": layout.num_ranks("attention"),
        "cluster.expert_ranks": layout.num_ranks("expert"),
    }
    if cluster.model is not None:
        settings["model.path"] = cluster.model
    return settings | cluster.settings
