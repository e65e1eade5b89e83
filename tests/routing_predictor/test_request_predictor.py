"""The request predictor: pools, cuts, training, its files, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from routing_predictor import predictor_file
from routing_predictor.predictor_file import load_request_predictor, write_predictor
from routing_predictor.requests.request_mlp import PrefixPools, RequestMLP
from routing_predictor.requests.texts import PIECE, RoutedTexts, split_documents, texts_of
from routing_predictor.requests.train_request import (
    MIN_PREFIX,
    PrefixCuts,
    cut_each,
    cut_texts,
    history_shares,
    pooled,
    train_request,
)
from routing_predictor.traces.card import PredictorCard, PredictorKind, read_card
from routing_predictor.traces.fitting import Recipe, Task, TrainingCourse, fit
from routing_predictor.traces.routing_error import PredictorError, TraceError
from routing_predictor.traces.trace import RoutingTrace

EMBEDDING = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
CARD = PredictorCard(
    kind="request",
    model="tiny",
    model_identity="ab" * 32,
    placement_version="p1",
    layers=(0, 1),
    num_experts=6,
    top_k=2,
    width=8,
    sizes={"hidden": 16, "windows": [8, 2, 1], "horizon": 4},
)


def routed_texts(num_texts: int = 12, length: int = 60) -> RoutedTexts:
    """Returns texts whose tokens are all even or all odd; the parity decides the experts."""
    rng = np.random.default_rng(0)
    parity = np.arange(num_texts) % 2
    token = (rng.integers(0, 20, (num_texts, length)) * 2 + parity[:, None]).reshape(-1)
    offset = rng.integers(0, 2, (num_texts * length, 2, 1))
    first = np.repeat(parity, length)[:, None, None] * 3 + offset
    return texts_of(
        RoutingTrace(
            expert_ids_NLK=np.concatenate([first, first + 1], 2).astype(np.uint8),
            request_N=np.repeat(np.arange(num_texts), length).astype(np.int32),
            position_N=np.tile(np.arange(length), num_texts).astype(np.int32),
            phase_N=np.zeros(num_texts * length, dtype=np.uint8),
            num_experts=6,
            layers=(0, 1),
            request_ids=tuple(f"d{i // 2}{PIECE}{i % 2}" for i in range(num_texts)),
            token_N=token.astype(np.int32),
        )
    )


def test_pools_are_means_of_the_last_tokens() -> None:
    pools = PrefixPools(EMBEDDING, (1, 4))
    table = EMBEDDING / EMBEDDING.square().mean().sqrt()
    prefixes = [np.array([3, 1, 4, 1, 5, 9]), np.array([2, 6]), np.array([], dtype=np.int64)]
    rows = pools.pool(prefixes)
    assert pools.windows == (4, 1) and rows.shape == (3, pools.num_features)
    torch.testing.assert_close(rows[0, :8], table[[4, 1, 5, 9]].mean(0))
    torch.testing.assert_close(rows[0, 8:], table[9])
    torch.testing.assert_close(rows[1, :8], table[[2, 6]].mean(0))
    assert not rows[2].any()
    alone = pools.pool(prefixes[:1])
    torch.testing.assert_close(alone[0], rows[0])


def test_texts_of_interleaved_requests() -> None:
    trace = RoutingTrace(
        expert_ids_NLK=np.arange(5, dtype=np.uint8)[:, None, None],
        request_N=np.array([1, 0, 1, 0, 1], dtype=np.int32),
        position_N=np.array([0, 0, 1, 1, 2], dtype=np.int32),
        phase_N=np.zeros(5, dtype=np.uint8),
        num_experts=5,
        layers=(3,),
        request_ids=("a", "b"),
        labels=("x", "y"),
    )
    texts = texts_of(trace)
    assert texts.expert_ids_TLK[:, 0, 0].tolist() == [1, 3, 0, 2, 4]
    assert texts.starts.tolist() == [0, 2, 5] and texts.label == ("x", "y")
    assert texts.choose(np.array([1])).expert_ids_TLK[:, 0, 0].tolist() == [0, 2, 4]


def test_pieces_of_a_document_stay_on_one_side() -> None:
    texts = routed_texts()
    learnt, held_out = split_documents(texts, 0.3, seed=0)
    assert not set(learnt.document) & set(held_out.document)
    assert learnt.num_requests + held_out.num_requests == texts.num_requests
    with pytest.raises(TraceError, match="1 document is too few"):
        split_documents(texts.choose(np.array([0, 1])), 0.3, seed=0)


def test_cuts_know_what_is_before_and_after() -> None:
    texts = routed_texts(length=20)
    cuts = cut_each(texts, 5, seed=3, horizon=4)
    assert cuts.num_samples == 5 * texts.num_requests
    assert (cuts.end_S - cuts.start_S >= MIN_PREFIX).all()
    assert (cuts.end_S + 4 <= texts.starts[cuts.request_S + 1]).all()
    assert (cuts.coming().sum(-1) == 4 * 2).all()
    one = PrefixCuts(
        texts=texts,
        start_S=np.array([20]),
        end_S=np.array([23]),
        request_S=np.array([1]),
        horizon=4,
    )
    ids = texts.expert_ids_TLK[23:27, 1]
    assert one.coming()[0, 1].tolist() == np.bincount(ids.ravel(), minlength=6).tolist()
    assert one.history().sum() == 3 * 2 * 2 and one.history(1).sum() == 2 * 2
    assert texts.token_T is not None
    assert one.prefixes()[0].tolist() == texts.token_T[20:23].tolist()
    with pytest.raises(TraceError, match="no text has 28 tokens; the longest of 12 has 20"):
        cut_each(texts, 5, seed=3, horizon=20)


def trained() -> tuple[RequestMLP, TrainingCourse]:
    pools = PrefixPools(EMBEDDING, (8, 2, 1))
    recipe = Recipe(epochs=12, batch_size=8, learning_rate=2e-2)
    return train_request(
        routed_texts(), lambda cuts: pooled(cuts, pools), recipe, lambda *_: None, 16, 4
    )


def test_training_learns_repeats_and_is_refused_elsewhere(tmp_path: Path) -> None:
    mlp, fitted = trained()
    assert 0 < fitted.best_epoch <= 12 and not fitted.is_interrupted
    write_predictor(tmp_path / "a", CARD, mlp)
    write_predictor(tmp_path / "b", CARD, trained()[0])
    first, again = ((tmp_path / x / "request.safetensors").read_bytes() for x in "ab")
    assert first == again

    def load(identity: str = CARD.model_identity, placement: str = "p1") -> np.ndarray:
        predictor = load_request_predictor(
            tmp_path / "a",
            model_identity=identity,
            embedding_VD=EMBEDDING,
            placement_version=placement,
            model="other",
        )
        assert predictor.horizon == 4
        assert predictor.predict([]).shape == (0, 2, 6)
        return predictor.predict([np.array([2, 4, 8, 2, 6]), np.array([1, 3, 9, 5, 5])])

    probability = load()
    assert probability.shape == (2, 2, 6) and probability.dtype == np.float32
    np.testing.assert_allclose(probability.sum(-1), 2.0, atol=0.2)
    assert (probability[0, :, :3].sum(-1) > 1.5).all(), "even tokens: experts 0 to 2"
    assert (probability[1, :, 3:].sum(-1) > 1.5).all()
    with pytest.raises(PredictorError, match=r"for the model tiny \(abab.*not for other \(cdcd"):
        load(identity="cd" * 32)
    with pytest.raises(PredictorError, match="for the placement p1, not for p2"):
        load(placement="p2")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    def load() -> None:
        load_request_predictor(
            tmp_path,
            model_identity=CARD.model_identity,
            embedding_VD=EMBEDDING,
            placement_version="p1",
        )

    with pytest.raises(PredictorError, match="holds no such predictor"):
        load()
    write_predictor(tmp_path, CARD, RequestMLP(24, 2, 6, 16))
    load()
    write_predictor(tmp_path, replace(CARD, sizes={**CARD.sizes, "hidden": 32}), torch.nn.Module())
    with pytest.raises(PredictorError, match="no tensor first.weight, but the card implies"):
        load()
    write_predictor(tmp_path, CARD, RequestMLP(24, 2, 6, 16))
    card = json.loads((tmp_path / "request.json").read_text())
    card["sizes"]["hidden"] = 2**45  # nobody may allocate what only a card says
    (tmp_path / "request.json").write_text(json.dumps(card))
    with pytest.raises(PredictorError, match=rf"\[16, 24\] first.weight, .* \[{2**45}, 24\]"):
        load()
    (tmp_path / "request.safetensors").write_bytes(b"\x01")
    with pytest.raises(PredictorError, match="cannot be read as a safetensors file"):
        load()
    broken = RequestMLP(24, 2, 6, 16)
    broken.last.bias.data[0] = float("nan")
    write_predictor(tmp_path, CARD, broken)
    with pytest.raises(PredictorError, match="last.bias holds values that are not finite"):
        load()


def test_what_cannot_be_written_whole_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_predictor(tmp_path, CARD, RequestMLP(24, 2, 6, 16))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(card: PredictorCard, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predictor_file, "write_card", full)
    with pytest.raises(PredictorError, match="cannot be written: No space left on device"):
        write_predictor(tmp_path, replace(CARD, model="new"), RequestMLP(24, 2, 6, 16))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2 of a card, but only version 1 can be read"),
        ({"surprise": 1}, "unknown keys: surprise"),
        ({"layers": "01x"}, "must be integers"),
        ({"model": 3}, "must be text"),
        ({"sizes": []}, "must be objects"),
    ],
)
def test_cards_are_checked(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_predictor(tmp_path, CARD, RequestMLP(24, 2, 6, 16))
    path = tmp_path / f"{PredictorKind.REQUEST.value}.json"
    assert read_card(path) == replace(CARD, sizes=dict(CARD.sizes))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PredictorError, match=message):
        read_card(path)


def test_an_interrupt_keeps_the_best() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    seen: list[float] = []

    def loss(samples: torch.Tensor) -> torch.Tensor:
        if len(seen) == 3:
            raise KeyboardInterrupt
        return module(torch.ones(len(samples), 1)).square().mean()

    def held_out() -> float:
        seen.append(float(module.weight.detach().abs()))
        return seen[-1]

    task = Task(num_samples=4, loss=loss, held_out=held_out, name="x")
    fitted = fit(module, task, Recipe(epochs=9, batch_size=4), lambda *_: None)
    assert fitted.is_interrupted and fitted.best_loss == min(seen)
    assert float(module.weight.detach().abs()) == fitted.best_loss


def test_history_of_several_windows() -> None:
    cuts = cut_texts(routed_texts(), 7, seed=0, horizon=4)
    shares = history_shares(cuts, (8, 1))
    assert shares.shape == (7, 2 * 2 * 6)
    torch.testing.assert_close(shares.float().view(7, 4, 6).sum(-1), torch.ones(7, 4))
