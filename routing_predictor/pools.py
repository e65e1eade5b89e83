"""A prefix as one row: token embeddings averaged over windows that end where the prefix does.

R prefixes, V vocabulary, D model width, W windows; F = W * D features. A window of 1 is the last
token, the largest bounds the cost of a prefix of any length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WINDOWS = (512, 128, 32, 8, 1)


class PrefixPools:
    """The model's own embeddings, scaled to a mean square of 1, and the windows."""

    def __init__(self, embedding_VD: Tensor, windows: Sequence[int] = WINDOWS) -> None:
        table_VD = embedding_VD.detach().to(device="cpu", dtype=torch.float32)
        self._table_VD = table_VD / table_VD.square().mean().sqrt().clamp_min(1e-12)
        self.windows = tuple(windows)

    @property
    def num_features(self) -> int:
        return len(self.windows) * self._table_VD.shape[1]

    def pool(self, prefixes: Sequence[NDArray[np.integer]]) -> Tensor:
        """[R, F] in fp32. A prefix shorter than a window is averaged whole; an empty one is 0."""
        longest = max(self.windows)
        tails = [np.asarray(prefix[-longest:], dtype=np.int64) for prefix in prefixes]
        lengths = torch.tensor([len(tail) for tail in tails])
        if not int(lengths.sum()):
            return torch.zeros(len(tails), self.num_features)
        rows_TD = self._table_VD[torch.from_numpy(np.concatenate(tails))]
        ends = lengths.cumsum(0)
        return self.pool_spans(running_sum(rows_TD), ends - lengths, ends)

    def sums_of(self, tokens: NDArray[np.integer]) -> Tensor:
        """[T + 1, D]: what `pool_spans` wants of a text, made once for all cuts of it."""
        return running_sum(self._table_VD[torch.from_numpy(tokens.astype(np.int64))])

    def pool_spans(self, sums_TD: Tensor, starts_R: Tensor, ends_R: Tensor) -> Tensor:
        """[R, F] of the prefixes [start, end) of texts that lie one after the other."""
        pools = []
        for window in self.windows:
            from_R = torch.maximum(starts_R, ends_R - window)
            count_R = (ends_R - from_R).clamp_min(1)
            pools.append((sums_TD[ends_R] - sums_TD[from_R]) / count_R[:, None])
        return torch.cat(pools, 1).float()


def running_sum(rows_TD: Tensor) -> Tensor:
    """[T + 1, D] in fp64: the rows [a, b) sum to sums[b] - sums[a]."""
    sums_TD = torch.zeros(len(rows_TD) + 1, rows_TD.shape[1], dtype=torch.float64)
    torch.cumsum(rows_TD, 0, dtype=torch.float64, out=sums_TD[1:])
    return sums_TD
