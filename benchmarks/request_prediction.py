"""Time of a request prediction on one CPU core, by requests at once and tokens of their prefixes.

    python benchmarks/request_prediction.py [FOLDER]

FOLDER: of a trained request predictor; without it random weights of the same sizes, for the
demonstration model. The aim is less than 1 ms per request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from moe_serve.config import ModelConfig
from moe_serve.engine.build import model_folder, open_loader
from moe_serve.engine.request_prediction import open_request_predictor
from routing_predictor.pools import PrefixPools
from routing_predictor.prefix_samples import HORIZON
from routing_predictor.request_mlp import PrefixPredictor, RequestMLP

BATCHES, LENGTHS = (1, 16, 64, 256), (16, 128, 1024)
_REPEATS = 20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the request predictor.")
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


def _open(folder: Path | None, model: str | None) -> tuple[PrefixPredictor, int]:
    config = ModelConfig(path=model, device="cpu")
    path = model_folder(config)
    loader = open_loader(path, config, 1, torch.device("cpu"), None)
    spec = loader.spec
    if folder is not None:
        return open_request_predictor(folder, loader, path), spec.vocab_size
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


if __name__ == "__main__":
    main()
