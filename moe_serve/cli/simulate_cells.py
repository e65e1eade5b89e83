"""Simulates cells under one coordinator for `moe-serve simulate --cells`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import typer

from moe_serve.bench.scaling import ScaleRequest, scaled_run
from moe_serve.bench.simulated_run import SimulatedRun
from moe_serve.cli.options import option_values
from moe_serve.cli.simulate_options import (
    AutoscaleChoice,
    CellsOptions,
    SimulatedCluster,
    SimulateOptions,
)
from moe_serve.config.cells import CellsConfig, CellShape, parse_cells
from moe_serve.errors import ConfigError
from moe_serve.planning.calibration_file import read_calibration
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.coordinated.coordinated_cell import CellPlan, costed_plans, layout_of
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup, PageSpeed
from moe_serve.simulate.coordinated.scaled_cells import ScaleTimes
from moe_serve.simulate.costs.device import read_device
from moe_serve.simulate.costs.model_shape import read_model_shape
from moe_serve.simulate.layout import MAX_DEVICES, Layout
from moe_serve.simulate.simulated_cell import CellLimits
from moe_serve.simulate.simulation import CostedModel, calibrated, limits_of, on_device

_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCosts:
    """Gives the costs of a model in any layout, and of sending its KV pages over the links between
    devices.
    """

    of_layout: Callable[[Layout], CostedModel]
    page_speed: Callable[[int], PageSpeed]
    is_calibrated: bool = False


def costs_of(cluster: SimulatedCluster) -> ClusterCosts:
    """Reads the model and the device, or the calibration. Raises ConfigError."""
    if cluster.calibration is not None:
        given = cluster.model, cluster.device, cluster.routing, cluster.redundant_experts
        if given != (None,) * 4:
            raise ConfigError(
                "--calibration already describes the model, its experts and this machine: leave "
                "out --model, --device, --routing and --redundant-experts."
            )
        measured = read_calibration(cluster.calibration)
        if cluster.http and measured.http is None:
            raise ConfigError(
                f"the calibration {cluster.calibration} has no costs of HTTP: measure them with "
                "moe-serve calibrate --http, or leave --http out."
            )
        has_http = cluster.http is not False
        return ClusterCosts(
            of_layout=lambda layout: calibrated(measured, layout, has_http=has_http),
            page_speed=lambda _: PageSpeed.calibrated(measured),
            is_calibrated=True,
        )
    if cluster.http:
        raise ConfigError("--http belongs to --calibration FILE: no other costs have HTTP.")
    if cluster.model is None or cluster.device is None:
        raise ConfigError("give --model and --device, or --calibration.")
    if cluster.redundant_experts is not None and cluster.routing is None:
        raise ConfigError(
            "--redundant-experts needs the loads of the experts: give --routing FILE, or leave it "
            "out."
        )
    shape = read_model_shape(find_model(cluster.model), cluster.precision.value)
    device = read_device(find_device(cluster.device))
    return ClusterCosts(
        of_layout=lambda layout: on_device(shape, device, layout, cluster.routing),
        page_speed=lambda num_devices: PageSpeed.of_device(device, num_devices),
    )


def check_cells(options: SimulateOptions) -> None:
    """Refuses options that contradict --cells or that have no effect without it."""
    cells, cluster, usual = options.cells, options.cluster, SimulatedCluster()
    if cells.cells is None:
        _refuse_changed(cells, CellsOptions(), "belongs to --cells LAYOUT")
        return
    for name in ("devices", "layout", "tensor_shards"):
        if getattr(cluster, name) != getattr(usual, name):
            raise ConfigError(
                f"leave --{name.replace('_', '-')} out: --cells states the devices of every cell."
            )
    if cluster.redundant_experts is not None:
        raise ConfigError(
            "--redundant-experts applies to --layout only: leave it out, or leave --cells out."
        )
    if cells.own_machines and cluster.calibration is None:
        raise ConfigError(
            "--own-machines only applies to --calibration FILE: give it, or leave --own-machines "
            "out."
        )
    if options.of_capacity is not None and cells.autoscale is not None:
        raise ConfigError(
            "--load is a share of the capacity of a fixed number of cells: leave --autoscale out, "
            "or give --scale-time or --rate."
        )
    if cells.autoscale is None:
        usual_cells = CellsOptions()
        unscaled = replace(
            cells,
            cells=None,
            hand_over=usual_cells.hand_over,
            page_link=None,
            own_machines=usual_cells.own_machines,
        )
        _refuse_changed(unscaled, usual_cells, "belongs to --autoscale")
    elif cells.plan_out is not None and cells.autoscale is not AutoscaleChoice.PLANNED:
        raise ConfigError(
            "--plan-out only applies to --autoscale planned: choose that, or leave --plan-out out."
        )


def _refuse_changed(cells: CellsOptions, usual: CellsOptions, why: str) -> None:
    given = option_values(usual)
    for name, value in option_values(cells).items():
        if value != given[name]:
            raise ConfigError(f"--{name.replace('_', '-')} {why}.")


def first_layout(cells: CellsOptions) -> Layout:
    """Returns the layout of the first cell."""
    return layout_of(_shapes(cells)[0])


def with_cells(run: SimulatedRun, cells: CellsOptions, costs: ClusterCosts) -> SimulatedRun:
    """Returns a run on cells, with the limits that its settings give every engine. Raises
    ConfigError and BenchError."""
    shapes = _shapes(cells)

    def limits(model: CostedModel, layout: Layout) -> CellLimits:
        return limits_of(model, replace(run.settings, layout=layout))

    plans = tuple(costed_plans(shapes, costs.of_layout, limits))
    num_devices = sum(plan.layout.num_cell_devices for plan in plans)
    if num_devices > MAX_DEVICES:
        raise ConfigError(
            f"--cells needs {num_devices} devices, but at most {MAX_DEVICES} can be simulated."
        )
    speed = costs.page_speed(num_devices)
    if cells.page_link is not None:
        speed = replace(speed, device_bytes_per_s=cells.page_link * _GIGA)
    assert cells.cells is not None, "there are cells"
    setup = CellsSetup(
        name=cells.cells,
        plans=plans,
        config=CellsConfig(layout=cells.cells, hand_over=cells.hand_over.value),
        speed=speed,
        shares_machine=_shares_machine(plans, cells, costs),
    )
    run = replace(run, cells=setup)
    if cells.autoscale is None:
        return run
    request = ScaleRequest(
        policy=cells.autoscale.value,
        min_cells=cells.min_cells,
        times=ScaleTimes(every_s=cells.scale_every, start_s=cells.cell_start),
        target=cells.target_load,
        train_days=cells.train_days,
        plan_out=cells.plan_out,
    )
    return scaled_run(run, request, lambda text: typer.echo(f"{text} ...", err=True))


def _shares_machine(plans: Sequence[CellPlan], cells: CellsOptions, costs: ClusterCosts) -> bool:
    """Returns True if the cells share one machine. Raises ConfigError if the calibration did not
    measure how much of the machine they use.
    """
    if not costs.is_calibrated or cells.own_machines or len(plans) == 1:
        return False
    unknown = dict.fromkeys(p.shape for p in plans if p.model.machine_share is None)
    if unknown:
        names = ", ".join(shape.ranks for shape in unknown)
        can_measure = all(shape.expert_ranks for shape in unknown)
        measure = f'measure them with moe-serve calibrate --layouts "{names}", or '
        raise ConfigError(
            f"cells share this machine, and the calibration has no steps of cells of {names}: "
            f"{measure if can_measure else ''}give --own-machines if every cell has a machine of "
            "its own."
        )
    return True


def _shapes(cells: CellsOptions) -> Sequence[CellShape]:
    """Returns the cells. With --max-cells, each role has that many cells, which repeat the given
    shapes in turn.
    """
    assert cells.cells is not None, "there are cells"
    shapes = parse_cells(cells.cells, "--cells", is_simulated=True)
    if cells.max_cells is None:
        return shapes
    by_role = [[s for s in shapes if s.role == r] for r in dict.fromkeys(s.role for s in shapes)]
    return [some[i % len(some)] for some in by_role for i in range(cells.max_cells)]
