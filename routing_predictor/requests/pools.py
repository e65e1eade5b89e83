"""Turns a prefix into one row: token embeddings averaged over windows that end where the prefix
does.

R prefixes, V vocabulary, D model width, W windows; F = W * D features. A window of 1 is the last
token; the largest window bounds the cost of a prefix of any length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

WINDOWS = (512, 128, 32, 8, 1)


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
