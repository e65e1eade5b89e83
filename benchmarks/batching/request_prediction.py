"""Measures the time of a request prediction, and of learning from requests, on one CPU core.

The table has a row for each number of concurrent requests and length of their prefixes.

    python benchmarks/run.py request_prediction [FOLDER]

FOLDER contains a trained request predictor; without it, random weights of the demonstration model's
sizes are used. The target is less than 1 ms per request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import OpenedModel, model_folder
from moe_serve.engine.schedule.policy.live_learning import LiveLearning
from moe_serve.engine.schedule.policy.policy_maker import open_request_predictor
from routing_predictor.requests.online import OnlineLimits, OnlinePredictor
from routing_predictor.requests.request_mlp import PrefixPools, PrefixPredictor, RequestMLP
from routing_predictor.requests.train_request import HORIZON

BATCHES, LENGTHS = (1, 16, 64, 256), (16, 128, 1024)
SHAPES = ((6, 32, 4), (58, 256, 8))  # the demonstration model's, DeepSeek-V3's
_REPEATS = 20
_REQUESTS, _TOKENS = 64, 8  # one in four of 32 generated tokens is looked at


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of a trained predictor")
    parser.add_argument("--model", default=None, help="the model that it is for")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    predictor, vocab_size = _open(options.folder, options.model)
    rng = np.random.default_rng(0)
    print("us per request (median), one thread")
    print("requests  " + "".join(f"{length:>6} tokens" for length in LENGTHS))
    for batch in BATCHES:
        cells = []
        for length in LENGTHS:
            prefixes = list(rng.integers(0, vocab_size, (batch, length)))
            cells.append(f"{1e6 * _seconds(predictor, prefixes) / batch:13.0f}")
        print(f"{batch:8}  " + "".join(cells))
    print("us of learning (`predictor.learn`): a token's choices kept, a request learnt from")
    for num_layers, num_experts, top_k in SHAPES:
        kept, learnt = _learning_seconds(num_layers, num_experts, top_k)
        print(
            f"{num_layers:8} layers x {num_experts} experts: {1e6 * kept:.1f}, {1e6 * learnt:.0f}"
        )


def _learning_seconds(num_layers: int, num_experts: int, top_k: int) -> tuple[float, float]:
    """Returns the seconds to keep the choices of one token, and to learn from a request's 8
    tokens.
    """
    rng = np.random.default_rng(0)
    shape = (_REQUESTS, num_layers, num_experts)
    predicted_RLE = rng.random(shape, dtype=np.float32) * 2 * top_k / num_experts
    ids_NLK = rng.integers(0, num_experts, (1, num_layers, top_k)).astype(np.int16)
    learning = LiveLearning(OnlinePredictor(_Nothing(), top_k, OnlineLimits()))
    for key, predicted_LE in enumerate(predicted_RLE):
        learning.predicted(key, predicted_LE)
    clock = time.perf_counter()
    for key in range(_REQUESTS):
        for _ in range(_TOKENS):
            learning.chose(key, ids_NLK)
    kept = (time.perf_counter() - clock) / (_REQUESTS * _TOKENS)
    learning.end(range(_REQUESTS))
    clock = time.perf_counter()
    while learning.num_learnt < _REQUESTS:
        learning.learn()
    return kept, (time.perf_counter() - clock) / _REQUESTS


class _Nothing:
    """A predictor without requests."""

    horizon = HORIZON

    def predict(self, prefixes: Sequence[np.ndarray]) -> np.ndarray:
        raise AssertionError("this benchmark makes no predictions with it")


def _open(folder: Path | None, model: str | None) -> tuple[PrefixPredictor, int]:
    config = ModelConfig(path=model, device="cpu")
    path = model_folder(config)
    loader = OpenedModel.open(path, config, 1, torch.device("cpu")).loader
    spec = loader.spec
    if folder is not None:
        return open_request_predictor(folder, path), spec.vocab_size
    pools = PrefixPools(loader.embedding())
    num_layers = sum(layer.is_sparse for layer in spec.layers)
    mlp = RequestMLP(pools.num_features, num_layers, spec.router.num_experts)
    top_k = spec.router.top_k
    return PrefixPredictor(mlp, pools, top_k=top_k, horizon=HORIZON), spec.vocab_size


def _seconds(predictor: PrefixPredictor, prefixes: list[np.ndarray]) -> float:
    predictor.predict(prefixes)
    times = []
    for _ in range(_REPEATS):
        clock = time.perf_counter()
        predictor.predict(prefixes)
        times.append(time.perf_counter() - clock)
    return float(np.median(times))
