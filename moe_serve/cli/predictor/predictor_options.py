"""The options of `moe-serve predictor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_serve.cli.options import REQUIRED, argument, option

KINDS = ("request", "next-layer", "pre-attention")


def _model() -> str | None:
    return option(
        None,
        help="Folder of a checkpoint in Hugging Face layout, or the name of a model on a hub: "
        "OWNER/NAME or OWNER/NAME@REVISION. Default: the demonstration model.",
    )


def _texts() -> list[Path] | None:
    return option(
        None,
        help="Text files (.txt or .txt.xz), or folders of them. A line <|endoftext|> separates "
        "two documents. May be given more than once.",
    )


def _seed(results: str) -> int:
    return option(0, help=f"Seed of the random numbers; the same seed gives the same {results}.")


def _num_threads() -> int:
    return option(1, min=1, help="Number of CPU threads.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of `predictor train`."""

    kind: str = argument(REQUIRED, help=f"Predictor to train: {', '.join(KINDS)}, or all.")
    out: Path = option(REQUIRED, help="Folder to write the predictors to.")
    model: str | None = _model()
    texts: list[Path] | None = _texts()
    trace: list[Path] | None = option(
        None,
        help="Traces with token ids to train on (instead of --texts). Only the request predictor "
        "can use them. May be given more than once.",
    )
    max_tokens: int = option(400_000, min=64, help="Largest number of tokens of the texts to use.")
    epochs: int | None = option(
        None,
        min=1,
        help="Largest number of epochs; training ends earlier if the loss on held-out texts stops "
        "falling. Default: 12 for request, 6 for the others.",
    )
    loss: str = option(
        "router",
        help="Loss of the next-layer and pre-attention predictors: router (match the "
        "router's distribution) or ranked (match the ranks of the experts).",
    )
    seed: int = _seed("files")
    num_threads: int = _num_threads()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of predictors to train."""
        return KINDS if self.kind == "all" else (self.kind,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """Options of `predictor evaluate`."""

    folder: Path | None = argument(
        None, help="Folder of predictors written by `moe-serve predictor train`."
    )
    model: str | None = _model()
    texts: list[Path] | None = _texts()
    baselines: list[Path] | None = option(
        None,
        help="Text files to fit simple predictors on, for comparison. May be given more than "
        "once. Default: no comparison.",
    )
    trace: list[Path] | None = option(
        None,
        help="Traces on which to evaluate predictions from each request's own earlier tokens "
        "(instead of a folder and --texts). May be given more than once.",
    )
    drop_label: str = option(
        "",
        help="Leave out the requests of the trace whose label ends with this text. Default: all "
        "requests are used.",
    )
    horizon: int | None = option(
        None,
        min=1,
        help="Number of upcoming tokens of a request whose experts are predicted.",
        show_default="as trained: 32",
    )
    max_tokens: int = option(120_000, min=64, help="Largest number of tokens of the texts to use.")
    as_json: Path | None = option(
        None, "--json", help="JSON file for all figures, by layer and label."
    )
    seed: int = _seed("figures")
    num_threads: int = _num_threads()
