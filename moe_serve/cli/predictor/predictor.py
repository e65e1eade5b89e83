"""`moe-serve predictor`: trains and evaluates predictors of the routing."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moe_serve.cli.console import check_output, check_output_folder
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = ("request", "next-layer", "pre-attention")

predictor = typer.Typer(
    name="predictor",
    help="Train and evaluate predictors of the experts that tokens will choose.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option(
        help="Folder of a checkpoint in Hugging Face layout. Default: the demonstration model."
    ),
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text files (.txt or .txt.xz), or folders of them. A line <|endoftext|> separates "
        "two documents. May be given more than once."
    ),
]
Traces = Annotated[
    list[Path] | None,
    typer.Option(
        help="Traces with token ids to train on (instead of --texts). Only the request "
        "predictor can use them. May be given more than once."
    ),
]
MaxTokens = Annotated[
    int, typer.Option(min=64, help="Largest number of tokens of the texts to use.")
]
Threads = Annotated[int, typer.Option(min=1, help="Number of CPU threads.")]
Seed = Annotated[
    int, typer.Option(help="Seed of the random numbers; the same seed gives the same files.")
]


@predictor.command()
def train(
    kind: Annotated[str, typer.Argument(help=f"Predictor to train: {', '.join(KINDS)}, or all.")],
    out: Annotated[Path, typer.Option(help="Folder to write the predictors to.")],
    model: Model = None,
    texts: Texts = None,
    trace: Traces = None,
    max_tokens: MaxTokens = 400_000,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of epochs; training ends earlier if the loss on held-out texts "
            "stops falling. Default: 12 for request, 6 for the others.",
        ),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            help="Loss of the next-layer and pre-attention predictors: router (match the "
            "router's distribution) or ranked (match the ranks of the experts)."
        ),
    ] = "router",
    seed: Seed = 0,
    num_threads: Threads = 1,
) -> None:
    """Train predictors of a model's routing on texts or traces.

    Ctrl-C ends the training and keeps the best predictor so far. Each predictor comes with a card:
    a JSON file with its training data, settings and figures.
    """
    kinds = KINDS if kind == "all" else (kind,)
    if kind not in (*KINDS, "all"):
        raise ConfigError(f"kind cannot be {kind!r}: it is one of {', '.join(KINDS)}, all.")
    if loss not in ("router", "ranked"):
        raise ConfigError(f"loss cannot be {loss!r}: it is one of router, ranked.")
    if bool(texts) == bool(trace):
        raise ConfigError("give either --texts or --trace.")
    if trace and kinds != ("request",):
        raise ConfigError("a trace holds no hidden states: train the other kinds on --texts.")
    out = out.expanduser()
    check_output_folder(out)

    from moe_serve.cli.predictor.predictor_training import TrainOrder, train_predictors

    order = TrainOrder(
        kinds=kinds,
        out=out,
        model=model,
        texts=tuple(texts or ()),
        traces=tuple(trace or ()),
        max_tokens=max_tokens,
        epochs=epochs,
        loss="router" if loss == "router" else "ranked",
        seed=seed,
        num_threads=num_threads,
    )
    with progress_bar() as report:
        lines = train_predictors(order, report)
    typer.echo("\n".join(lines))


_FolderArgument = Annotated[
    Path | None,
    typer.Argument(help="Folder of predictors written by `moe-serve predictor train`."),
]
_BaselinesOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text files to fit simple predictors on, for comparison. May be given more than "
        "once. Default: no comparison."
    ),
]
_TraceOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Traces to evaluate predictions from a request's own history on (instead of a "
        "folder and --texts). May be given more than once."
    ),
]
_DropLabelOption = Annotated[
    str,
    typer.Option(
        help="Leave out the requests of the trace whose label ends with this text. Default: all "
        "requests are used."
    ),
]
_HorizonOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of upcoming tokens of a request whose experts are predicted.",
        show_default="as trained: 32",
    ),
]
_AsJsonOption = Annotated[
    Path | None, typer.Option("--json", help="JSON file for all figures, by layer and label.")
]


@predictor.command()
def evaluate(
    folder: _FolderArgument = None,
    model: Model = None,
    texts: Texts = None,
    baselines: _BaselinesOption = None,
    trace: _TraceOption = None,
    drop_label: _DropLabelOption = "",
    horizon: _HorizonOption = None,
    max_tokens: MaxTokens = 120_000,
    as_json: _AsJsonOption = None,
    seed: Seed = 0,
    num_threads: Threads = 1,
) -> None:
    """Evaluate predictors on texts that they were not trained on.

    The figures have 95% confidence intervals over the documents.
    """
    if trace and (folder or texts or baselines):
        raise ConfigError("give a folder and --texts, or --trace alone.")
    if not trace and (folder is None or not texts):
        raise ConfigError("give a folder of predictors and --texts, or --trace alone.")
    as_json = None if as_json is None else as_json.expanduser()
    check_output(as_json)

    from moe_serve.cli.predictor.predictor_verdicts import (
        JudgeOrder,
        judge_predictors,
        print_verdicts,
        write_verdicts,
    )

    order = JudgeOrder(
        folder=None if folder is None else folder.expanduser(),
        model=model,
        texts=tuple(texts or ()),
        baseline_texts=tuple(baselines or ()),
        traces=tuple(trace or ()),
        dropped_label=drop_label,
        horizon=horizon,
        max_tokens=max_tokens,
        seed=seed,
        num_threads=num_threads,
    )
    with progress_bar() as report:
        verdicts, data = judge_predictors(order, report)
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
