"""`moe-serve predictor`: trains and evaluates predictors of the routing."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moe_serve.cli.console import check_output, check_output_folder
from moe_serve.cli.options import with_options
from moe_serve.cli.predictor.predictor_options import KINDS, EvaluateOptions, TrainOptions
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

predictor = typer.Typer(
    name="predictor",
    help="Train and evaluate predictors of the experts that tokens will choose.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@predictor.command()
@with_options(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train predictors of a model's routing on texts or traces.

    Ctrl-C ends the training and keeps the best predictor so far. Each predictor comes with a card:
    a JSON file with its training data, settings and figures.
    """
    if options.kind not in (*KINDS, "all"):
        raise ConfigError(f"kind must be one of {', '.join(KINDS)}, all; got {options.kind!r}.")
    if options.loss not in ("router", "ranked"):
        raise ConfigError(f"loss must be one of router, ranked; got {options.loss!r}.")
    if bool(options.texts) == bool(options.trace):
        raise ConfigError("give either --texts or --trace.")
    if options.trace and options.kinds != ("request",):
        raise ConfigError(
            "a trace has no hidden states, so only a request predictor can be trained on it: "
            "train the other kinds on --texts."
        )
    out = options.out.expanduser()
    check_output_folder(out)

    from moe_serve.cli.predictor.predictor_training import train_predictors

    with progress_bar() as report:
        lines = train_predictors(replace(options, out=out), report)
    typer.echo("\n".join(lines))


@predictor.command()
@with_options(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Evaluate predictors on texts that they were not trained on.

    The figures have 95% confidence intervals over the documents.
    """
    if options.trace and (options.folder or options.texts or options.baselines):
        raise ConfigError("give a folder and --texts, or --trace alone.")
    if not options.trace and (options.folder is None or not options.texts):
        raise ConfigError("give a folder of predictors and --texts, or --trace alone.")
    as_json = None if options.as_json is None else options.as_json.expanduser()
    check_output(as_json)

    from moe_serve.cli.predictor.predictor_training import (
        judge_predictors,
        print_verdicts,
        write_verdicts,
    )

    with progress_bar() as report:
        verdicts, data = judge_predictors(options, report)
    print_verdicts(verdicts)
    if as_json is not None:
        write_verdicts(verdicts, data, as_json)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Shows progress on a terminal, and drops it elsewhere."""
    console = Console(highlight=False, stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        task = p.add_task("", total=1.0)
        yield lambda what, share: p.update(task, description=what, completed=share)
