"""`moe-serve place`: plans, compares, shows and checks placements of experts on devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

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
    from experts.placement.sources import Posed
    from moe_serve.cli.place.place_plan import PlanOrder


# A context is click's, or typer's own copy of it, by typer's version.
_FLAGS = ("--trace", "--load", "--plan")


def spread(arguments: Sequence[str]) -> list[str]:
    """Repeats the flag for each file: ["--load", "a", "b", "--out", "c"] becomes ["--load", "a",
    "--load", "b", "--out", "c"]."""
    found, flag = list[str](), ""
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in _FLAGS else ""
        elif flag and found[-1] != flag:
            found.append(flag)
        found.append(argument)
    return found


class ManyFilesCommand(TyperCommand):
    """A command with options that take several files."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


class ManyFilesGroup(TyperGroup):
    """A command group whose own options take several files. Its subcommands are named before any
    option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_own = not args or args[0].startswith("-")
        return super().parse_args(ctx, spread(args) if is_own else args)


_EXIT_MISFIT = 1
_EXIT_INTERRUPTED = 130

place = typer.Typer(
    name="place",
    cls=ManyFilesGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        help="Goal: balance (even loads), or fan-out (a token's experts on few nodes; "
        "needs --trace)."
    ),
]
_SlackOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Increase of the largest load that --objective fan-out may cost, as a share: "
        "0.03 is 3%.",
    ),
]
_SolverOption = Annotated[
    Solver,
    typer.Option(
        help="Method: search; ilp (tighter bounds, takes longer); or a reference, linear, "
        "round-robin, eplb or eplb-hierarchical (references balance slots only)."
    ),
]
_OutOption = Annotated[
    Path | None,
    typer.Option(
        help="JSON file for the plan; `moe-serve serve --placement` reads it. Default: the"
        " plan is not written."
    ),
]
_ExportOption = Annotated[
    tuple[str, Path] | None,
    typer.Option(
        metavar="FORMAT FILE",
        help="Also write the plan in another format: sglang, vllm, trtllm, ascend or csv.",
    ),
]
_IsQuickOption = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Skip the evaluation on held-out scenarios, the plans with other numbers of "
        "replicas and the plan of EPLB.",
    ),
]


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
    objective: _ObjectiveOption = "balance",
    slack: _SlackOption = 0.03,
    solver: _SolverOption = "search",
    seconds: Seconds = None,
    out: _OutOption = None,
    export: _ExportOption = None,
    as_json: JsonFile = None,
    is_quick: _IsQuickOption = False,
) -> None:
    """Plan which devices hold each expert and its replicas, from recorded loads.

    Every plan is reported with a proven bound on the best possible one. Ctrl-C ends the search with
    the best plan found so far.
    """
    if context.invoked_subcommand is not None:
        return
    order, posed = _read(context.params)
    from moe_serve.cli.place.place_plan import run_plan

    if not run_plan(order, posed):
        raise typer.Exit(_EXIT_INTERRUPTED)


def _read(parameters: Mapping[str, Any]) -> tuple[PlanOrder, Posed]:
    """Reads the inputs. Ctrl-C during that ends the command, as there is not a plan to write."""
    try:
        from moe_serve.cli.place.place_plan import PlanOrder, pose

        order = PlanOrder.of(parameters)
        return order, pose(order)
    except KeyboardInterrupt:
        typer.echo(
            "\ninterrupted while reading: no plan was made and nothing was written", err=True
        )
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
        typer.Option(
            metavar="FILE...",
            help="Plans in any known format to include in the comparison. Several files may "
            "follow one flag.",
        ),
    ] = None,
    seconds: Seconds = None,
    as_json: JsonFile = None,
) -> None:
    """Compare the planned placement with all reference methods on the same loads."""
    from moe_serve.cli.place.place_compare import run_compare

    if not run_compare(context.params):
        raise typer.Exit(_EXIT_INTERRUPTED)


@place.command(cls=ManyFilesCommand)
def show(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Plan in any known format.")],
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
        typer.Option(help="Plan that it replaces.", show_default="equal runs of experts"),
    ] = None,
    batch_size: BatchSize = 64,
    heatmap: Annotated[
        Path | None,
        typer.Option(
            help="File *.png or *.html for a heat map of devices and layers, before and after."
        ),
    ] = None,
    as_json: JsonFile = None,
) -> None:
    """Show the load of each device and the hottest expert of each layer under a plan."""
    from moe_serve.cli.place.place_show import run_show

    run_show(context.params)


@place.command()
def check(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Plan in any known format.")],
    model: Model = None,
    num_layers: NumLayers = None,
    dense_layers: DenseLayers = None,
    num_experts: NumExperts = None,
    bytes_per_expert: BytesPerExpert = None,
    cluster: Cluster = None,
    num_devices: NumDevices = None,
    num_nodes: NumNodes = None,
) -> None:
    """Check that a plan fits a model and a cluster.

    The exit code is 1 if it does not fit, with the reasons, and 2 if the file is not a plan.
    """
    from moe_serve.cli.place.place_check import run_check

    if not run_check(context.params):
        raise typer.Exit(_EXIT_MISFIT)
