"""Lends the links of a rank to a kernel call that runs several exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_kernels.interface.rank_kernels import RankKernels, StepKey
from moe_kernels.interface.rank_lanes import Lane, LaneStatus, StepEnd
from moe_serve.pipeline.frames.frame_header import LAYER_AT, MICRO_BATCH_AT, Exchange, key_of
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import Stage

Call = Callable[[Sequence[Lane]], StepEnd]


class NativeLanes:
    """The links to the peers of a rank, which all of its exchanges need."""

    def __init__(
        self, group: DataGroup, peers: Sequence[str], kernels: RankKernels, log: StageLog
    ) -> None:
        self._links = group.shared_links(peers)
        self._peers, self._kernels, self._log = tuple(peers), kernels, log

    @property
    def is_usable(self) -> bool:
        """True if all peers share memory with this rank, and the step's stages are not recorded one
        by one."""
        return self._links is not None and not self._log.is_on

    def run(
        self,
        call: Call,
        place: Callable[[], tuple[int, int]],
        layers: Sequence[int],
        num_batches: int,
        operation: Callable[[int], object],
    ) -> tuple[StepEnd, Exception | None]:
        """Runs a call with all links. Returns its end, and the error if a peer is lost.

        `place`: see `TurnStep.place`. `layers`: those of the call, for reports. `operation`
        describes an exchange by its number, for errors."""
        lanes = self._lend()
        if lanes is None:
            return StepEnd(LaneStatus.PYTHON, 0, -1, 0), None
        assert self._links is not None, "lanes belong to links"

        def at_layer() -> int:
            return layers[min(place()[0] // num_batches, len(layers) - 1)]

        def at_peer() -> str:
            rank = place()[1]
            return self._peers[rank] if 0 <= rank < len(self._peers) else ""

        self._log.enter(Stage.STEP, at_layer=at_layer, at_peer=at_peer)
        try:
            end = call(lanes)
        finally:
            self._log.waited_for(sum([link.take_back() for link in self._links]))
        if end.status in (LaneStatus.DONE, LaneStatus.PYTHON):
            return end, None
        return end, self._links[end.rank].lost(end, operation(end.done))

    def _lend(self) -> list[Lane] | None:
        lanes: list[Lane] = []
        for link in self._links or ():
            lane = link.lend(self._kernels.lane)
            if lane is None:
                for lent in (self._links or ())[: len(lanes)]:
                    lent.take_back()
                return None
            lanes.append(lane)
        return lanes


def step_key(exchange: Exchange) -> StepKey:
    """Returns the key of a step's exchanges."""
    return StepKey(key_of(exchange), LAYER_AT, MICRO_BATCH_AT)
