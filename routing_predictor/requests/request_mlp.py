"""The request predictor: its interface, and an MLP of three layers on pooled embeddings.

`PrefixPools` turns a prefix into one row: token embeddings averaged over windows that end where the
prefix does. A window of 1 is the last token; the largest window bounds the cost of a prefix of any
length.

R prefixes, V vocabulary, D model width, W windows; F = W * D features, H hidden units, L layers
with routed experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

WINDOWS = (512, 128, 32, 8, 1)
NUM_HIDDEN = 512
_DROPOUT = 0.1  # in training
# lower limit of a feature's deviation, so that the scale of a constant feature fits into fp16
_MIN_DEVIATION = 1e-3


class PrefixPools:
    """The model's own embeddings, scaled to a mean square of 1, and the windows."""

    def __init__(self, embedding_VD: Tensor, windows: Sequence[int] = WINDOWS) -> None:
        table_VD = embedding_VD.detach().to(device="cpu", dtype=torch.float32)
        self._table_VD = table_VD / table_VD.square().mean().sqrt().clamp_min(1e-12)
        self.windows = tuple(sorted(windows, reverse=True))

    @property
    def num_features(self) -> int:
        return len(self.windows) * self._table_VD.shape[1]

    def pool(self, prefixes: Sequence[NDArray[np.integer]]) -> Tensor:
        """[R, F] in fp32. A prefix shorter than a window is averaged whole; an empty one is 0.

        Windows 4 and 1 of the tokens abcde: the bags are bcd and e, and e's sum is added to that of
        bcd.
        """
        sizes_W = np.array(self.windows)
        tails = [np.asarray(prefix[-sizes_W[0] :], dtype=np.int64) for prefix in prefixes]
        lengths_R = np.array([len(tail) for tail in tails], dtype=np.int64)
        first_R = np.cumsum(lengths_R) - lengths_R
        bags_RW = first_R[:, None] + np.maximum(0, lengths_R[:, None] - sizes_W[None])
        sums = F.embedding_bag(
            torch.from_numpy(np.concatenate([*tails, np.empty(0, dtype=np.int64)])),
            self._table_VD,
            torch.from_numpy(bags_RW.reshape(-1)),
            mode="sum",
        )
        sums_RWD = sums.view(len(tails), len(sizes_W), -1).flip(1).cumsum(1).flip(1)
        counts_RW = np.minimum(lengths_R[:, None], sizes_W[None]).clip(1)
        return (sums_RWD / torch.from_numpy(counts_RW)[:, :, None]).flatten(1).float()


class RequestPredictor(Protocol):
    """Predicts the experts of a request's coming tokens from its tokens so far."""

    @property
    def horizon(self) -> int:
        """Number of coming tokens that a prediction covers."""
        ...

    def predict(self, prefixes: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """Returns [R, L, E]: the probability that a coming token chooses the expert. The sum is
        about k per layer. Predictions never affect the router's choices."""
        ...


class RequestMLP(nn.Module):
    """Maps a pooled prefix to logits [R, L, E]; their softmax over E is the share of the coming
    choices."""

    def __init__(
        self, num_features: int, num_layers: int, num_experts: int, num_hidden: int = NUM_HIDDEN
    ) -> None:
        super().__init__()
        self.num_layers, self.num_experts = num_layers, num_experts
        self.mean_F: Tensor
        self.scale_F: Tensor
        self.register_buffer("mean_F", torch.zeros(num_features))
        self.register_buffer("scale_F", torch.ones(num_features))
        self.first = nn.Linear(num_features, num_hidden)
        self.second = nn.Linear(num_hidden, num_hidden)
        self.last = nn.Linear(num_hidden, num_layers * num_experts)

    def fit_scale(self, features_RF: Tensor) -> None:
        """Sets the scale so that features have mean 0 and deviation 1 or less over these
        samples."""
        self.mean_F.copy_(features_RF.mean(0))
        self.scale_F.copy_(1 / features_RF.std(0).clamp_min(_MIN_DEVIATION))

    def forward(self, features_RF: Tensor) -> Tensor:
        x_RF = (features_RF - self.mean_F) * self.scale_F
        hidden_RH = F.dropout(F.gelu(self.first(x_RF)), _DROPOUT, self.training)
        hidden_RH = F.dropout(F.gelu(self.second(hidden_RH)), _DROPOUT, self.training)
        logits: Tensor = self.last(hidden_RH)
        return logits.view(-1, self.num_layers, self.num_experts)


class PrefixPredictor:
    """A trained MLP with the embeddings that it reads: a `RequestPredictor`."""

    def __init__(self, mlp: RequestMLP, pools: PrefixPools, *, top_k: int, horizon: int) -> None:
        self._mlp, self._pools = mlp.eval(), pools
        self._top_k, self._horizon = top_k, horizon

    @property
    def horizon(self) -> int:
        return self._horizon

    @torch.inference_mode()
    def predict(self, prefixes: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """Returns [R, L, E]: the probability that a coming token chooses the expert."""
        mlp = self._mlp
        if not prefixes:
            return np.zeros((0, mlp.num_layers, mlp.num_experts), dtype=np.float32)
        shares = mlp(self._pools.pool(prefixes)).softmax(-1)
        return as_probability(shares, self._top_k).numpy()


def as_probability(share_RLE: Tensor, top_k: int) -> Tensor:
    """Converts the share of the choices to the probability that a token is among them: k times the
    share, at most 1."""
    return (share_RLE * top_k).clamp_max(1.0)
