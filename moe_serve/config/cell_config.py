"""The configuration of each cell of a server."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.config.cells import CellsConfig, CellShape, parse_cells
from moe_serve.config.sections import EngineConfig

PLACEMENT_COUNT = "{expert_ranks}"  # in `cluster.placement`: the cell's number of expert ranks


def cell_shapes(config: EngineConfig) -> tuple[CellShape, ...]:
    """Returns the shape of each cell; empty without `cells.layout`. Raises ConfigError."""
    return () if config.cells.layout is None else parse_cells(config.cells.layout)


def has_ranks(config: EngineConfig) -> bool:
    """Returns True if attention and experts run in processes of their own."""
    return config.cluster.is_disaggregated or config.cells.layout is not None


def config_of_cell(config: EngineConfig, index: int, shape: CellShape) -> EngineConfig:
    """Returns the configuration of one cell, as if it were the only one."""
    timeline, port = config.pipeline.timeline, config.cluster.port
    placement = config.cluster.placement
    if timeline is not None:
        stem, dot, end = timeline.rpartition(".")
        timeline = f"{stem}-cell-{index}.{end}" if dot else f"{timeline}-cell-{index}"
    cluster = replace(
        config.cluster,
        attention_ranks=shape.attention_ranks,
        expert_ranks=shape.expert_ranks,
        attention_tp=shape.attention_tp,
        rebalance=config.cluster.rebalance if shape.expert_ranks > 1 else "off",
        port=port and port + index,
        placement=placement and placement.replace(PLACEMENT_COUNT, str(shape.expert_ranks)),
    )
    return replace(
        config,
        cluster=cluster,
        cells=replace(
            unscaled(config.cells),
            layout=None,
            prefill_nice=config.cells.prefill_nice if shape.role == "prefill" else 0,
        ),
        pipeline=replace(config.pipeline, timeline=timeline),
    )


def unscaled(cells: CellsConfig) -> CellsConfig:
    """Returns the settings of cells whose number does not follow the load."""
    return replace(cells, autoscale="static", max_cells=None, added=None, scale_plan=None)
