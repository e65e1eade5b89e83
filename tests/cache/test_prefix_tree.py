"""Keys, the tree of keys, and the order of eviction."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moe_serve.cache.page_key import following_keys, model_identity, root_key, token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.prefix_tree import PrefixTree, num_in_common

ROOT = root_key(b"model", b"", "")


def run_of(*first_tokens: int) -> np.ndarray:
    """Returns tokens for one page per argument t: t, t + 1, ... t + 15."""
    return token_array([token + i for token in first_tokens for i in range(16)])


def test_a_key_names_model_adapter_salt_and_all_tokens_before() -> None:
    roots = {
        root_key(b"model", b"", ""),
        root_key(b"other", b"", ""),
        root_key(b"model", b"1", ""),
        root_key(b"model", b"", "salt"),
        root_key(b"mode", b"", "l"),
        root_key(b"model", b"", "\ud800"),
    }
    assert len(roots) == 6
    first, second = following_keys(ROOT, run_of(1, 100), 16)
    assert following_keys(ROOT, run_of(1), 16) == [first]
    assert following_keys(first, run_of(100), 16) == [second]
    assert following_keys(ROOT, run_of(100), 16) != [second], "the pages before are part of the key"
    assert following_keys(ROOT, run_of(1)[:15], 16) == [], "a page that is not full has no key"
    changed = run_of(1, 100)
    changed[3] += 1
    assert not set(following_keys(ROOT, changed, 16)) & {first, second}


def test_model_identity_sees_config_weights_and_details(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[4]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    first = model_identity(tmp_path, "float32")
    assert first == model_identity(tmp_path, "float32") and len(first) == 32
    found = {first, model_identity(tmp_path, "bfloat16")}
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(15) + b"\1")
    found.add(model_identity(tmp_path, "float32"))
    (tmp_path / "config.json").write_text('{"x": 1}')
    found.add(model_identity(tmp_path, "float32"))
    assert len(found) == 4


def test_num_in_common() -> None:
    for one, other, count in (([], [1], 0), ([1, 2, 3], [1, 2], 2), ([1, 2], [1, 3], 1)):
        assert num_in_common(token_array(one), token_array(other)) == count, f"{one=}, {other=}"


def test_most_alike_looks_at_children_of_one_parent_only() -> None:
    tree = PrefixTree(9, 16)
    (key_a,) = following_keys(ROOT, run_of(1), 16)
    tree.insert(4, key_a, ROOT, run_of(1))
    for page, tokens in ((5, [7] * 5 + [8] * 11), (6, [7] * 9 + [8] * 7), (7, [9] * 16)):
        array = token_array(tokens)
        tree.insert(page, following_keys(key_a, array, 16)[0], key_a, array)
    assert tree.most_alike(key_a, token_array([7] * 7)) == (6, 7)
    assert tree.most_alike(key_a, token_array([7] * 5 + [8] * 9)) == (5, 14)
    assert tree.most_alike(key_a, token_array([6])) == (0, 0)
    assert tree.most_alike(key_a, token_array([])) == (0, 0)
    assert tree.most_alike(ROOT, token_array([7] * 7)) == (0, 0)
    assert tree.most_alike(root_key(b"model", b"", "salt"), run_of(1)) == (0, 0)
    tree.check_integrity()
    for page in (6, 5, 7, 4):  # the head, the only one and the tail of a chain
        tree.remove(page)
        tree.check_integrity()
        assert tree.most_alike(key_a, token_array([7] * 7)) == ((5, 5) if page == 6 else (0, 0))


def test_a_parent_cannot_leave_before_its_children() -> None:
    tree = PrefixTree(3, 16)
    first, second = following_keys(ROOT, run_of(1, 2), 16)
    tree.insert(1, first, ROOT, run_of(1))
    tree.insert(2, second, first, run_of(2))
    with pytest.raises(AssertionError, match="page 1 has 1 children"):
        tree.remove(1)
    with pytest.raises(AssertionError, match="page 3 has the key of page 2"):
        tree.insert(3, second, first, run_of(2))


class Owner:
    """A sequence as the cache sees it: the tokens it wants and the pages it has."""

    def __init__(self, cache: PrefixCache, tokens: np.ndarray) -> None:
        self.keys = following_keys(ROOT, tokens, 16)
        self.found = cache.find(self.keys)
        cache.hold(self.found)
        self.pages = self.found + cache.allocate(len(self.keys) - len(self.found))
        parents = [ROOT, *self.keys]
        rows = tokens.reshape(-1, 16)
        for i, key in enumerate(self.keys):
            self.pages[i] = cache.enter(self.pages[i], key, parents[i], rows[i])


def test_idle_pages_go_leaf_first_and_least_recently_used_first() -> None:
    cache = PrefixCache(6, 16)
    a = Owner(cache, run_of(1, 2, 3))
    b = Owner(cache, run_of(1, 2, 4))
    assert b.found == a.pages[:2] and cache.num_cached == 4
    cache.check_integrity([a.pages, b.pages])
    assert (cache.num_available, cache.num_idle(a.pages)) == (2, 0)
    cache.release(a.pages)
    assert cache.num_available == 3, "only a's last page is nobody's"
    cache.release(b.pages)
    cache.check_integrity([])
    assert cache.num_available == 6
    cache.allocate(3)
    assert cache.find(a.keys) == a.pages[:2], "a's own page was idle for longest"
    cache.allocate(1)
    assert cache.find(b.keys) == b.pages[:2], "then b's leaf, before what both use"
    assert cache.num_evicted == 2


def test_the_same_content_is_kept_once() -> None:
    cache = PrefixCache(6, 16)
    pages = cache.allocate(2)
    (key,) = following_keys(ROOT, run_of(1), 16)
    kept = [cache.enter(page, key, ROOT, run_of(1)) for page in (*pages, pages[0])]
    assert kept == [pages[0]] * 3
    cache.check_integrity([[pages[0]], [pages[0]]])
    assert cache.num_available == 5


def test_forget_drops_idle_leaves_only() -> None:
    cache = PrefixCache(6, 16)
    a = Owner(cache, run_of(1, 2, 3))
    b = Owner(cache, run_of(1, 2))
    cache.release(a.pages)
    assert cache.forget(a.pages) == a.pages[2:], "b uses the others"
    cache.release(b.pages)
    cache.check_integrity([])
    assert cache.forget(b.pages) == b.pages[::-1]
    assert (cache.num_cached, cache.num_available) == (0, 6)


def test_integrity_sees_what_is_wrong() -> None:
    def broken(do: Callable[[PrefixCache, Owner], object], complaint: str) -> None:
        cache = PrefixCache(6, 16)
        owner = Owner(cache, run_of(1, 2, 3))
        cache.release(owner.pages)
        cache.check_integrity([])
        do(cache, owner)
        with pytest.raises(AssertionError, match=complaint):
            cache.check_integrity([])

    broken(lambda c, o: c._idle.move_to_end(o.pages[2]), "be evicted after their parents")
    broken(lambda c, o: c._idle.pop(o.pages[2]), "idle and used, or neither")
    broken(lambda c, o: c._idle.update({6: None}), "1 idle pages have no key")
    broken(lambda c, o: c.hold(o.pages), "held 1 times, recorded 2")
    broken(lambda c, o: c.tree.remove(o.pages[2]), "held 0 times, recorded 1")


@pytest.mark.parametrize("seed", range(4))
def test_random_owners_against_a_model_in_ten_lines(seed: int) -> None:
    """The model keeps paths by their last use. A use marks all prefixes of a path as used, the
    longest first. The path that was marked longest ago is evicted."""
    rng, capacity = random.Random(seed), 24
    cache, order = PrefixCache(capacity, 16), []  # order: token paths, oldest first
    for _ in range(400):
        path = tuple(rng.choice((10, 30, 50)) for _ in range(rng.randint(1, 6)))
        prefixes = [path[:n] for n in range(len(path), 0, -1)]
        known = max((len(p) for p in prefixes if p in order), default=0)
        owner = Owner(cache, run_of(*path))
        assert len(owner.found) == known, f"{seed=}, {path=}"
        order = [p for p in order if p not in prefixes] + prefixes
        order = order[-capacity:] if len(order) > capacity else order
        cache.check_integrity([owner.pages])
        cache.release(owner.pages)
        cache.check_integrity([])
    assert cache.num_cached == len(order) <= capacity
