"""Drafts from finished answers: repeated requests, retries and the steps of agents."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.drafting.gram_index import GramIndex
from moe_serve.engine.request.sequence import Sequence

_SIZES = (4, 8, 16, 32)  # tokens that must agree
_END = -1  # follows each answer in a store
_MAX_LEARNT = 512  # tokens that one step enters
_LEAST_CAPACITY = 16384  # tokens of a new store
_MAX_STORES = 1024
_MAX_WAITING = 256  # finished answers that are not entered yet; the oldest are dropped
_ENTRIES_PER_TOKEN = 1  # of each table, so that a store takes 4 + 4 x 4 bytes a token


class AnswerStore:
    """Answers of one owner, in a ring of tokens with an index. The oldest are overwritten."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ring, self._end = array("i", [_END]) * capacity, 0
        self._index = GramIndex(_SIZES, _ENTRIES_PER_TOKEN * capacity)

    @property
    def num_bytes(self) -> int:
        return self._ring.itemsize * len(self._ring) + self._index.num_bytes

    def has_room(self, num_tokens: int) -> bool:
        """Return whether an answer of this length overwrites no other one."""
        return self._end + num_tokens + 1 <= self.capacity

    def add(self, tokens: list[int]) -> None:
        """Enter the last `capacity` - 1 tokens of an answer."""
        kept = tokens[-(self.capacity - 1) :]
        if self._end + len(kept) + 1 > self.capacity:
            self._end = 0
        start, end = self._end, self._end + len(kept)
        self._ring[start : end + 1] = array("i", [*kept, _END])
        self._index.note(self._ring, start, start, end - 1)  # nothing follows the last token
        self._end = end + 1

    def grown(self) -> AnswerStore:
        """Return a store of twice the size with the same answers. This one must not have wrapped
        around: it has had room for every answer."""
        larger = AnswerStore(2 * self.capacity)
        larger._ring[: self._end] = self._ring[: self._end]
        larger._end, start = self._end, 0
        for position in range(self._end):
            if self._ring[position] == _END:
                larger._index.note(larger._ring, start, start, position - 1)
                start = position + 1
        return larger

    def after(self, tail: list[int], most: int) -> tuple[list[int], int] | None:
        """Return what followed the end of `tail`, at most `most` tokens, and how many tokens
        agreed."""
        found = self._index.find(self._ring, tail)
        if found is None:
            return None
        position, size = found
        tokens = self._ring[position : position + most].tolist()
        if _END in tokens:
            tokens = tokens[: tokens.index(_END)]
        return (tokens, size) if tokens else None


class PastAnswers:
    """Implements Drafter with one bounded store for each root key of the prefix cache.

    A root key stands for model, adapter and `cache_salt`, so that a request never drafts from an
    answer whose pages it could not share. All stores together hold at most `max_tokens` tokens; the
    store that was used longest ago goes first.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._stores: OrderedDict[bytes, AnswerStore] = OrderedDict()
        self._waiting: deque[tuple[bytes, list[int]]] = deque(maxlen=_MAX_WAITING)

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in self._stores.values())

    def learn(self, root_key: bytes, sequence: Sequence) -> None:
        """Remember a finished answer, with the end of its prompt, by which it is found."""
        start = max(0, sequence.num_prompt_tokens - _SIZES[-1])
        self._waiting.append((root_key, sequence.token_ids[start:]))

    def work(self) -> None:
        """Enter answers that were learnt, at most about `_MAX_LEARNT` tokens of them."""
        left = _MAX_LEARNT
        while self._waiting and left > 0:
            root_key, tokens = self._waiting.popleft()
            self._store(root_key, len(tokens)).add(tokens)
            left -= len(tokens)

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        store = self._stores.get(sequence.page_keys[0]) if sequence.page_keys else None
        if store is None:
            return None
        found = store.after(sequence.token_ids[-_SIZES[-1] :], most)
        if found is None:
            return None
        self._stores.move_to_end(sequence.page_keys[0])
        return Draft(tuple(found[0]), DraftSource.SUFFIX, found[1])

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Does nothing: stores outlive their sequences."""

    def _store(self, root_key: bytes, num_tokens: int) -> AnswerStore:
        """Return the owner's store, grown if it would overwrite an answer and has not before."""
        store = self._stores.get(root_key)
        if store is None:
            store = AnswerStore(min(_LEAST_CAPACITY, self._max_tokens))
        while not store.has_room(num_tokens) and 2 * store.capacity <= self._max_tokens:
            store = store.grown()
        self._stores[root_key] = store
        self._stores.move_to_end(root_key)
        num_tokens = sum(each.capacity for each in self._stores.values())
        while num_tokens > self._max_tokens or len(self._stores) > _MAX_STORES:
            num_tokens -= self._stores.popitem(last=False)[1].capacity
        return store
