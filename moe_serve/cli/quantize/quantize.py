"""`moe-serve quantize`: stores a checkpoint's weights in few bits."""

from __future__ import annotations

import json

import typer

from moe_serve.cli.console import check_output, interrupted_by_terminate
from moe_serve.cli.options import with_options
from moe_serve.cli.predictor.predictor import progress_bar
from moe_serve.cli.quantize.quantize_options import QuantizeOptions


@with_options(QuantizeOptions)
def quantize(options: QuantizeOptions) -> None:
    """Quantise a checkpoint's experts, attention and head, layer by layer.

    Writes a folder in compressed-tensors format that moe-serve, transformers and vLLM load. With
    --texts, the result is compared with the original on held-out texts.
    """
    options.check()
    check_output(options.report)

    from moe_serve.cli.quantize.quantize_run import run_quantize

    with interrupted_by_terminate(), progress_bar() as progress:
        outcome = run_quantize(options, progress)

    from moe_serve.quantize.quantise_report import record, summary

    typer.echo("\n".join(summary(outcome)))
    if options.report is not None:
        text = json.dumps(record(outcome), indent=2) + "\n"
        options.report.write_text(text, encoding="utf-8")
