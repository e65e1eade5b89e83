"""Implements `moe-serve predictor train`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_serve.cli.predictor.predictor_options import TrainOptions
from moe_serve.errors import ConfigError
from moe_serve.learn.documents import cut_into_pieces, read_documents
from moe_serve.learn.predictor_data import Captured, PredictorModel
from moe_serve.learn.training import (
    LAYER_RECIPE,
    REQUEST_RECIPE,
    Trained,
    data_facts,
    train_layer_predictors,
    train_request_predictor,
)
from moe_serve.text.tokenizer import Tokenizer
from routing_predictor.layers.train_layers import Loss
from routing_predictor.predictor_file import write_predictor
from routing_predictor.traces.card import PredictorKind
from routing_predictor.traces.fitting import Progress, Recipe
from routing_predictor.traces.trace import RoutingTrace
from routing_predictor.traces.trace_file import read_traces


def train_predictors(options: TrainOptions, progress: Progress) -> list[str]:
    """Trains and writes the predictors; returns lines that report them."""
    torch.set_num_threads(options.num_threads)
    model = PredictorModel(options.model, options.num_threads)
    captured, data = _collect(options, model, progress)
    return [
        _written(options, _train(options, PredictorKind(kind), model, captured, data, progress))
        for kind in options.kinds
    ]


def _collect(
    options: TrainOptions, model: PredictorModel, progress: Progress
) -> tuple[Captured, dict[str, Any]]:
    if options.trace:
        trace = read_traces(options.trace)
        if trace.model_identity and trace.model_identity != model.identity:
            raise ConfigError(
                f"the trace is of the model {trace.model or trace.model_identity[:12]}, "
                f"not of {model.name}: give its folder with --model."
            )
        _check_trace(trace, model)
        facts = {"trace tokens": trace.num_tokens, "requests": len(trace.request_ids)}
        return Captured(trace=trace, before_attention_LTD=None, before_router_LTD=None), facts
    documents = read_documents(options.texts or (), "train")
    tokenizer = Tokenizer.load(model.folder)
    pieces = cut_into_pieces(
        documents, tokenizer, options.max_tokens, model.max_piece, options.seed
    )
    captured = model.capture(
        pieces,
        has_hidden=options.kinds != ("request",),
        progress=lambda done, total: progress(f"{done} of {total} tokens run", done / total),
    )
    return captured, data_facts(pieces)


def _check_trace(trace: RoutingTrace, model: PredictorModel) -> None:
    """Checks a trace against the model by its numbers, as an imported trace does not name its
    model. Raises ConfigError."""
    theirs = trace.num_experts, len(trace.layers), trace.top_k
    router = model.spec.router
    ours = router.num_experts, len(model.layers), router.top_k
    if theirs != ours or trace.layers != model.layers:
        raise ConfigError(
            f"the trace is of {theirs[0]} experts in {theirs[1]} layers, top-{theirs[2]}, and the "
            f"model {model.name} has {ours[0]} in {ours[1]}, top-{ours[2]}, or numbers its layers "
            "otherwise: give the model that was traced with --model."
        )
    if trace.token_N is not None and trace.num_tokens:
        low, high = int(trace.token_N.min()), int(trace.token_N.max())
        if low < 0 or high >= model.spec.vocab_size:
            raise ConfigError(
                f"the trace has token ids from {low} to {high}, and the vocabulary of the model "
                f"{model.name} has {model.spec.vocab_size}: give the model that was traced with "
                "--model."
            )


def _train(
    options: TrainOptions,
    kind: PredictorKind,
    model: PredictorModel,
    captured: Captured,
    data: dict[str, Any],
    progress: Progress,
) -> Trained:
    def adapted(recipe: Recipe) -> Recipe:
        return replace(recipe, seed=options.seed, epochs=options.epochs or recipe.epochs)

    if kind is PredictorKind.REQUEST:
        return train_request_predictor(
            model, captured.trace, data, adapted(REQUEST_RECIPE), progress
        )
    recipe = adapted(LAYER_RECIPE)
    loss: Loss = "router" if options.loss == "router" else "ranked"
    return train_layer_predictors(kind, model, captured, data, recipe, progress, loss)


def _written(options: TrainOptions, trained: Trained) -> str:
    write_predictor(options.out, trained.card, trained.module)
    size = (options.out / f"{trained.card.kind}.safetensors").stat().st_size
    losses = ", ".join(f"{loss:.4f}" for loss in trained.card.metrics["held-out loss"])
    end = " (interrupted: the best so far)" if trained.is_interrupted else ""
    return f"{trained.card.kind}: {size / 1e6:.2f} MB in {options.out}, held-out loss {losses}{end}"
