"""Makes the autoscaler of a server from its configuration."""

from __future__ import annotations

from pathlib import Path

from moe_serve.clock import Clock
from moe_serve.cluster.autoscale.autoscaler import Autoscaler, ScaleLimits
from moe_serve.cluster.autoscale.live_scaler import LiveScaler, ScaleRules
from moe_serve.cluster.autoscale.policies import PlannedPolicy, TargetPolicy
from moe_serve.cluster.autoscale.scale_plan import read_plan
from moe_serve.cluster.autoscale.scale_view import AutoscalePolicy
from moe_serve.config.cells import CellsConfig, added_shapes
from moe_serve.config.sections import EngineConfig
from moe_serve.errors import ConfigError


def scale_policy(cells: CellsConfig) -> AutoscalePolicy | None:
    """Returns the policy of a server; None: its number of cells does not follow the load.
    Raises ConfigError."""
    if not cells.is_scaled:
        return None
    if cells.scale_plan is None:
        return TargetPolicy(cells.target_load)
    plan = read_plan(Path(cells.scale_plan))
    for role, shape in added_shapes(cells).items():
        planned = plan.roles.get(role)
        if planned is None or planned.ranks != shape.ranks:
            other = "none of this role" if planned is None else planned.ranks
            raise ConfigError(
                f"cells.scale_plan {cells.scale_plan} was made for other cells: the server adds "
                f"{shape}, and the plan has {other}."
            )
    return PlannedPolicy(plan.table, plan.means)


def make_scaler(
    config: EngineConfig, policy: AutoscalePolicy | None, start_s: float, clock: Clock
) -> LiveScaler | None:
    """Returns the scaler that applies a policy. `start_s` is the start time of the first cells."""
    cells = config.cells
    if policy is None or cells.max_cells is None:
        return None
    shapes = added_shapes(cells)
    limits = ScaleLimits(
        min_cells=cells.min_cells,
        max_cells=dict.fromkeys(shapes, cells.max_cells),
        calm_s=cells.calm_s,
        num_changes=cells.max_changes,
    )
    rules = ScaleRules(
        shapes=shapes,
        num_seats=config.scheduler.max_num_seqs,
        every_s=cells.scale_every_s,
        start_s=start_s,
    )
    return LiveScaler(Autoscaler(policy, limits), rules, clock)
