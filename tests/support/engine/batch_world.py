"""An expert-aware policy with signatures that a test hands out."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import count

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.ageing import Ageing
from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost
from moe_serve.engine.schedule.policy.expert_aware import Bounds, ExpertAware
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from moe_serve.model.step_plan import SequenceSlice

Signature = NDArray[np.float32]
NUM_LAYERS, NUM_EXPERTS = 2, 8


class Given:
    """A SignatureSource whose signatures are in the table already."""

    def __init__(self, table: SignatureTable) -> None:
        self._table, self.is_on = table, True
        self.recall: float | None = None
        self.has_predictor = False
        self.num_learnt: int | None = None

    def refresh(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Nothing changes."""

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._table.forget(sequence_ids)


class World:
    """A policy, its table, and a clock that only moves when told."""

    def __init__(
        self,
        *,
        max_passed_over: int = 8,
        max_age_s: float = 1e9,
        tolerance: float = 0.0,
        window: int = 256,
    ) -> None:
        self.cost, self.now = ConcaveCost(), 0.0
        self.table = SignatureTable(self.cost)
        self.source = Given(self.table)
        self.ageing = Ageing(max_passed_over, max_age_s, lambda: self.now)
        bounds = Bounds(tolerance=tolerance, window=window)
        self.policy = ExpertAware(self.source, self.table, self.ageing, self.cost, bounds)
        self._ids = count()

    def sequence(self, signature: Signature | None = None, num_tokens: int = 4) -> Sequence:
        """Returns a waiting sequence with a signature."""
        key = next(self._ids)
        request = GenerationRequest(
            request_id=f"r{key}", prompt_token_ids=(1,) * num_tokens, params=SamplingParams()
        )
        if signature is not None:
            self.table.put([key], signature[None])
        return Sequence(key, request)


def of_domain(domain: int, rng: np.random.Generator | None = None) -> Signature:
    """Returns a signature: half of the experts belong to domain 0, the others to domain 1."""
    signature = np.full((NUM_LAYERS, NUM_EXPERTS), 0.02, dtype=np.float32)
    half = NUM_EXPERTS // 2
    signature[:, domain * half : (domain + 1) * half] = 0.5
    if rng is not None:
        signature += rng.uniform(0, 0.05, signature.shape).astype(np.float32)
    return signature


def decode(keys: Iterable[int], num_tokens: int = 1) -> list[SequenceSlice]:
    """Returns a decode slice for each sequence."""
    tokens = np.zeros(num_tokens, dtype=np.int64)
    return [SequenceSlice(key, 10, tokens, (0,), 1) for key in keys]
