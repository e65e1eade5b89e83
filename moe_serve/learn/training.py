"""Trains a model's predictors from texts or traces, and evaluates them on other texts.

An evaluation shows them beside baselines that were fitted on further texts. N tokens, L layers with
routed experts, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_serve.learn.documents import TextPiece, hash_of
from moe_serve.learn.predictor_data import Captured, PredictorModel
from routing_predictor.judge.evaluate import PredictorVerdict, judge
from routing_predictor.judge.rivals import (
    cuts_to_judge,
    judged_history,
    judged_predictor,
    judged_previous_token,
    judged_regression,
    load_of,
    truth_of_tokens,
)
from routing_predictor.layers.router_residual import NUM_CONTEXT, RouterResidual, choice_probability
from routing_predictor.layers.train_layers import (
    LayerPredictors,
    LayerSource,
    Loss,
    layer_data,
    predicted_pairs,
    train_layer,
)
from routing_predictor.predictor_file import load_layer_predictors, load_request_predictor
from routing_predictor.requests.request_mlp import NUM_HIDDEN, PrefixPools
from routing_predictor.requests.texts import PIECE, RoutedTexts, check_two_documents, texts_of
from routing_predictor.requests.train_request import HORIZON, pooled, train_request
from routing_predictor.traces.card import PredictorCard, PredictorKind
from routing_predictor.traces.fitting import Progress, Recipe, TrainingCourse
from routing_predictor.traces.trace import RoutingTrace

REQUEST_RECIPE = Recipe(epochs=12, batch_size=256, learning_rate=1.5e-3, weight_decay=0.1)
LAYER_RECIPE = Recipe(epochs=6, batch_size=512, learning_rate=3e-3, weight_decay=0.01)
HIDDEN = {PredictorKind.NEXT_LAYER: 320, PredictorKind.PRE_ATTENTION: 256}
_HELD_OUT_EVERY = 20  # documents


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained predictor, ready to be written."""

    card: PredictorCard
    module: torch.nn.Module
    is_interrupted: bool


def data_facts(pieces: Sequence[TextPiece]) -> dict[str, Any]:
    """Returns the facts about the texts for the predictor's card."""
    by_label: dict[str, int] = {}
    for piece in pieces:
        by_label[piece.label] = by_label.get(piece.label, 0) + len(piece.tokens)
    return {
        "documents": len({piece.request_id.split(PIECE)[0] for piece in pieces}),
        "tokens": by_label,
        "sha256": hash_of(pieces),
    }


def train_request_predictor(
    model: PredictorModel,
    trace: RoutingTrace,
    data: Mapping[str, Any],
    recipe: Recipe,
    progress: Progress,
) -> Trained:
    """Trains a request predictor. Raises RoutingError for a trace that cannot be learnt from."""
    pools = PrefixPools(model.embedding())
    mlp, fit = train_request(texts_of(trace), lambda cuts: pooled(cuts, pools), recipe, progress)
    sizes = {"hidden": NUM_HIDDEN, "windows": list(pools.windows), "horizon": HORIZON}
    card = _card(PredictorKind.REQUEST, model, trace, sizes, data, [fit], recipe)
    return Trained(card, mlp, fit.is_interrupted)


def train_layer_predictors(
    kind: PredictorKind,
    model: PredictorModel,
    captured: Captured,
    data: Mapping[str, Any],
    recipe: Recipe,
    progress: Progress,
    loss: Loss = "router",
) -> Trained:
    """Trains one predictor per predicted layer, each separately. Raises RoutingError for texts that
    cannot be learnt from."""
    source, num_hidden = layer_source(model, captured), HIDDEN[kind]
    is_held_out_N = held_out_tokens(captured.trace)
    routers, modules, fits = model.routers(), [], list[TrainingCourse]()
    pairs = predicted_pairs(kind, len(routers))
    for number, (column, target) in enumerate(pairs):
        learnt, unseen = (
            layer_data(kind, source, column, target, torch.from_numpy(rows))
            for rows in (np.flatnonzero(~is_held_out_N), np.flatnonzero(is_held_out_N))
        )
        module, fit = train_layer(
            routers[target],
            learnt,
            unseen,
            recipe,
            lambda what, share, at=number: progress(what, (at + share) / len(pairs)),  # type: ignore[misc]
            num_hidden=num_hidden,
            loss=loss,
        )
        modules.append(module)
        fits.append(fit)
        recipe = replace(recipe, epochs=1) if fit.is_interrupted else recipe
    sizes: dict[str, Any] = {"hidden": num_hidden}
    if kind is PredictorKind.PRE_ATTENTION:
        sizes["context"] = NUM_CONTEXT
    card = _card(kind, model, captured.trace, sizes, data, fits, recipe)
    is_interrupted = any(fit.is_interrupted for fit in fits)
    return Trained(card, LayerPredictors(modules), is_interrupted)


