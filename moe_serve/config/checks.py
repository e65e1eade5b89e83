"""Refuses settings that contradict each other although each is allowed by itself."""

from __future__ import annotations

from collections import Counter

from moe_serve.config.cell_config import PLACEMENT_COUNT, cell_shapes, has_ranks
from moe_serve.config.cells import CellsConfig, added_shapes, parse_cells
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
    check_autoscale(config.cells)
    if config.pipeline.timeline is not None and not has_ranks(config):
        raise ConfigError(
            f"pipeline.timeline is {config.pipeline.timeline}, but there are no ranks to record: "
            "set cluster.attention_ranks and cluster.expert_ranks too, or leave it out."
        )


def check_cluster(cluster: ClusterConfig) -> None:
    """Raises ConfigError if the numbers of ranks, or settings about ranks, contradict each
    other.
    """
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
    """Raises ConfigError for settings that do not apply to a server with several cells."""
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
    placement, counts_of_ranks = cluster.placement, {shape.expert_ranks for shape in shapes}
    if placement is not None and len(counts_of_ranks) > 1 and PLACEMENT_COUNT not in placement:
        counts = ", ".join(str(shape.expert_ranks) for shape in shapes)
        raise ConfigError(
            f"cluster.placement is {cluster.placement}, a file for one number of expert ranks, but "
            f"the cells of cells.layout have {counts}: give all cells the same number, or name a "
            f"file for each number, such as plans/{PLACEMENT_COUNT}.json."
        )


_OF_AUTOSCALE = ("max_cells", "added", "scale_plan")


def check_autoscale(cells: CellsConfig) -> None:
    """Raises ConfigError for settings of autoscaling that conflict or have no effect."""
    if not cells.is_scaled:
        for name in _OF_AUTOSCALE:
            if (value := getattr(cells, name)) is not None:
                raise ConfigError(
                    f"cells.{name} is {value}, but cells.autoscale is static and no cell is added "
                    "or removed by itself: set cells.autoscale to target or planned, or leave it "
                    "out."
                )
        return
    if cells.layout is None:
        raise ConfigError(
            f"cells.autoscale is {cells.autoscale}, but there are no cells: set cells.layout "
            "(--cells) to those with which the server begins, such as 1x(1A1E)."
        )
    if cells.max_cells is None:
        raise ConfigError(
            f"cells.autoscale is {cells.autoscale} and needs a limit: set cells.max_cells "
            "(--max-cells) to the most cells of each role that this deployment has room for."
        )
    if cells.min_cells > cells.max_cells:
        raise ConfigError(
            f"cells.min_cells is {cells.min_cells} and cells.max_cells is {cells.max_cells}: the "
            "first must not be larger."
        )
    if cells.autoscale == "planned" and cells.scale_plan is None:
        raise ConfigError(
            "cells.autoscale is planned and needs a plan: set cells.scale_plan to a file that "
            "moe-serve simulate --autoscale planned --plan-out FILE wrote."
        )
    if cells.autoscale != "planned" and cells.scale_plan is not None:
        raise ConfigError(
            f"cells.scale_plan is {cells.scale_plan}, but cells.autoscale is {cells.autoscale} and "
            "uses no plan: set it to planned, or leave the plan out."
        )
    counts = Counter(shape.role for shape in parse_cells(cells.layout or ""))
    for role in added_shapes(cells):
        if counts[role] > cells.max_cells:
            raise ConfigError(
                f"cells.layout has {counts[role]} cells of the role {role} and cells.max_cells is "
                f"{cells.max_cells}: give at most that many, or a higher limit."
            )
