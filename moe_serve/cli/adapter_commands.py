"""`moe-serve adapters`: makes adapters of fine-tunes, and merges them into their base model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moe_serve.cli.console import interrupted_by_terminate
from moe_serve.cli.options import REQUIRED, argument, option, with_options
from moe_serve.cli.predictor.predictor import progress_bar
from moe_serve.errors import ConfigError

if TYPE_CHECKING:  # The import is late because it loads torch, which is slow.
    from moe_serve.adapters.bitdelta.writer import BitDeltaSize

adapters = typer.Typer(no_args_is_help=True)

_SCALES = ("matrix", "row")
_PIECE_TOKENS, _TOKENS_OF_STEP, _HELD_OUT_TOKENS = 128, 512, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeBitDeltaOptions:
    """Options of `adapters make-bitdelta`."""

    base: str = argument(REQUIRED, help="Folder or name of the base model.")
    tuned: Path = argument(REQUIRED, help="Folder of the fine-tuned checkpoint.")
    out: Path = option(REQUIRED, help="Folder to write; it must not exist.")
    scales: str = option(
        "matrix",
        help=(
            "Number of scales: matrix (one for each matrix) or row (one for each row of a matrix)."
        ),
    )
    texts: list[Path] | None = option(
        None,
        help="Text file or folder to fit the scales to, so that the adapter predicts what the "
        "fine-tune predicts. May be given more than once.",
    )
    steps: int = option(
        100, min=1, help=("Number of steps of the fit. Each step uses 4 texts of 128 tokens.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertBitDeltaOptions:
    """Options of `adapters convert-bitdelta`."""

    file: Path = argument(
        REQUIRED, help=("File written by torch.save that contains masks and coefficients.")
    )
    base: str = argument(REQUIRED, help="Folder or name of the base model.")
    out: Path = option(REQUIRED, help="Folder to write; it must not exist.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Options of `adapters merge`."""

    base: str = argument(REQUIRED, help="Folder or name of the base model.")
    adapter: Path = argument(REQUIRED, help="Folder of a LoRA, an ESFT or a BitDelta adapter.")
    out: Path = option(REQUIRED, help="Folder to write; it must not exist.")


@adapters.callback()
def _group() -> None:
    """Make adapters of fine-tunes, and merge them."""


@adapters.command("make-bitdelta")
@with_options(MakeBitDeltaOptions)
def make(options: MakeBitDeltaOptions) -> None:
    """Store a fine-tune as one sign per weight, in a sixteenth of its bytes.

    Embeddings, norms, routers and the head are stored in full if they differ from the base model's.
    """
    if options.scales not in _SCALES:
        raise ConfigError(f"--scales must be one of {', '.join(_SCALES)}; got {options.scales!r}.")

    if options.texts:
        _distil(options, options.texts)
        return

    from moe_serve.adapters.bitdelta.make import make_bitdelta

    scales = "row" if options.scales == "row" else "matrix"
    _run(
        lambda progress: make_bitdelta(
            _folder(options.base),
            options.tuned.expanduser(),
            options.out.expanduser(),
            scales,  # type: ignore[arg-type]  # one of the two names
            progress,
        ),
        options.out,
    )


def _distil(options: MakeBitDeltaOptions, paths: list[Path]) -> None:
    """Makes an adapter whose scales are fitted to texts, and prints the effect of the fit."""
    from moe_serve.adapters.bitdelta.distil import DistilRecipe, DistilTexts
    from moe_serve.adapters.bitdelta.make_distilled import make_distilled
    from moe_serve.quantize.quantise_texts import read_texts
    from moe_serve.text.tokenizer import Tokenizer

    base = _folder(options.base)
    read = read_texts(
        [path.expanduser() for path in paths],
        Tokenizer.load(base),
        num_tokens=options.steps * _TOKENS_OF_STEP,
        num_held_out=_HELD_OUT_TOKENS,
        max_piece=_PIECE_TOKENS,
        seed=0,
        otherwise="leave them out",
    )
    texts = DistilTexts(
        fitted=[piece.tokens for piece in read.calibration],
        held_out=[piece.tokens for piece in read.held_out],
    )
    with interrupted_by_terminate(), progress_bar() as report:
        made = make_distilled(
            base,
            options.tuned.expanduser(),
            options.out.expanduser(),
            "row" if options.scales == "row" else "matrix",
            texts,
            DistilRecipe(num_steps=options.steps),
            lambda done, total: report(f"{done} of {total} steps", done / total),
        )
    before, after = made.distilled.before, made.distilled.after
    count = sum(len(tokens) for tokens in texts.held_out)
    typer.echo(
        f"{count:,} tokens of held-out texts: divergence from the fine-tune "
        f"{before.divergence:.4f} -> {after.divergence:.4f} nats a token, perplexity "
        f"{before.perplexity:.2f} -> {after.perplexity:.2f} (fine-tune "
        f"{made.distilled.tuned_perplexity:.2f})."
    )
    if not made.distilled.is_better:
        typer.echo(
            "The fit did not help on the held-out texts: the adapter keeps the mean magnitudes."
        )
    _tell(made.size, options.out)


@adapters.command("convert-bitdelta")
@with_options(ConvertBitDeltaOptions)
def convert(options: ConvertBitDeltaOptions) -> None:
    """Convert a published BitDelta file (.pt). The command runs no code from the file: it refuses a
    file that contains anything but tensors.
    """
    from moe_serve.adapters.bitdelta.convert import convert_bitdelta

    _run(
        lambda progress: convert_bitdelta(
            options.file.expanduser(),
            _folder(options.base),
            options.out.expanduser(),
            progress,
        ),
        options.out,
    )


@adapters.command("merge")
@with_options(MergeOptions)
def merge(options: MergeOptions) -> None:
    """Merge an adapter into its base model, and write a checkpoint for servers that serve
    only this fine-tune.
    """
    from moe_serve.adapters.merge import merge_adapter

    with interrupted_by_terminate(), progress_bar() as report:
        size = merge_adapter(
            _folder(options.base),
            options.adapter.expanduser(),
            options.out.expanduser(),
            lambda done, total: report(f"{done} of {total} tensors", done / total),
        )
    typer.echo(
        f"{options.out}: {size.num_changed} of {size.num_tensors} tensors are changed. Serve it "
        f"with: moe-serve serve {options.out}"
    )


def _folder(name: str) -> Path:
    from moe_serve.config.sections import ModelConfig
    from moe_serve.engine.opened_model import model_folder

    return model_folder(ModelConfig(path=name))


def _run(work: Callable[[Callable[[int, int], None]], BitDeltaSize], out: Path) -> None:
    with interrupted_by_terminate(), progress_bar() as report:
        size = work(lambda done, total: report(f"{done} of {total} tensors", done / total))
    _tell(size, out)


def _tell(size: BitDeltaSize, out: Path) -> None:
    ratio = size.matrix_bf16_bytes / max(1, size.matrix_bytes)
    typer.echo(
        f"{out}: {size.num_matrices} matrices in {size.matrix_bytes:,} bytes, 1/{ratio:.1f} of "
        f"bf16, and {size.num_full} tensors in full, {size.full_bytes:,} bytes. Serve it with "
        f"--enable-lora --lora-modules NAME={out}"
    )
