"""Shares computed pages between sequences.

A sequence gives a page once it is full, its step has succeeded and its values are finite. Another
one takes it by reference if it wants all its tokens, or copies it if it wants only the first
tokens (copy on write: it will write the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.page_key import page_key, root_key, token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.prefix_tree import num_in_common
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.kv_tier import KVTier, MakeTier

# On a CPU, copying and checking a page takes about the time of one token of a prompt.
_LEAST_COPIED_TOKENS = 2


class PrefixSharing:
    """Connects the scheduler's sequences with the cache. With `model_identity` None nothing is
    shared."""

    def __init__(
        self,
        cache: PrefixCache,
        model_identity: bytes | None,
        finite_pages: Callable[[list[int]], list[bool]],
        make_tier: MakeTier | None = None,
        window: int | None = None,
    ) -> None:
        """`make_tier` makes the tier that receives the pages that sequences give. For `window` see
        `free_behind_window`; with None the model looks at all tokens.
        """
        self._window = window
        self._cache, self._identity, self._finite_pages = cache, model_identity, finite_pages
        self._page_size = cache.page_size
        self.tier = KVTier() if make_tier is None else make_tier(cache)
        self._computing: dict[bytes, int] = {}  # key of a page -> the sequence that will give it
        self._copies: list[tuple[int, int]] = []
        self.num_queried_tokens = self.num_hit_tokens = 0

    @property
    def is_due(self) -> bool:
        """Returns whether running sequences should give their full pages now, to a tier or for
        others to use.
        """
        return self.tier.is_due or self._cache.listener.is_due

    def register(self, sequence: Sequence) -> None:
        """Gives a new sequence the root key from which its page keys start. Keys that were found
        before are kept."""
        root = self.root_of(sequence)
        if sequence.page_keys[:1] != root:
            sequence.page_keys = root

    def root_of(self, sequence: Sequence) -> list[bytes]:
        """Returns the root key of a sequence; empty: nothing is shared here."""
        if self._identity is None:
            return []
        request = sequence.request
        return [root_key(self._identity, request.adapter_digest, request.cache_salt)]

    def find(self, sequence: Sequence) -> list[int] | None:
        """Returns the cached pages that a waiting sequence can start with.

        Returns None if it should wait because a running sequence is computing the next page. At
        least its last token is left to compute, for the logits. A request for the prompt's log
        probabilities needs the logits of all its tokens, so it takes nothing.
        """
        if not sequence.can_share or sequence.wants_prompt_logprobs:
            return []
        if sequence.awaited_key in self._computing or self.tier.awaits(sequence):
            return None
        num_wanted = sequence.num_plain(sequence.num_tokens - 1) // self._page_size
        sequence.extend_keys(num_wanted)
        keys = sequence.page_keys[1 : num_wanted + 1]
        pages = self._cache.find(keys)
        sequence.awaited_key = keys[len(pages)] if len(pages) < num_wanted else None
        return None if sequence.awaited_key in self._computing else pages

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Returns how many tokens of a waiting sequence are in the cache now."""
        if not sequence.can_share or sequence.wants_prompt_logprobs:
            return 0
        num_wanted = sequence.num_plain(sequence.num_tokens - 1) // self._page_size
        sequence.extend_keys(num_wanted)
        return len(self._cache.find(sequence.page_keys[1 : num_wanted + 1])) * self._page_size

    def take(
        self, sequence: Sequence, pages: list[int], running: Iterable[Sequence], *, can_copy: bool
    ) -> None:
        """Starts a sequence with the pages found, and the beginning of one more if some page has
        it. Registers the pages that it will compute."""
        assert not sequence.page_table, f"sequence {sequence.id} has pages before it starts"
        self._cache.hold(pages)
        sequence.page_table = list(pages)
        sequence.num_computed_tokens = len(pages) * self._page_size
        sequence.num_shared_pages = sequence.num_found_pages = len(pages)
        if not sequence.can_share:
            return
        if not sequence.wants_prompt_logprobs:
            if can_copy:
                self._copy_beginning(sequence, running)
            self._count(sequence)
        num_full = sequence.num_plain(sequence.num_tokens) // self._page_size
        sequence.extend_keys(num_full)
        for key in sequence.page_keys[len(pages) + 1 : num_full + 1]:
            self._computing.setdefault(key, sequence.id)

    def _count(self, sequence: Sequence) -> None:
        if sequence.started_at is None:  # after a restart it would find its own pages
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens

    def _copy_beginning(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Requests a copy of the page that begins most like the sequence's next one."""
        start, most = sequence.num_computed_tokens, sequence.num_plain(sequence.num_tokens - 1)
        wanted = sequence.tokens(start, min(start + self._page_size, most))
        if len(wanted) < _LEAST_COPIED_TOKENS:
            return
        source, count = self._most_alike(sequence, wanted, running)
        if count < _LEAST_COPIED_TOKENS:
            return
        self._cache.hold([source])
        (target,) = self._cache.allocate(1)
        sequence.page_table.append(target)
        sequence.num_computed_tokens += count
        self._copies.append((source, target))

    def _most_alike(
        self, sequence: Sequence, wanted: NDArray[np.int32], running: Iterable[Sequence]
    ) -> tuple[int, int]:
        """Returns a page and the number of its tokens that match. It is a cached page, or the last
        one of a running sequence (n > 1, equal prompts) whose values are finite so far."""
        index = sequence.num_shared_pages
        parent_key, start = sequence.page_keys[index], index * self._page_size
        best, most = self._cache.tree.most_alike(parent_key, wanted)
        for other in running:
            if other.num_computed_tokens - start <= most or other.num_full_pages != index:
                continue  # it cannot match more
            if other.num_shared_pages != index or not other.can_share:
                continue
            if other.page_keys[index] != parent_key or other.token_ids[start] != wanted[0]:
                continue
            tail = other.token_ids[start : other.num_plain(other.num_computed_tokens)]
            count = num_in_common(token_array(tail), wanted)
            if count > most and self._is_copyable(other.page_table[index]):
                best, most = other.page_table[index], count
        return best, most

    def _is_copyable(self, page: int) -> bool:
        """Returns whether the page's values are finite and written, so it is not itself a copy's
        target."""
        is_written = all(page != target for _, target in self._copies)
        return is_written and self._finite_pages([page]) == [True]

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Pages to copy before the next step runs, as (from, to). The sources are held."""
        return self._copies

    def end_copies(self) -> None:
        """Releases the sources, as the copies are made."""
        for source, _ in self._copies:
            self._cache.release([source])
        self._copies = []

    def give(self, sequences: Iterable[Sequence], *, is_end: bool = False) -> None:
        """Makes the newly filled pages of sequences visible to all; at their end also the last,
        partial page.

        Called on demand, so that the pages of many steps are checked at once. Without the cache
        they are checked at the end, as the next owner must not find a NaN there.
        """
        fresh = []
        for sequence in sequences:
            if is_end and sequence.is_detached:
                self._undo_copies(sequence)
            if not (sequence.can_share or (is_end and sequence.is_sound)):
                continue
            num_tokens = sequence.num_computed_tokens
            if not sequence.is_detached:
                num_tokens = sequence.num_plain(num_tokens)
            num_pages, rest = divmod(num_tokens, self._page_size)
            num_pages += is_end and rest >= _LEAST_COPIED_TOKENS
            if num_pages > sequence.num_shared_pages:
                fresh.append((sequence, range(sequence.num_shared_pages, num_pages)))
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
        if self._identity is None or not sequence.page_keys or sequence.is_detached:
            return
        size, end = self._page_size, sequence.num_plain(sequence.num_computed_tokens)
        sequence.extend_keys(min(span.stop, end // size))
        start = span.start * size
        ids = sequence.tokens(start, min(span.stop * size, end))
        origin = sequence.request.page_origin
        for index in span:
            tokens = ids[index * size - start :][:size]
            parent_key, is_full = sequence.page_keys[index], len(tokens) == size
            key = sequence.page_keys[index + 1] if is_full else page_key(parent_key, tokens)
            own = sequence.page_table[index]
            page = self._cache.enter(own, key, parent_key, tokens, origin)
            sequence.page_table[index] = page
            if is_full and page == own:
                self.tier.entered(page, key, parent_key)
            sequence.num_shared_pages += is_full
            self._computing.pop(key, None)

    def truncate(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Takes back the pages behind a sequence's first `num_tokens` tokens, of which at most
        these are then computed. Returns the pages that are now free.

        A page that others can see is never written again. If the tokens end within such a page, it
        is taken back too, and its tokens are computed again on another page.
        """
        size = self._page_size
        num_kept = -(-num_tokens // size)
        if num_tokens % size and num_kept <= sequence.num_shared_pages:
            num_kept -= 1
        num_computed = min(num_tokens, num_kept * size)
        if num_computed < sequence.num_computed_tokens:
            self.stop_computing(sequence)  # others need not wait longer than before
            sequence.num_computed_tokens = num_computed
            sequence.num_shared_pages = min(sequence.num_shared_pages, num_kept)
            sequence.num_found_pages = min(sequence.num_found_pages, num_kept)
            del sequence.prompt_logprobs[num_computed:]
        freed = self._cache.release([page for page in sequence.page_table[num_kept:] if page])
        del sequence.page_table[num_kept:]
        return freed

    def free_behind_window(self, running: Items[Sequence]) -> list[int]:
        """Takes back the pages that lie behind the window of a running sequence's next token, when
        pages run out. Returns those that are now free.

        The tree needs every page before a page that it has. So all pages of the sequence leave the
        tree, unless another sequence uses them, and the sequence shares nothing that it computes
        later.
        """
        freed: list[int] = []
        for sequence in running if self._window is not None else ():
            if sequence.kv_window is not None:
                continue  # it gives pages back by its own rule
            num_hidden = sequence.num_computed_tokens + 1 - (self._window or 0)
            behind = [p for p in sequence.page_table[: max(0, num_hidden) // self._page_size] if p]
            if not behind or not self._cache.withdraw(
                sequence.page_table[: sequence.num_shared_pages]
            ):
                continue
            self.stop_computing(sequence)
            sequence.page_keys, sequence.awaited_key = [], None
            sequence.num_shared_pages = sequence.num_found_pages = 0
            freed += self._cache.release(behind)
            hidden = set(behind)
            sequence.page_table = [0 if p in hidden else p for p in sequence.page_table]
        return freed

    def drop_hidden(self, sequences: Items[Sequence]) -> list[int]:
        """Takes back the pages that no further row of a sequence with a `kv_window` sees. Returns
        those that are now free.

        A page of the tree that is in use needs the pages before it. So the sequence continues on
        copies of the shared pages that it still sees. The others are taken back when these are
        made.
        """
        freed: list[int] = []
        for sequence in sequences:
            hidden = sequence.hidden_pages(sequence.num_computed_tokens)
            if not hidden or not sequence.page_table[hidden.stop - 1]:
                continue
            if not sequence.owns_pages:
                needed = sum(max(0, s.num_missing_pages(s.num_tokens + 1)) for s in sequences)
                if not self._detach(sequence, hidden.stop, self._cache.num_available - needed):
                    continue
            table = sequence.page_table
            freed += self._cache.release(
                [page for page in table[hidden.start : hidden.stop] if page]
            )
            table[hidden.start : hidden.stop] = [0] * len(hidden)
        return freed

    def _detach(self, sequence: Sequence, first: int, room: int) -> bool:
        """Replaces the pages from index `first` on that others can see with copies, the last one
        first. If there is no room for a copy, takes all of them out of the tree, unless another
        sequence uses them. Returns True if the sequence owns these pages now.
        """
        if not sequence.is_detached:
            self.give([sequence])
            self.stop_computing(sequence)
            sequence.num_shared_pages = sequence.num_found_pages = 0
            sequence.is_detached = True
        table, tree = sequence.page_table, self._cache.tree
        end = next((i for i, page in enumerate(table) if page not in tree), len(table))
        is_own = end <= first or (room <= 0 and self._cache.withdraw(table[:end]))
        for index in range(end - 1, max(first, end - room) - 1, -1) if not is_own else ():
            (target,) = self._cache.allocate(1)
            self._copies.append((table[index], target))  # it now holds the source
            table[index] = target
        sequence.owns_pages = is_own
        return is_own

    def _undo_copies(self, sequence: Sequence) -> None:
        """Puts shared pages back into the table of a sequence that ends before they are copied."""
        place = {page: index for index, page in enumerate(sequence.page_table)}
        for source, target in [pair for pair in self._copies if pair[1] in place]:
            self._copies.remove((source, target))
            sequence.page_table[place[target]] = source
            self._cache.release([target])

    def must_detach(self, sequences: Iterable[Sequence]) -> bool:
        """Returns whether one of the sequences has to leave the tree before it computes its next
        token but one."""
        return any(s.hidden_pages(s.num_tokens) and not s.owns_pages for s in sequences)

    def stop_computing(self, sequence: Sequence) -> None:
        """Records that the sequence will give no more pages, so that nothing waits for them."""
        for key in sequence.page_keys[sequence.num_shared_pages + 1 :]:
            if self._computing.get(key) == sequence.id:
                del self._computing[key]

    def check_integrity(self, running: Items[Sequence]) -> None:
        """Asserts that only running sequences are waited for, and that shared pages are in the
        tree."""
        lost = set(self._computing.values()) - {s.id for s in running}
        assert not lost, f"sequences {lost} do not run, but others wait for their pages"
        for sequence in running:
            shared = sequence.page_table[: sequence.num_shared_pages]
            keys = sequence.page_keys[1 : sequence.num_shared_pages + 1]
            found = [self._cache.tree.find(key) for key in keys]
            assert found == shared, f"sequence {sequence.id} shares {shared}, cached are {found}"
