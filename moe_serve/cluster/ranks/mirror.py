"""An attention rank's memory of its sequences between steps, from which it plans each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

import msgspec
import numpy as np

from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.tiers.arena import ArenaView
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.cluster.control.messages import OpenSequence, PageWork, RunStep, Slice
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.request import DecodingRules, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.errors import ConfigError
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan


class Mirrors:
    """The coordinator's sequences, as far as a sampler and a plan need them.

    Tokens sampled here are appended here: they need not come back.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self._adapters: dict[int, bytes] = {}  # of sequences that have one

    def update(self, order: RunStep) -> StepPlan:
        """Opens and closes sequences and extends their page tables; returns the plan to compute."""
        for sequence_id in order.closed:
            self.sequences.pop(sequence_id, None)
            self._adapters.pop(sequence_id, None)
        for opened in order.opened:
            self.sequences[opened.sequence_id] = _sequence(opened)
            if opened.adapter:
                self._adapters[opened.sequence_id] = adapter_key(opened.adapter)
        return StepPlan(
            tuple(
                MicroBatch(tuple(self._slice(piece) for piece in batch))
                for batch in order.micro_batches
            ),
            order.routes,
            parked=tuple(order.parked),
            num_guesses=order.num_guesses,
        )

    def append(self, runs: Mapping[int, Items[int]]) -> None:
        """Appends the tokens that the step sampled: a run for each sequence."""
        for sequence_id, run in runs.items():
            for token_id in run:
                self.sequences[sequence_id].append(token_id)

    def _slice(self, piece: Slice) -> SequenceSlice:
        sequence = self.sequences[piece.sequence_id]
        sequence.page_table[piece.first_page :] = piece.pages
        sequence.num_computed_tokens = piece.start
        drafted = np.array(_tokens(piece.drafted), dtype=np.int64)
        tokens = sequence.pending(piece.count - len(drafted))
        return SequenceSlice(
            piece.sequence_id,
            piece.start,
            np.concatenate([tokens, drafted]) if len(drafted) else tokens,
            tuple(sequence.page_table),
            piece.num_logits,
            len(drafted),
            piece.layers,
            self._adapters.get(piece.sequence_id, b""),
            num_dropped=piece.num_dropped,
        )


def adapter_key(number: int) -> bytes:
    """Returns the name of an adapter in the plans of a rank."""
    return number.to_bytes(4, "little")


def tokens_of(outcome: StepOutcome) -> dict[int, list[int]]:
    """Returns the tokens to append after a step: a run for each sequence.

    A sequence without a valid token ends. It may already be in the next step: it gets token 0.
    """
    tokens = {
        key: [sampled.token_id if sampled.is_valid else 0 for sampled in run]
        for key, run in outcome.sampled.items()
    }
    for key in outcome.failures:
        tokens.setdefault(key, []).append(0)
    return tokens


def _sequence(opened: OpenSequence) -> Sequence:
    params, rules = unpack_params(opened.params)
    request = GenerationRequest(
        request_id=str(opened.sequence_id),
        prompt_token_ids=tuple(_tokens(opened.prompt)),
        params=params,
        resolved=rules,
        choice=opened.choice,
    )
    sequence = Sequence(opened.sequence_id, request)
    sequence.seed = opened.seed
    for token in _tokens(opened.output):
        sequence.append(token)
    return sequence


def pack_params(params: SamplingParams, rules: DecodingRules) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode((params, rules), enc_hook=dict))  # frozen mappings


_PARAMS = msgspec.msgpack.Decoder(tuple[SamplingParams, DecodingRules])


def unpack_params(packed: msgspec.Raw) -> tuple[SamplingParams, DecodingRules]:
    return _PARAMS.decode(packed)


def pack_tokens(token_ids: list[int]) -> bytes:
    """Packs tokens as int32, little-endian."""
    return np.array(token_ids, dtype="<i4").tobytes()


def _tokens(packed: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return tokens


class RankPages:
    """The pages of a rank or of one of its shards, with its view of the memory tier if there is
    one."""

    def __init__(self, cache: KVCache, arena: str, wire: WirePages) -> None:
        """`arena` is the path of the memory tier, empty without one, and `wire` the form of pages
        in it. Raises ConfigError.
        """
        self.cache = cache
        self._view: ArenaView | None = None
        if arena:
            if cache.device.type != "cpu":
                raise ConfigError(
                    "cache.memory_tier_bytes or cache.disk_path is set, but the KV pages are on "
                    f"{cache.device.type}: tiers serve pages in main memory only (model.device: "
                    "cpu)."
                )
            self._view = ArenaView(arena, wire)

    def do(self, page_work: Iterable[PageWork]) -> None:
        """Does the coordinator's work on pages in order: a page is cleared before data is copied to
        it."""
        for work in page_work:
            if work.clear:
                self.cache.clear(list(work.clear))
            if work.copy:
                self.cache.copy([(source, target) for source, target in work.copy])
            if self._view is not None:
                self._view.save(work.save)
                self._view.load(work.load)
