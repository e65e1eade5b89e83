"""Refuses settings that contradict each other, though each is allowed by itself."""

from __future__ import annotations

from moe_serve.config.cell_config import cell_shapes, has_ranks
from moe_serve.config.sections import ClusterConfig, EngineConfig
from moe_serve.errors import ConfigError


def check_together(config: EngineConfig) -> None:
    """Raises ConfigError with the two settings that do not go together."""
    if config.cache.num_pages is not None and config.cache.memory_bytes is not None:
        raise ConfigError(
            f"cache.num_pages ({config.cache.num_pages}) and cache.memory_bytes "
            f"({config.cache.memory_bytes}) both set the size of the KV cache; set one of them."
        )
    if config.cells.layout is None:
        check_cluster(config.cluster)
    else:
        check_cells(config)
    if config.pipeline.timeline is not None and not has_ranks(config):
        raise ConfigError(
            f"pipeline.timeline is {config.pipeline.timeline}, but there are no ranks to record: "
            "set cluster.attention_ranks and cluster.expert_ranks too, or leave it out."
        )


def check_cluster(cluster: ClusterConfig) -> None:
    """Raises ConfigError if the numbers of ranks, or what they are for, contradict each other."""
    if (cluster.attention_ranks > 0) != (cluster.expert_ranks > 0):
        raise ConfigError(
            f"cluster.attention_ranks ({cluster.attention_ranks}) and cluster.expert_ranks "
            f"({cluster.expert_ranks}) go together: both 0 for one process, or at least 1 each."
        )
    if cluster.attention_tp > 1 and not cluster.attention_ranks:
        raise ConfigError(
            f"cluster.attention_tp is {cluster.attention_tp}, but there are no attention ranks to "
            "split: set cluster.attention_ranks and cluster.expert_ranks too."
        )
    if cluster.placement is not None and not cluster.expert_ranks:
        raise ConfigError(
            f"cluster.placement is {cluster.placement}, but one process has all experts: set "
            "cluster.attention_ranks and cluster.expert_ranks too, or leave it out."
        )
    if cluster.rebalance != "off" and cluster.expert_ranks < 2:
        raise ConfigError(
            f"cluster.rebalance is {cluster.rebalance!r}, but {cluster.expert_ranks} expert ranks "
            "have nothing to balance: set cluster.expert_ranks to 2 or more, or leave it off."
        )


def check_cells(config: EngineConfig) -> None:
    """Raises ConfigError for settings that a server of several cells does not take."""
    cluster, layout = config.cluster, config.cells.layout
    for key, default in (("attention_ranks", 0), ("expert_ranks", 0), ("attention_tp", 1)):
        if getattr(cluster, key) != default:
            raise ConfigError(
                f"cells.layout is {layout!r} and cluster.{key} is {getattr(cluster, key)}, but "
                "both set the ranks: leave one of them out."
            )
    shapes = cell_shapes(config)
    if cluster.rebalance != "off" and all(shape.expert_ranks < 2 for shape in shapes):
        raise ConfigError(
            f"cluster.rebalance is {cluster.rebalance!r}, but the cells of cells.layout {layout!r} "
            "have one expert rank each and nothing to balance: give one 2 or more, or leave it off."
        )
    if cluster.placement is not None and len({shape.expert_ranks for shape in shapes}) > 1:
        counts = ", ".join(str(shape.expert_ranks) for shape in shapes)
        raise ConfigError(
            f"cluster.placement is {cluster.placement}, a file for one number of expert ranks, but "
            f"the cells of cells.layout have {counts}: give all cells the same number, or leave it "
            "out."
        )
