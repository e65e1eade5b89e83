"""`moe-serve place`: which expert on which device, planned, compared, shown and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_serve.cli.place.many_files import ManyFilesCommand, ManyFilesGroup
from moe_serve.cli.place.place_options import (
    BalanceBy,
    BatchSize,
    BytesPerExpert,
    Cluster,
    Current,
    DenseLayers,
    Fill,
    Groups,
    JsonFile,
    Loads,
    MaxMoves,
    Model,
    NodesPerGroup,
    NumDevices,
    NumExperts,
    NumLayers,
    NumNodes,
    Objective,
    Pins,
    Replicas,
    Seconds,
    Solver,
    TopK,
    Traces,
    Windows,
)

if TYPE_CHECKING:
    from moe_serve.cli.place.place_order import Posed
    from moe_serve.cli.place.place_plan import PlanOrder

_EXIT_MISFIT = 1
_EXIT_INTERRUPTED = 130

place = typer.Typer(
    name="place",
    cls=ManyFilesGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@place.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    trace: Traces = None,
    load: Loads = None,
    windows: Windows = 1,
    num_experts: NumExperts = None,
    top_k: TopK = None,
    model: Model = None,
    num_layers: NumLayers = None,
    dense_layers: DenseLayers = None,
    bytes_per_expert: BytesPerExpert = None,
    cluster: Cluster = None,
    num_devices: NumDevices = None,
    num_nodes: NumNodes = None,
    replicas: Replicas = None,
    current: Current = None,
    max_moves: MaxMoves = None,
    pin: Pins = None,
    groups: Groups = None,
    max_nodes_per_group: NodesPerGroup = 1,
    fill: Fill = True,
    balance: BalanceBy = "tokens",
    batch_size: BatchSize = 64,
    objective: Annotated[
        Objective, typer.Option(help="Even loads; or few nodes of a token, from a trace.")
    ] = "balance",
    slack: Annotated[
        float, typer.Option(min=0.0, help="What fan-out may cost: of the largest load.")
    ] = 0.03,
    solver: Annotated[Solver, typer.Option(help="ilp proves more, and takes longer.")] = "search",
    seconds: Seconds = None,
    out: Annotated[
        Path | None, typer.Option(help="The plan, as `moe-serve serve --placement` reads it.")
    ] = None,
    export: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            metavar="FORMAT FILE", help="Also for sglang, vllm, trtllm, ascend, or as csv."
        ),
    ] = None,
    as_json: JsonFile = None,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="No held-out loads, no other numbers of replicas.")
    ] = False,
) -> None:
    """Plan which expert lies on which device, with replicas, from recorded loads.

    A proven bound stands beside every plan. Ctrl-C ends with the best so far.
    """
    if context.invoked_subcommand is not None:
        return
    order, posed = _read(context.params)
    from moe_serve.cli.place.place_plan import run_plan

    if not run_plan(order, posed):
        raise typer.Exit(_EXIT_INTERRUPTED)


def _read(parameters: Mapping[str, Any]) -> tuple[PlanOrder, Posed]:
    """Ctrl-C meanwhile leaves nothing to write."""
    try:
        from moe_serve.cli.place.place_plan import PlanOrder, pose

        order = PlanOrder.of(parameters)
        return order, pose(order)
    except KeyboardInterrupt:
        typer.echo("\ninterrupted while reading: nothing is planned yet, nothing written", err=True)
        raise typer.Exit(_EXIT_INTERRUPTED) from None


@place.command(cls=ManyFilesCommand)
def compare(
    context: typer.Context,
    trace: Traces = None,
    load: Loads = None,
    windows: Windows = 1,
    num_experts: NumExperts = None,
    top_k: TopK = None,
    model: Model = None,
    num_layers: NumLayers = None,
    dense_layers: DenseLayers = None,
    bytes_per_expert: BytesPerExpert = None,
    cluster: Cluster = None,
    num_devices: NumDevices = None,
    num_nodes: NumNodes = None,
    replicas: Replicas = None,
    groups: Groups = None,
    balance: BalanceBy = "tokens",
    batch_size: BatchSize = 64,
    plan: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="Judge these plans, in any format, too."),
    ] = None,
    seconds: Seconds = None,
    as_json: JsonFile = None,
) -> None:
    """All references beside the plan: the same figures, on the same loads."""
    from moe_serve.cli.place.place_compare import run_compare

    if not run_compare(context.params):
        raise typer.Exit(_EXIT_INTERRUPTED)


@place.command(cls=ManyFilesCommand)
def show(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A plan in any format.")],
    trace: Traces = None,
    load: Loads = None,
    windows: Windows = 1,
    num_experts: NumExperts = None,
    top_k: TopK = None,
    model: Model = None,
    num_layers: NumLayers = None,
    dense_layers: DenseLayers = None,
    bytes_per_expert: BytesPerExpert = None,
    cluster: Cluster = None,
    num_devices: NumDevices = None,
    num_nodes: NumNodes = None,
    before: Annotated[
        Path | None,
        typer.Option(help="The plan that it replaces.", show_default="equal runs of experts"),
    ] = None,
    batch_size: BatchSize = 64,
    heatmap: Annotated[
        Path | None, typer.Option(help="Draw devices and layers, before and after: *.png, *.html.")
    ] = None,
    as_json: JsonFile = None,
) -> None:
    """A plan under loads: each device, and each layer's hottest."""
    from moe_serve.cli.place.place_show import run_show

    run_show(context.params)


@place.command()
def check(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A plan in any format.")],
    model: Model = None,
    num_layers: NumLayers = None,
    dense_layers: DenseLayers = None,
    num_experts: NumExperts = None,
    bytes_per_expert: BytesPerExpert = None,
    cluster: Cluster = None,
    num_devices: NumDevices = None,
    num_nodes: NumNodes = None,
) -> None:
    """Whether a plan fits a model and a cluster; exit code 1 if not, with why, and 2 if the file is
    no plan."""
    from moe_serve.cli.place.place_check import run_check

    if not run_check(context.params):
        raise typer.Exit(_EXIT_MISFIT)
