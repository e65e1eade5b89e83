"""Implements `moe-serve predictor train` and `moe-serve predictor evaluate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from moe_serve.cli.console import wide_console
from moe_serve.cli.predictor.predictor_options import EvaluateOptions, TrainOptions
from moe_serve.errors import ConfigError
from moe_serve.learn.documents import TextPiece, cut_into_pieces, read_documents
from moe_serve.learn.predictor_data import Captured, PredictorModel
from moe_serve.learn.training import (
    LAYER_RECIPE,
    REQUEST_RECIPE,
    Trained,
    data_facts,
    judge_layers,
    judge_request,
    train_layer_predictors,
    train_request_predictor,
)
from moe_serve.text.tokenizer import Tokenizer
from routing_predictor.judge.evaluate import METRICS, PredictorVerdict
from routing_predictor.judge.rivals import judge_history
from routing_predictor.layers.train_layers import Loss
from routing_predictor.predictor_file import write_predictor
from routing_predictor.requests.texts import RoutedTexts, split_documents, texts_of
from routing_predictor.traces.card import PredictorKind
from routing_predictor.traces.fitting import Progress, Recipe
from routing_predictor.traces.trace import RoutingTrace
from routing_predictor.traces.trace_file import read_traces

Verdicts = dict[str, list[PredictorVerdict]]  # by the judged predictor

_UNSEEN_SHARE = 0.25  # of the requests of a trace


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
                "the trace was recorded with the model "
                f"{trace.model or trace.model_identity[:12]}, not with {model.name}: give "
                "the folder of that model with --model."
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
            f"the trace has {theirs[0]} experts in {theirs[1]} layers, top-{theirs[2]}, "
            f"but the model {model.name} has {ours[0]} in {ours[1]}, top-{ours[2]}, or "
            "numbers its layers differently: give the model that was traced with --model."
        )
    if trace.token_N is not None and trace.num_tokens:
        low, high = int(trace.token_N.min()), int(trace.token_N.max())
        if low < 0 or high >= model.spec.vocab_size:
            raise ConfigError(
                f"the trace has token ids from {low} to {high}, but the vocabulary of the "
                f"model {model.name} has {model.spec.vocab_size} tokens: give the model "
                "that was traced with --model."
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


def judge_predictors(
    options: EvaluateOptions, progress: Progress
) -> tuple[Verdicts, dict[str, Any]]:
    """Returns the verdicts, and facts about the data they were judged on."""
    torch.set_num_threads(options.num_threads)
    if options.trace:
        return _on_trace(options, progress)
    assert options.folder is not None, "a folder of predictors is needed to judge texts"
    folder = options.folder.expanduser()
    kinds = [kind for kind in PredictorKind if (folder / f"{kind.value}.json").is_file()]
    if not kinds:
        raise ConfigError(
            f"there is no predictor in {folder}: moe-serve predictor train makes one."
        )
    model = PredictorModel(options.model, options.num_threads)
    has_layers = kinds != [PredictorKind.REQUEST]
    pieces, captured = _run(model, options.texts or (), "valid", options, progress, has_layers)
    seen: RoutedTexts | None = None
    if options.baselines:
        _, others = _run(model, options.baselines, "train", options, progress, False)
        seen = texts_of(others.trace)
    found: Verdicts = {}
    for kind in kinds:
        progress(f"judging {kind.value}", 1.0)
        if kind is PredictorKind.REQUEST:
            unseen = texts_of(captured.trace)
            found[kind.value] = judge_request(
                folder,
                model,
                unseen,
                seen,
                horizon=options.horizon,
                seed=options.seed,
                progress=progress,
            )
        else:
            found[kind.value] = judge_layers(kind, folder, model, captured, seen)
    return found, data_facts(pieces)


def _run(
    model: PredictorModel,
    paths: Sequence[Path],
    split: str,
    options: EvaluateOptions,
    progress: Progress,
    has_hidden: bool,
) -> tuple[list[TextPiece], Captured]:
    tokenizer = Tokenizer.load(model.folder)
    pieces = cut_into_pieces(
        read_documents(paths, split), tokenizer, options.max_tokens, model.max_piece, options.seed
    )
    captured = model.capture(
        pieces,
        has_hidden=has_hidden,
        progress=lambda done, total: progress(f"{done} of {total} tokens run", done / total),
    )
    return pieces, captured


def _on_trace(options: EvaluateOptions, progress: Progress) -> tuple[Verdicts, dict[str, Any]]:
    """Judges predictions from history on a quarter of the requests, with the others as history."""
    trace = read_traces(options.trace or ())
    texts = texts_of(trace)
    end = options.drop_label
    kept = np.array([not end or not label.endswith(end) for label in texts.label])
    if not kept.any():
        raise ConfigError(f"every request's label ends with {end!r}, so no requests remain.")
    texts = texts.choose(np.flatnonzero(kept))
    seen, unseen = split_documents(texts, _UNSEEN_SHARE, options.seed)
    facts = {
        "requests": int(kept.sum()),
        "dropped": int((~kept).sum()),
        "judged": unseen.num_requests,
        "tokens": len(texts.expert_ids_TLK),
    }
    return {"history": judge_history(seen, unseen, trace, options.seed, progress)}, facts


def write_verdicts(verdicts: Verdicts, data: dict[str, Any], path: Path) -> None:
    document = {
        "data": data,
        "verdicts": {
            what: {verdict.name: verdict.as_json() for verdict in group}
            for what, group in verdicts.items()
        },
    }
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def print_verdicts(verdicts: Verdicts) -> None:
    console = wide_console()
    for what, group in verdicts.items():
        table = Table(what, *METRICS, "calibration", "load, 2/4/8 ranks", box=None)
        for verdict in group:
            error = verdict.calibration
            loads = "/".join(f"{100 * x.mean:.0f}" for x in verdict.rank_load_error.values())
            table.add_row(
                verdict.name,
                *(str(score.overall) for score in verdict.scores.values()),
                "" if error is None else f"{error.error:.3f}",
                f"{loads}%",
            )
        console.print(table)
        first = group[0]
        of_layer = first.scores["overlap"].of_layer.items()
        console.print("overlap by layer:", ", ".join(f"{k}: {v}" for k, v in of_layer))