def layer_source(model: PredictorModel, captured: Captured) -> LayerSource:
    trace = captured.trace
    assert captured.before_attention_LTD is not None, "captured without hidden states"
    assert captured.before_router_LTD is not None, "captured without hidden states"
    return LayerSource(
        before_attention_LND=captured.before_attention_LTD,
        before_router_LND=captured.before_router_LTD,
        ids_NLK=torch.from_numpy(trace.expert_ids_NLK.astype(np.int64)),
        position_N=torch.from_numpy(trace.position_N.astype(np.int64)),
    )


def held_out_tokens(trace: RoutingTrace) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns a mask of the tokens of every twentieth document, which decide when training stops.
    Raises TraceError for fewer than two documents."""
    names = np.array([name.split(PIECE)[0] for name in trace.request_ids])
    document = np.unique(names, return_inverse=True)[1][trace.request_N]
    num_documents = int(document.max()) + 1
    check_two_documents(num_documents)
    every = min(_HELD_OUT_EVERY, num_documents)
    is_held_out: np.ndarray[Any, np.dtype[np.bool_]] = document % every == 0
    return is_held_out


def _card(
    kind: PredictorKind,
    model: PredictorModel,
    trace: RoutingTrace,
    sizes: Mapping[str, Any],
    data: Mapping[str, Any],
    fits: Sequence[TrainingCourse],
    recipe: Recipe,
) -> PredictorCard:
    return PredictorCard(
        kind=kind.value,
        model=model.name,
        model_identity=model.identity,
        placement_version=trace.placement_version,
        layers=trace.layers,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        width=model.spec.width,
        sizes=sizes,
        data={**data, "recipe": asdict(recipe)},
        metrics={
            "held-out loss": [round(fit.best_loss, 5) for fit in fits],
            "best epoch": [fit.best_epoch for fit in fits],
        },
    )


def judge_request(
    folder: Path,
    model: PredictorModel,
    unseen: RoutedTexts,
    seen: RoutedTexts | None,
    *,
    horizon: int | None,
    seed: int,
    progress: Progress,
) -> list[PredictorVerdict]:
    """Evaluates a request predictor.

    `seen` are texts that the baselines may learn from; None evaluates without baselines. `horizon`
    is the number of coming tokens to evaluate; None uses the number that the predictor was trained
    for.
    """
    embedding_VD = model.embedding()
    predictor = load_request_predictor(
        folder, model_identity=model.identity, embedding_VD=embedding_VD, model=model.name
    )
    cuts = cuts_to_judge(unseen, seed, horizon or predictor.horizon)
    verdicts = [judged_predictor(predictor, cuts, model.layers)]
    if seen is not None:
        verdicts += judged_history(load_of(seen), cuts, model.layers)
        pools = PrefixPools(embedding_VD)
        verdicts.append(judged_regression(seen, cuts, pools, model.layers, seed, progress))
    return verdicts


def judge_layers(
    kind: PredictorKind,
    folder: Path,
    model: PredictorModel,
    captured: Captured,
    seen: RoutedTexts | None,
) -> list[PredictorVerdict]:
    """Evaluates predictors between layers, the frozen router alone, and baselines by token."""
    routers = model.routers()
    predictors = load_layer_predictors(
        folder, kind, routers, model_identity=model.identity, model=model.name
    )
    pairs = predicted_pairs(kind, len(routers))
    columns = [target for _, target in pairs]
    texts, source = texts_of(captured.trace), layer_source(model, captured)
    layers = tuple(model.layers[target] for target in columns)
    truth = truth_of_tokens(texts, layers, columns)
    everything = torch.arange(captured.trace.num_tokens)
    learnt, frozen = [], []
    for (read, target), layer in zip(pairs, layers, strict=True):
        data = layer_data(kind, source, read, target, everything)
        router, context = routers[target], data.context_NC
        with torch.inference_mode():
            logits_NE = predictors.predict(layer, data.hidden_ND, context)
            frozen_NE = RouterResidual(router, 1)(data.hidden_ND)
        learnt.append(choice_probability(logits_NE, truth.top_k).numpy())
        frozen.append(choice_probability(frozen_NE, truth.top_k).numpy())
    verdicts = [
        judge(f"{kind.value} predictor", np.stack(learnt, 1), truth),
        judge("frozen router", np.stack(frozen, 1), truth),
    ]
    if seen is not None:
        verdicts += judged_previous_token(texts, truth, columns, load_of(seen))
    return verdicts
