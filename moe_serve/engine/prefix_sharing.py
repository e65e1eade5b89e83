"""What sequences take from each other's computed pages, and what they give.

A page is given once it is full, its step has succeeded and its values are finite. It is taken by
reference when all its 16 tokens are wanted, and copied when only its first tokens are (copy on
write: the taker will write the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from moe_serve.cache.page_key import root_key, token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.prefix_tree import num_in_common
from moe_serve.config import PAGE_SIZE
from moe_serve.engine.sequence import Sequence

# A copy touches each layer a few times whatever it saves; two tokens' worth of work, measured.
_LEAST_COPIED_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What is there for a sequence that starts: whole pages, then the beginning of one more."""

    pages: tuple[int, ...] = ()
    copied_page: int = 0  # 0: none
    num_copied_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.pages) * PAGE_SIZE + self.num_copied_tokens

    @property
    def held_pages(self) -> tuple[int, ...]:
        """Pages that must stay while the offer stands."""
        return (*self.pages, self.copied_page) if self.copied_page else self.pages


class PrefixSharing:
    """Between the scheduler's sequences and the cache. `model_identity` None: nothing is shared."""

    def __init__(
        self,
        cache: PrefixCache,
        model_identity: bytes | None,
        finite_pages: Callable[[list[int]], list[bool]],
    ) -> None:
        self._cache, self._identity, self._finite_pages = cache, model_identity, finite_pages
        self._computing: dict[bytes, int] = {}  # key of a page -> the sequence that will give it
        self._copies: list[tuple[int, int]] = []
        self.num_queried_tokens = self.num_hit_tokens = 0

    def register(self, sequence: Sequence) -> None:
        """Give a new sequence the key that its pages' keys start from."""
        request = sequence.request
        if self._identity is not None:
            root = root_key(self._identity, request.adapter_id, request.cache_salt)
            sequence.page_keys.append(root)

    def find(self, sequence: Sequence, running: Iterable[Sequence]) -> Offer | None:
        """What a waiting sequence can take, or None: it should wait for what is being computed.

        At least its last token is left to compute, for the logits. A request for the prompt's log
        probabilities needs the logits of all its tokens, so it takes nothing.
        """
        if not sequence.can_share or sequence.wants_prompt_logprobs:
            return Offer()
        if sequence.awaited_key in self._computing:
            return None
        most = sequence.num_tokens - 1
        num_wanted = most // PAGE_SIZE
        sequence.extend_keys(num_wanted)
        pages = self._cache.find(sequence.page_keys[1 : num_wanted + 1])
        parent_key, *following = sequence.page_keys[len(pages) : len(pages) + 2]
        sequence.awaited_key = following[0] if following and len(pages) < num_wanted else None
        if sequence.awaited_key in self._computing:
            return None
        start = len(pages) * PAGE_SIZE
        wanted = sequence.token_ids[start : min(start + PAGE_SIZE, most)]
        source, count = self._most_alike(parent_key, wanted, len(pages), running)
        if count < _LEAST_COPIED_TOKENS:
            return Offer(pages=tuple(pages))
        return Offer(pages=tuple(pages), copied_page=source, num_copied_tokens=count)

    def _most_alike(
        self, parent_key: bytes, wanted: list[int], index: int, running: Iterable[Sequence]
    ) -> tuple[int, int]:
        """A page to copy and how many tokens of it: a cached one, or the last of a sequence that
        runs (n > 1, equal prompts), if its values are finite so far."""
        tokens = token_array(wanted)
        best, most = self._cache.tree.most_alike(parent_key, tokens)
        for other in running:
            if other.num_full_pages != index or other.num_shared_pages != index:
                continue
            if not other.can_share or other.page_keys[index] != parent_key:
                continue
            tail = other.token_ids[index * PAGE_SIZE : other.num_computed_tokens]
            count = num_in_common(token_array(tail), tokens)
            if count > most and self._is_copyable(other.page_table[index]):
                best, most = other.page_table[index], count
        return best, most

    def _is_copyable(self, page: int) -> bool:
        """Its values are there (it is not itself about to be copied to), and finite."""
        is_written = all(page != target for _, target in self._copies)
        return is_written and self._finite_pages([page]) == [True]

    def take(self, sequence: Sequence, offer: Offer) -> None:
        """Start a sequence with what it was offered, and tell others what it will compute."""
        assert not sequence.page_table, f"sequence {sequence.id} has pages before it starts"
        self._cache.hold(offer.held_pages)
        sequence.page_table = list(offer.pages)
        if offer.copied_page:
            (target,) = self._cache.allocate(1)
            sequence.page_table.append(target)
            self._copies.append((offer.copied_page, target))
        sequence.num_computed_tokens = offer.num_tokens
        sequence.num_shared_pages = sequence.num_found_pages = len(offer.pages)
        if not sequence.can_share:
            return
        num_full = sequence.num_tokens // PAGE_SIZE
        sequence.extend_keys(num_full)
        for key in sequence.page_keys[sequence.num_shared_pages + 1 : num_full + 1]:
            self._computing.setdefault(key, sequence.id)
        if not (sequence.wants_prompt_logprobs or sequence.num_preemptions):
            sequence.num_cached_tokens = offer.num_tokens
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += offer.num_tokens

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Pages to copy before the next step runs, (from, to) each; the sources are held."""
        return self._copies

    def end_copies(self) -> None:
        """The copies are made: let go of their sources."""
        for source, _ in self._copies:
            self._cache.release([source])
        self._copies = []

    def give(self, sequences: Iterable[Sequence]) -> None:
        """Make the newly filled pages of sequences visible to all.

        Cheap while nobody asks: all pages of the step, or of many steps, are checked in one go.
        """
        fresh = [
            (sequence, range(sequence.num_shared_pages, sequence.num_full_pages))
            for sequence in sequences
            if sequence.can_share and sequence.num_shared_pages < sequence.num_full_pages
        ]
        if not fresh:
            return
        pages = [sequence.page_table[index] for sequence, span in fresh for index in span]
        verdicts = iter(self._finite_pages(pages))
        for sequence, span in fresh:
            is_finite = [next(verdicts) for _ in span]
            if all(is_finite):
                self._enter(sequence, span)
            else:
                sequence.is_sound = False
                self._enter(sequence, span[: is_finite.index(False)])
                self.stop_computing(sequence)

    def _enter(self, sequence: Sequence, span: range) -> None:
        sequence.extend_keys(span.stop)
        ids = token_array(sequence.token_ids[span.start * PAGE_SIZE : span.stop * PAGE_SIZE])
        for index, tokens in zip(span, ids.reshape(-1, PAGE_SIZE), strict=True):
            parent_key, key = sequence.page_keys[index : index + 2]
            page = self._cache.enter(sequence.page_table[index], key, parent_key, tokens)
            sequence.page_table[index] = page
            self._computing.pop(key, None)
        sequence.num_shared_pages = span.stop

    def stop_computing(self, sequence: Sequence) -> None:
        """It will give no more pages: nobody waits for it any longer."""
        for key in sequence.page_keys[sequence.num_shared_pages + 1 :]:
            if self._computing.get(key) == sequence.id:
                del self._computing[key]

    def check_integrity(self, running: Items[Sequence]) -> None:
        """Only pages of running sequences are waited for, and shared pages are in the tree."""
        lost = set(self._computing.values()) - {s.id for s in running}
        assert not lost, f"sequences {lost} do not run and are waited for"
        for sequence in running:
            shared = sequence.page_table[: sequence.num_shared_pages]
            keys = sequence.page_keys[1 : sequence.num_shared_pages + 1]
            found = [self._cache.tree.find(key) for key in keys]
            assert found == shared, f"sequence {sequence.id} shares {shared}, cached are {found}"
