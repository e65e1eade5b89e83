"""Drafts from finished answers, for repeated requests, retries and the steps of agents."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.drafting.gram_index import GramIndex
from moe_serve.engine.drafting.text_hashes import Prefix, TextHashes, new_prefix
from moe_serve.engine.request.sequence import Sequence

_SIZES = (4, 8, 16, 32)  # tokens that must agree
_END = -1  # follows each answer in a store
_MAX_LEARNT = 512  # tokens that one step enters
_MAX_AGREED = 64
_LEAST_CAPACITY = 16384  # tokens of a new store
_MAX_STORES = 1024
_MAX_WAITING = 256  # finished answers that are not entered yet; the oldest are dropped
_ENTRIES_PER_TOKEN = 1  # entries of each table, so that a store takes 4 + 4 x 4 bytes a token


class AnswerStore:
    """Answers of one owner, in a ring of tokens with an index. The oldest are overwritten."""

    def __init__(self, capacity: int, hashes: TextHashes) -> None:
        self.capacity, self._hashes = capacity, hashes
        self._ring, self._end = array("i", [_END]) * capacity, 0
        self._index = GramIndex(hashes, _SIZES, _ENTRIES_PER_TOKEN * capacity)

    @property
    def num_bytes(self) -> int:
        return self._ring.itemsize * len(self._ring) + self._index.num_bytes

    def has_room(self, num_tokens: int) -> bool:
        """Returns whether an answer of this length overwrites no other one."""
        return self._end + num_tokens + 1 <= self.capacity

    def add(self, tokens: list[int]) -> None:
        """Enters the last `capacity` - 1 tokens of an answer."""
        kept = tokens[-(self.capacity - 1) :]
        if self._end + len(kept) + 1 > self.capacity:
            self._end = 0
        start, end = self._end, self._end + len(kept)
        self._ring[start : end + 1] = array("i", [*kept, _END])
        self._note(kept, start)
        self._end = end + 1

    def grown(self) -> AnswerStore:
        """Returns a store of twice the size with the same answers. This one must not have wrapped
        around: it has had room for every answer."""
        larger = AnswerStore(2 * self.capacity, self._hashes)
        larger._ring[: self._end] = self._ring[: self._end]
        larger._end, start = self._end, 0
        for position in range(self._end):
            if self._ring[position] == _END:
                larger._note(self._ring[start:position].tolist(), start)
                start = position + 1
        return larger

    def find(self, prefix: Prefix, tokens: list[int], least: int) -> tuple[int, int] | None:
        """Returns where the end of a text was found, and how many tokens agreed; None unless more
        than `least` did. `prefix` has the hashes of the text."""
        return self._index.find(prefix, tokens, self._ring, least)

    def has(self, position: int, tokens: list[int]) -> bool:
        """Returns whether these tokens stand at a position."""
        return self._ring[position : position + len(tokens)].tolist() == tokens

    def at(self, position: int, most: int) -> list[int]:
        """Returns at most `most` tokens from a position to the end of their answer."""
        tokens = self._ring[position : position + most].tolist()
        return tokens[: tokens.index(_END)] if _END in tokens else tokens

    def _note(self, tokens: list[int], start: int) -> None:
        """Enters the tokens of an answer that starts at a position of the ring."""
        prefix = new_prefix()
        self._hashes.extend(prefix, tokens)
        self._index.note(prefix, 0, len(tokens) - 1, start)  # nothing follows the last token


class _AnswerPlace:
    """The place in a store whose continuation a sequence repeats."""

    __slots__ = ("agreed", "num_seen", "position", "store")

    def __init__(self) -> None:
        self.store: AnswerStore | None = None
        self.position = 0  # of the token that is expected next
        self.agreed = 0  # tokens that agreed before it; 0: there is no place
        self.num_seen = 0  # tokens of the sequence that were compared


class PastAnswers:
    """Implements Drafter with one bounded store for each root key of the prefix cache.

    A root key stands for model, adapter and `cache_salt`, so that a request never drafts from an
    answer whose pages it could not share. All stores together hold at most `max_tokens` tokens; the
    store that was used longest ago goes first.
    """

    searches = True

    def __init__(self, max_tokens: int, hashes: TextHashes | None = None) -> None:
        """`hashes` may be shared with other drafters."""
        self._max_tokens = max_tokens
        self._hashes = TextHashes() if hashes is None else hashes
        self._stores: OrderedDict[bytes, AnswerStore] = OrderedDict()
        self._waiting: deque[tuple[bytes, list[int]]] = deque(maxlen=_MAX_WAITING)
        self._places: dict[int, _AnswerPlace] = {}

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in self._stores.values())

    def learn(self, root_key: bytes, sequence: Sequence) -> None:
        """Remembers a finished answer, with the end of its prompt, by which it is found."""
        start = max(0, sequence.num_prompt_tokens - _SIZES[-1])
        self._waiting.append((root_key, sequence.token_ids[start:]))

    @property
    def has_work(self) -> bool:
        """True if answers wait to be entered."""
        return bool(self._waiting)

    def work(self) -> None:
        """Enters answers that were learnt, at most about `_MAX_LEARNT` tokens of them."""
        left = _MAX_LEARNT
        while self._waiting and left > 0:
            root_key, tokens = self._waiting.popleft()
            self._store(root_key, len(tokens)).add(tokens)
            left -= len(tokens)

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        owner = sequence.page_keys[0] if sequence.page_keys else None
        store = None if owner is None else self._stores.get(owner)
        if store is None or owner is None:
            return None
        place = self._places.get(sequence.id)
        if place is None:
            place = self._places[sequence.id] = _AnswerPlace()
        self._follow(place, store, sequence)
        tokens = store.at(place.position, most) if place.agreed else []
        if not tokens:
            return None
        self._stores.move_to_end(owner)
        return Draft(tuple(tokens), DraftSource.SUFFIX, place.agreed)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See Drafter.forget. Stores outlive their sequences."""
        self._hashes.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self._places.pop(sequence_id, None)

    def _follow(self, place: _AnswerPlace, store: AnswerStore, sequence: Sequence) -> None:
        """Moves the place behind the sequence's new tokens, or finds a better one."""
        tokens = sequence.token_ids
        if place.store is not store:  # the owner's store has grown, or is a new one
            place.store, place.agreed = store, 0
        if place.agreed:
            new = tokens[place.num_seen :]
            if store.has(place.position, new):
                place.position += len(new)
                place.agreed = min(place.agreed + len(new), _MAX_AGREED)
            else:
                place.agreed = 0
        place.num_seen = len(tokens)
        if place.agreed < _SIZES[-1]:
            found = store.find(self._hashes.of(sequence), tokens, place.agreed)
            if found is not None:
                place.position, place.agreed = found

    def _store(self, root_key: bytes, num_tokens: int) -> AnswerStore:
        """Returns the owner's store, grown if it would overwrite an answer and has not before."""
        store = self._stores.get(root_key)
        if store is None:
            store = AnswerStore(min(_LEAST_CAPACITY, self._max_tokens), self._hashes)
        while not store.has_room(num_tokens) and 2 * store.capacity <= self._max_tokens:
            store = store.grown()
        self._stores[root_key] = store
        self._stores.move_to_end(root_key)
        num_tokens = sum(each.capacity for each in self._stores.values())
        while num_tokens > self._max_tokens or len(self._stores) > _MAX_STORES:
            num_tokens -= self._stores.popitem(last=False)[1].capacity
        return store
