"""Evaluates a model's predictors on texts, beside baselines fitted on other texts.

N tokens, L layers with routed experts, E experts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from moe_serve.learn.predictor_data import Captured, PredictorModel
from moe_serve.learn.training import layer_source
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
from routing_predictor.layers.router_residual import RouterResidual, choice_probability
from routing_predictor.layers.train_layers import layer_data, predicted_pairs
from routing_predictor.predictor_file import load_layer_predictors, load_request_predictor
from routing_predictor.requests.pools import PrefixPools
from routing_predictor.requests.texts import RoutedTexts, texts_of
from routing_predictor.traces.card import PredictorKind
from routing_predictor.traces.fitting import Progress


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
    """Evaluate a request predictor.

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
    """Evaluate predictors between layers, the frozen router alone, and baselines by token."""
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
