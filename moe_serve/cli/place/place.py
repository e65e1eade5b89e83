"""`moe-serve place`: plans, compares, shows and checks placements of experts on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from moe_serve.cli.options import with_options
from moe_serve.cli.place.place_options import (
    CheckOptions,
    CompareOptions,
    PlaceOptions,
    ShowOptions,
)

if TYPE_CHECKING:
    from experts.placement.problem_sources import ProblemWithSources

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

    # Depending on typer's version, a context is click's or typer's own copy of it.
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


@place.callback(invoke_without_command=True)
@with_options(PlaceOptions)
def plan(context: typer.Context, options: PlaceOptions) -> None:
    """Plan which devices hold each expert and its replicas, from recorded loads.

    Every plan is reported with a proven bound on the best possible one. Ctrl-C ends the search with
    the best plan found so far.
    """
    if context.invoked_subcommand is not None:
        return
    sources = _read(options)
    from moe_serve.cli.place.place_plan import run_plan

    if not run_plan(options, sources):
        raise typer.Exit(_EXIT_INTERRUPTED)


def _read(options: PlaceOptions) -> ProblemWithSources:
    """Reads the inputs. Ctrl-C during the reading ends the command, because no plan exists yet."""
    try:
        from moe_serve.cli.place.place_plan import check_plan_options, pose

        check_plan_options(options)
        return pose(options)
    except KeyboardInterrupt:
        typer.echo(
            "\ninterrupted while reading: no plan was made and nothing was written", err=True
        )
        raise typer.Exit(_EXIT_INTERRUPTED) from None


@place.command(cls=ManyFilesCommand)
@with_options(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Compare the planned placement with all reference methods on the same loads."""
    from moe_serve.cli.place.place_plan import run_compare

    if not run_compare(options):
        raise typer.Exit(_EXIT_INTERRUPTED)


@place.command(cls=ManyFilesCommand)
@with_options(ShowOptions)
def show(options: ShowOptions) -> None:
    """Show the load of each device and the hottest expert of each layer under a plan."""
    from moe_serve.cli.place.place_show import run_show

    run_show(options)


@place.command()
@with_options(CheckOptions)
def check(options: CheckOptions) -> None:
    """Check that a plan fits a model and a cluster.

    The exit code is 1 if it does not fit, with the reasons, and 2 if the file is not a plan.
    """
    from moe_serve.cli.place.place_show import run_check

    if not run_check(options):
        raise typer.Exit(_EXIT_MISFIT)
