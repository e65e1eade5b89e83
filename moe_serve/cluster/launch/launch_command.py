"""The command that is started on every node, as an argument list.

It never holds a secret: secrets travel in the environment, on standard input, or as @FILE.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.cluster.launch.host_port import HostPort


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """`moe-serve launch ...` without the options that differ between nodes."""

    model: str | None
    attention_ranks: int | None  # None: as in the cluster file
    expert_ranks: int | None
    cluster_file: str | None = None  # a path that every node has
    secret_file: str | None = None  # the same
    serve_flags: tuple[str, ...] = ()  # ("--port", "9000"), as `serve` takes them

    def arguments(
        self,
        *,
        node_rank: int | str | None = None,
        num_nodes: int | None = None,
        coordinator: HostPort | str | None = None,
    ) -> tuple[str, ...]:
        """Returns the arguments after the program: `launch MODEL --attention-ranks 2 ...`."""
        options = {
            "--attention-ranks": self.attention_ranks,
            "--expert-ranks": self.expert_ranks,
            "--cluster": self.cluster_file,
            "--secret-file": self.secret_file,
            "--node-rank": node_rank,
            "--num-nodes": num_nodes,
            "--coordinator": coordinator,
        }
        given = [
            text
            for name, value in options.items()
            if value is not None
            for text in (name, str(value))
        ]
        model = [] if self.model is None else [self.model]
        return ("launch", *model, *given, *self.serve_flags)
