"""Makes further cells of a running server, and refuses unsuitable ones before they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from moe_serve.cluster.cell_start import CellShared, StarterOfCell, StartingCell
from moe_serve.cluster.cells.cell_changes import CellStart
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.config.cell_config import config_of_cell, unscaled
from moe_serve.config.cells import CellShape
from moe_serve.config.checks import check_cells
from moe_serve.config.sources import CLUSTER_SECRET_VARIABLE
from moe_serve.engine.drafting.drafting_maker import check_on_ranks
from moe_serve.engine.watch.cells_control import CellPlace, NodeStatus
from moe_serve.errors import CellsError, ConfigError


class LaunchNodes(Protocol):
    """The nodes of a launch, on which the ranks of cells run."""

    def check_room(self, num_ranks: int, node: str | None) -> None:
        """Raises CellsError unless there is room for so many more ranks."""
        ...

    def nodes(self) -> Sequence[NodeStatus]: ...


class LaterCells:
    """Implements CellMaker."""

    def __init__(
        self,
        shared: CellShared,
        model: ClusterModel,
        starter_of: StarterOfCell,
        nodes: LaunchNodes | None = None,
    ) -> None:
        """`model` is that of any cell. With `nodes` None, ranks run on this machine."""
        self._shared, self._model, self._starter_of, self._nodes = shared, model, starter_of, nodes

    def check(self, shapes: Sequence[CellShape], place: CellPlace) -> None:
        """See `CellMaker.check`."""
        config = self._shared.config
        layout = " ".join(f"1x{shape}" for shape in shapes)
        check_cells(replace(config, cells=unscaled(replace(config.cells, layout=layout))))
        self._check_shape(shapes[-1])
        if place.by_hand and place.node is not None:
            raise CellsError(
                f"node is {place.node!r} and by_hand is true, which contradict each other: "
                "operators who start ranks by hand choose their machine. Leave one of the two out."
            )
        if place.by_hand and self._shared.own_secret is None:
            raise CellsError(
                "Ranks that are started by hand need a secret that they share with the server: set "
                f"{CLUSTER_SECRET_VARIABLE} before the server starts, and where the ranks start."
            )
        if place.node is not None and self._nodes is None:
            raise CellsError(
                f"node is {place.node!r}, but all ranks of this server run on one machine: start "
                "the server by moe-serve launch, or leave the node out."
            )
        if self._nodes is not None and not place.by_hand:
            num_ranks = shapes[-1].attention_ranks + shapes[-1].expert_ranks
            self._nodes.check_room(num_ranks, place.node)

    def _check_shape(self, shape: CellShape) -> None:
        """Raises ConfigError for ranks over which the model cannot be spread."""
        try:
            of = config_of_cell(self._shared.config, 0, shape)
            check_on_ranks(of)
            self._model.for_cell(of, 0)
        except ConfigError as error:
            raise ConfigError(f"{shape} cannot be served: {error}") from None

    def begin(self, index: int, shape: CellShape, place: CellPlace) -> CellStart:
        """See `CellMaker.begin`."""
        config = config_of_cell(self._shared.config, index, shape)
        others = [start.shape for start in self._shared.starts.values()]
        model = self._model.for_cell(config, sum(shape.num_processes for shape in others))
        starter_of = None if place.by_hand else self._starter_of
        return StartingCell(
            self._shared, model, index, shape, starter_of, is_later=True, node=place.node
        )

    def nodes(self) -> Sequence[NodeStatus]:
        """See `CellsControl.nodes`."""
        return () if self._nodes is None else self._nodes.nodes()
