"""Where a cluster's placement comes from: a file, or runs of experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experts.placement.plan_file import write_placement
from experts.placement.problem.placement import Placement, contiguous
from moe_serve.cluster.members import cluster_model
from moe_serve.cluster.members.cluster_model import ClusterModel, placement_of
from moe_serve.config.cell_config import cell_shapes, config_of_cell
from moe_serve.config.cells import CellsConfig
from moe_serve.config.keys import check_engine_config
from moe_serve.config.sections import ClusterConfig, EngineConfig, ModelConfig, ReplicaPolicyName
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.errors import ConfigError
from moe_serve.model.spec import ModelSpec


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return ServedCheckpoint.read(ModelConfig()).spec


def sparse_layers(spec: ModelSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if layer.is_sparse]


def test_runs_without_a_file(spec: ModelSpec) -> None:
    placed = placement_of(ClusterConfig(expert_ranks=3), spec)
    assert placed == contiguous(sparse_layers(spec), spec.router.num_experts, 3)


def test_more_ranks_than_experts_are_refused(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"^33 expert ranks .* 32 experts .* E in the layout"):
        placement_of(ClusterConfig(expert_ranks=33), spec)


def test_as_the_file_says(spec: ModelSpec, tmp_path: Path) -> None:
    num_experts, path = spec.router.num_experts, tmp_path / "plan.json"
    experts = tuple((e % 2, 1 - e % 2) if e < 2 else (e % 2,) for e in range(num_experts))
    plan = Placement(
        num_ranks=2,
        num_experts=num_experts,
        ranks_of=dict.fromkeys(sparse_layers(spec), experts),
    )
    write_placement(plan, path)
    cluster = ClusterConfig(expert_ranks=2, placement=str(path))
    assert placement_of(cluster, spec) == plan
    with pytest.raises(ConfigError, match="is for 2 expert ranks and cluster.expert_ranks is 3"):
        placement_of(replace(cluster, expert_ranks=3), spec)
    path.unlink()
    with pytest.raises(ConfigError, match=r"cluster.placement: .*plan.json cannot be read"):
        placement_of(cluster, spec)


@pytest.mark.parametrize("choice", ["fewest-activated", "least-tokens", "auto"])
def test_copies_are_chosen_by_rows_where_one_side_routes_for_all(
    choice: ReplicaPolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert ranks on unlike machines may differ in a row's choice; other rows must not move."""
    monkeypatch.setattr(cluster_model, "is_broadcast_worth", lambda *_: True)
    one = ClusterConfig(attention_ranks=1, expert_ranks=1)
    assert ClusterModel.read(EngineConfig(cluster=one)).is_routing_on_experts
    chosen = replace(one, replica_choice=choice)
    assert not ClusterModel.read(EngineConfig(cluster=chosen)).is_routing_on_experts
    with pytest.raises(ConfigError, match=rf"replica_choice '{choice}'.*use 'round-robin', or"):
        ClusterModel.read(EngineConfig(cluster=replace(chosen, router="experts")))


def test_cells_of_several_numbers_of_expert_ranks_have_a_file_for_each() -> None:
    cells = CellsConfig(layout="1x(1A1E) 1x(1A2E)")
    of = EngineConfig(cells=cells, cluster=ClusterConfig(placement="plans/{expert_ranks}.json"))
    check_engine_config(of)
    shapes = enumerate(cell_shapes(of))
    placements = [config_of_cell(of, index, shape).cluster.placement for index, shape in shapes]
    assert placements == ["plans/1.json", "plans/2.json"]
    one_file = replace(of, cluster=ClusterConfig(placement="plan.json"))
    with pytest.raises(ConfigError, match=r"have 1, 2: .* such as plans/{expert_ranks}.json"):
        check_engine_config(one_file)
