"""The radix tree of cached prefixes: an edge is one page of tokens, a node the page behind it.

A node is its page number, and its data is in arrays indexed by page: a million pages are a dozen
objects to the garbage collector. The tree knows keys, tokens and pages; it does not know their
users, nor the order of eviction.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.page_key import TOKEN_DTYPE

_NO_TOKEN = -1  # fills the rest of a page that is not full
_NO_PAGE = 0  # page 0 is the empty page; here it means the root, or the end of a chain
_MAX_ALIKE = 8  # number of latest pages compared for a common beginning


class PrefixTree:
    """Nodes 1 .. num_pages by key, and by parent and first token.

    Children of one parent that begin with the same token form a chain, latest first. `most_alike`
    searches this chain for a page with common first tokens.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        size = num_pages + 1
        self._page_of: dict[bytes, int] = {}
        self._key: list[bytes] = [b""] * size
        self._parent_key: list[bytes] = [b""] * size
        self._parent = array("q", bytes(8 * size))
        self._num_children = array("q", bytes(8 * size))
        self._tokens = np.zeros((size, page_size), dtype=TOKEN_DTYPE)
        self._chain: dict[bytes, int] = {}  # parent key and first token -> latest child
        self._earlier = array("q", bytes(8 * size))
        self._later = array("q", bytes(8 * size))

    def __len__(self) -> int:
        return len(self._page_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._page_of.values())

    def __contains__(self, page: int) -> bool:
        return bool(self._key[page])

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def key_of(self, page: int) -> bytes:
        """Returns the key of a page that is in the tree."""
        return self._key[page]

    def is_full(self, page: int) -> bool:
        """Returns whether the page holds as many tokens as it can."""
        return bool(self._tokens[page, -1] != _NO_TOKEN)

    def has_children(self, page: int) -> bool:
        return self._num_children[page] > 0

    def insert(self, page: int, key: bytes, parent_key: bytes, tokens: NDArray[np.int32]) -> None:
        """Adds a page whose parent is in the tree or is the root.

        A page that is not full always stays a leaf; it can only be copied from.
        """
        assert key not in self._page_of, f"page {page} has the key of page {self._page_of[key]}"
        assert page not in self, f"page {page} is in the tree already"
        parent = self._page_of.get(parent_key, _NO_PAGE)
        self._page_of[key] = page
        self._key[page], self._parent_key[page] = key, parent_key
        self._parent[page] = parent
        self._tokens[page, : len(tokens)], self._tokens[page, len(tokens) :] = tokens, _NO_TOKEN
        self._num_children[parent] += 1
        place = _place(parent_key, tokens)
        latest = self._chain.get(place, _NO_PAGE)
        self._earlier[page], self._later[page], self._later[latest] = latest, _NO_PAGE, page
        self._chain[place] = page

    def num_children(self, page: int) -> int:
        return self._num_children[page]

    def remove(self, page: int) -> None:
        """Removes a leaf."""
        assert not self.has_children(page), f"page {page} has {self._num_children[page]} children"
        earlier, later = self._earlier[page], self._later[page]
        self._earlier[later], self._later[earlier] = earlier, later
        if later == _NO_PAGE:
            place = _place(self._parent_key[page], self._tokens[page])
            if earlier == _NO_PAGE:
                del self._chain[place]
            else:
                self._chain[place] = earlier
        self._num_children[self._parent[page]] -= 1
        del self._page_of[self._key[page]]
        self._key[page] = self._parent_key[page] = b""

    def most_alike(self, parent_key: bytes, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """Returns the child of `parent_key` that begins most like `tokens`, as (page, tokens in
        common).

        (0, 0) if no child begins with the first of them. At most a page of tokens is compared, and
        the latest few pages only: a system prompt may have a hundred thousand continuations.
        """
        best, most = _NO_PAGE, 0
        page = self._chain.get(_place(parent_key, tokens), _NO_PAGE) if len(tokens) else _NO_PAGE
        for _ in range(_MAX_ALIKE):
            if page == _NO_PAGE:
                break
            count = num_in_common(self._tokens[page], tokens)
            if count > most:
                best, most = page, count
            page = self._earlier[page]
        return best, most

    def check_integrity(self) -> None:
        """Checks that keys, parents and counts agree; raises with the wrong page."""
        pages = np.fromiter(self._page_of.values(), np.int64, len(self._page_of))
        held = [self._key[page] for page in self._page_of.values()]
        assert held == list(self._page_of), "a key leads to a page with another key"
        num_keyed = len(self._key) - self._key.count(b"")
        assert num_keyed == len(pages), f"{num_keyed} pages have a key, {len(pages)} are found"
        parents = np.frombuffer(self._parent, np.int64)[pages]
        counted = np.bincount(parents, minlength=len(self._key))
        wrong = np.flatnonzero(counted != np.frombuffer(self._num_children, np.int64))
        assert not len(wrong), f"page {wrong[:1]}: {counted[wrong[:1]]} children counted"
        is_known = np.zeros(len(self._key), dtype=bool)
        is_known[pages], is_known[_NO_PAGE] = True, True
        lost = parents[~is_known[parents]].tolist()
        assert not lost, f"pages {lost[:5]} left the tree before their children"

    def parents_of(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the parents of pages; 0 is the root."""
        return np.frombuffer(self._parent, np.int64)[pages]


def num_in_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Returns the number of tokens that two runs have in common at their beginning."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _place(parent_key: bytes, tokens: NDArray[np.int32]) -> bytes:
    return parent_key + tokens[:1].tobytes()
