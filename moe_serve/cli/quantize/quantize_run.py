"""Implements `moe-serve quantize`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from moe_serve.cli.quantize.quantize_options import QuantizeOptions
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import model_folder
from moe_serve.quantize.quantise_plan import INT8_ROWS, QuantiseRules
from moe_serve.quantize.quantise_report import report_files
from moe_serve.quantize.quantize_job import QuantiseJob, QuantiseOutcome, quantise
from moe_serve.quantize.rounded_matrix import MXFP4, Storage

_BITS = {"w4a16": 4, "w8a16": 8}


def _rules(options: QuantizeOptions) -> QuantiseRules:
    if options.scheme == "mxfp4":
        return QuantiseRules(experts=MXFP4, attention=None, keep=options.keep)
    kinds = {"keep": None, "w8": INT8_ROWS, "w4": Storage(4, options.group)}
    return QuantiseRules(
        experts=Storage(_BITS[options.scheme], options.group),
        attention=kinds[options.attention or "w8"],
        head=kinds[options.head],
        keep=options.keep,
    )


def run_quantize(
    options: QuantizeOptions, progress: Callable[[str, float], None]
) -> QuantiseOutcome:
    """Quantises a checkpoint as the options say. Raises ConfigError or CheckpointError."""
    num_threads = options.num_threads or os.cpu_count() or 1
    torch.set_num_threads(num_threads)
    job = QuantiseJob(
        folder=model_folder(ModelConfig(path=options.model)),
        out=Path(options.out).expanduser(),
        rules=_rules(options),
        is_gptq=options.method == "gptq",
        texts=tuple(options.texts or ()),
        held_out=tuple(options.held_out or ()),
        num_tokens=options.tokens,
        num_held_out=options.held_out_tokens,
        int8_budget=options.int8_budget,
        is_pooled=options.pooling,
        num_threads=num_threads,
        seed=options.seed,
    )
    return quantise(job, progress, report_files)
