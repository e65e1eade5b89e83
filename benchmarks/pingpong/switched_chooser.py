"""A chooser that the benchmark switches between fixed cuts and `auto`, within one engine."""

from __future__ import annotations

from collections.abc import Sequence

from moe_serve.cluster.control.epoch import sparse_layers
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.config.sections import EngineConfig
from moe_serve.pipeline.costs.batch_load import BatchLoad
from moe_serve.pipeline.costs.cost_model import Ranks
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES, Choice, MicroBatchChooser
from moe_serve.pipeline.costs.online_costs import OnlineCosts, StepTiming


class SwitchedChooser:
    """`cuts`: micro-batches of the coming steps; None: `auto`, which learns from its own steps."""

    def __init__(self) -> None:
        self._auto: MicroBatchChooser | None = None
        self._fixed = [Choice(m, (), "predicted best") for m in range(1, MAX_MICRO_BATCHES + 1)]
        self.cuts: int | None = None
        self.chosen: list[int] = []  # by `auto`

    def choose(self, loads: Sequence[BatchLoad]) -> Choice:
        if self.cuts is None:
            assert self._auto is not None, "no cluster was built with this chooser"
            choice = self._auto.choose(loads)
            self.chosen.append(choice.num_micro_batches)
            return choice
        most = max(load.num_sequences for load in loads)
        return self._fixed[min(self.cuts, most) - 1]

    def observe(self, loads: Sequence[BatchLoad], choice: Choice, timing: StepTiming) -> None:
        if self._auto is not None and all(choice is not each for each in self._fixed):
            self._auto.observe(loads, choice, timing)

    def watch(self, config: EngineConfig, model: ClusterModel) -> PoolWatch:
        """For `build_cluster`: starts to learn anew."""
        ranks = Ranks(num_attention=1, num_experts=1)
        self._auto = MicroBatchChooser(OnlineCosts(len(sparse_layers(model.spec))), ranks)
        return PoolWatch(self, MAX_MICRO_BATCHES, None)
