"""Predictors between layers: the frozen router at the start, context, training, the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from routing_predictor.judge.rivals import judged_previous_token, truth_of_tokens
from routing_predictor.layers.router_residual import (
    RouterResidual,
    RouterWeights,
    choice_probability,
    context_of,
)
from routing_predictor.layers.train_layers import (
    LayerData,
    LayerPredictors,
    predicted_pairs,
    ranked_loss,
    train_layer,
)
from routing_predictor.predictor_file import load_layer_predictors, write_predictor
from routing_predictor.requests.texts import RoutedTexts
from routing_predictor.traces.card import PredictorCard, PredictorKind
from routing_predictor.traces.fitting import Recipe
from routing_predictor.traces.routing_error import PredictorError

_RANDOM = torch.Generator().manual_seed(0)


def router(layer: int = 1, width: int = 6, num_experts: int = 5) -> RouterWeights:
    return RouterWeights(
        layer=layer,
        norm_D=torch.rand(width, generator=_RANDOM) + 0.5,
        norm_eps=1e-6,
        weight_ED=torch.randn(num_experts, width, generator=_RANDOM),
    )


def test_untrained_it_is_the_frozen_router() -> None:
    weights, hidden = router(), torch.randn(9, 6, generator=_RANDOM)
    expected = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * weights.norm_D
    for context in (None, torch.randn(9, 4, generator=_RANDOM)):
        module = RouterResidual(weights, 7, 0 if context is None else 4)
        module.fit_scale(hidden)
        logits = module(hidden, context)
        torch.testing.assert_close(logits, expected @ weights.weight_ED.T)
    names = set(module.state_dict())
    assert names == {"scale", "first.weight", "first.bias", "last.weight", "last.bias"}


def test_context_is_of_the_tokens_before_in_the_same_text() -> None:
    hidden, position = torch.eye(3)[[0, 1, 2, 1]] * 7.0, torch.tensor([0, 1, 0, 1])
    rows = context_of(hidden, position, 2) / 3**0.5  # of mean square 1, whatever their length
    rows = rows.round(decimals=3)
    assert rows[:, :3].tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert not rows[:, 3:].any(), "no text has three tokens"


@pytest.mark.parametrize("loss", ["router", "ranked"])
def test_training_corrects_a_router_that_is_asked_early(loss: str) -> None:
    weights, hidden = router(), torch.randn(1500, 6, generator=_RANDOM)
    later = hidden + hidden.roll(1, 1)  # what a layer did to it
    ids = weights.logits(weights.normed(later)).topk(2, -1).indices
    learnt, held_out = (
        LayerData(hidden_ND=hidden[rows], router_input_ND=later[rows], ids_NK=ids[rows])
        for rows in (slice(0, 1200), slice(1200, 1500))
    )
    recipe = Recipe(epochs=8, batch_size=64, learning_rate=1e-2)

    def recall(module: RouterResidual) -> float:
        chosen = module(held_out.hidden_ND).topk(2, -1).indices
        return float((chosen[:, :, None] == held_out.ids_NK[:, None]).any(1).float().mean())

    def trained() -> RouterResidual:
        return train_layer(
            weights,
            learnt,
            held_out,
            recipe,
            lambda *_: None,
            num_hidden=32,
            loss="router" if loss == "router" else "ranked",
        )[0]

    module = trained()
    assert recall(module) > recall(RouterResidual(weights, 1)) + 0.1
    again = trained().state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in module.state_dict().items())


def test_ranked_loss_by_hand() -> None:
    # Logit 0 everywhere: BCE log 2 at the weights 3, 1.5, 1.5, 1.5 (rank below 3k), the hinge 0.1.
    loss = ranked_loss(torch.zeros(1, 4), torch.tensor([[4.0, 3, 2, 1]]), torch.tensor([[0]]))
    expected = float(np.log(2)) * (3 + 1.5 + 1.5 + 0.5) / 4 + 0.3 * 0.1
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_files(tmp_path: Path) -> None:
    routers = [router(layer) for layer in (0, 2, 3)]
    kind = PredictorKind.NEXT_LAYER
    assert predicted_pairs(kind, 3) == [(0, 1), (1, 2)]
    assert predicted_pairs(PredictorKind.PRE_ATTENTION, 2) == [(0, 0), (1, 1)]
    made = LayerPredictors([RouterResidual(each, 4) for each in routers[1:]])
    for module in made.layers.values():
        torch.nn.init.ones_(module.last.weight)
    card = PredictorCard(
        kind=kind.value,
        model="tiny",
        model_identity="aa",
        layers=(0, 2, 3),
        num_experts=5,
        top_k=2,
        width=6,
        sizes={"hidden": 4},
    )
    write_predictor(tmp_path, card, made)
    loaded = load_layer_predictors(tmp_path, kind, routers, model_identity="aa")
    assert loaded.targets == (2, 3)
    hidden = torch.randn(3, 6, generator=_RANDOM)
    torch.testing.assert_close(
        loaded.predict(3, hidden), made.predict(3, hidden), atol=1e-2, rtol=0
    )
    with pytest.raises(PredictorError, match="next-layer predictor is for the model tiny"):
        load_layer_predictors(tmp_path, kind, routers, model_identity="bb")
    with pytest.raises(PredictorError, match=r"names invalid layers, \[0, 2, 3\]"):
        load_layer_predictors(tmp_path, kind, routers[:2], model_identity="aa")


def test_a_probability_keeps_the_order() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0, -2.0]])
    probability = choice_probability(logits, 2)
    assert probability.argsort(descending=True).tolist() == [[0, 1, 2, 3]]
    assert (probability[0, :2] > 0.5).all() and (probability[0, 2:] < 0.5).all()
    assert (choice_probability(logits, 4) >= 0.5).all(), "all are chosen"


def test_the_previous_token_starts_anew_in_every_text() -> None:
    ids = np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]])
    texts = RoutedTexts(
        expert_ids_TLK=ids,
        token_T=None,
        starts=np.array([0, 2, 4]),
        document=np.array([0, 1]),
        label=("", ""),
        num_experts=4,
    )
    truth = truth_of_tokens(texts, (5,), [0])
    assert truth.count_SLE[:, 0].tolist() == [[1, 1, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2
    marginal, previous = judged_previous_token(texts, truth, [0], np.array([[4, 4, 1, 1]]))
    assert marginal.scores["overlap"].overall.mean == 0.5  # 0 and 1 for all
    assert previous.scores["overlap"].overall.mean == 0.75  # but for the third token
