"""Who turns logits into tokens: the host's sampler, or that of the kernels. Decided once."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from torch import Tensor

from moe_kernels.interface.kernels import Kernels
from moe_kernels.interface.token_sampler import TokenMasks
from moe_serve.engine.request.request import TokenLogprob
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.kernel_sampler import KernelSampler
from moe_serve.engine.sampling.sampler import Sampled, Sampler


class SamplingBackend(Protocol):
    """Each row's result depends on its own logits and request only; logits stay as they are."""

    def sample(
        self, logits_SV: Tensor, sequences: Rows[Sequence], masks: TokenMasks | None = None
    ) -> list[Sampled]:
        """One token for each row; whether a row is faulty is its own affair. `masks`: what some
        rows may take, at least one token each."""
        ...

    def describe(self, logits_RV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
        """The log probability and rank of one token in each row, and the row's likeliest ones."""
        ...


def make_sampler(eos_token_ids: frozenset[int], kernels: Kernels) -> SamplingBackend:
    """The kernels' own where they have one."""
    on_device = kernels.token_sampler()
    if on_device is None:
        return Sampler(eos_token_ids)
    return KernelSampler(eos_token_ids, on_device)
