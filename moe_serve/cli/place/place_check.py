"""`moe-serve place check`: checks that a plan of any format fits a model and a cluster."""

from __future__ import annotations

import typer

from experts.placement.errors import NotAPlanError, PlacementError
from experts.placement.formats.engine_plan import PlanFacts
from experts.placement.plan_check import check_numbers, misfits, plan_notes, plan_words
from moe_serve.cli.place.place_inputs import check_devices, model_facts, read_devices
from moe_serve.cli.place.place_options import CheckOptions
from moe_serve.cli.place.plan_files import read_plan

_NUM_SHOWN = 8


def run_check(options: CheckOptions) -> bool:
    """Prints a summary of the plan and every misfit; returns whether it fits. Raises ConfigError if
    a file cannot be read, NotAPlanError if it is not a plan."""
    path = options.file
    check_devices(options.devices, is_needed=False)
    cluster, model = read_devices(options.devices), model_facts(options.model)
    num_devices = None if cluster is None else len(cluster.entries)
    known = PlanFacts.of_model(model, num_devices, options.num_experts)
    try:
        plan = read_plan(path, known)
        check_numbers(plan.placement, known)
    except NotAPlanError:
        raise
    except PlacementError as error:
        typer.echo(f"does not fit: {error}")
        return False
    faults = misfits(plan, cluster, model)
    for fault in faults[:_NUM_SHOWN]:
        typer.echo(f"does not fit: {path}: {fault}")
    if len(faults) > _NUM_SHOWN:
        typer.echo(f"and {len(faults) - _NUM_SHOWN} more like these")
    if not faults:
        typer.echo(f"fits: {path}: {plan_words(plan, model)}")
        for note in plan_notes(plan, cluster, model, known.num_experts):
            typer.echo(f"note: {note}")
    return not faults
