"""Encrypted pages: nothing readable on the disk, and one key for a folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_serve.cache.tiers.disk_folder import DiskFolder, StoreIdentity
from moe_serve.cache.tiers.disk_report import clear, report
from moe_serve.cache.tiers.disk_space import DiskLimits
from moe_serve.cache.tiers.disk_store import DiskStore
from moe_serve.cache.tiers.page_cipher import DiskKey
from moe_serve.cache.tiers.slot import ALIGNMENT, HEADER_BYTES
from moe_serve.cache.tiers.store import LoadDone, SavedPage
from moe_serve.errors import ConfigError

pytest.importorskip("cryptography")

PAGE = 70_000  # more than is encrypted at a time
LIMITS = DiskLimits(max_bytes=2**23, min_free_bytes=0)
NUM_PAGES = 3


def key_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def page_of(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, PAGE, dtype=np.uint8)


def open_store(folder: Path, key: Path | None, limits: DiskLimits = LIMITS) -> DiskStore:
    disk_key = None if key is None else DiskKey.read(key, folder)
    claimed = DiskFolder.claim(folder)
    try:
        store = DiskStore(
            claimed,
            limits,
            page_bytes=PAGE,
            geometry=b"g" * 32,
            identify=lambda: StoreIdentity(b"i" * 32, {"encryption": "aes-256-gcm"}),
            key=disk_key,
        )
    except ConfigError:
        claimed.release()
        raise
    wait_for(lambda: store.stats().is_reading)
    return store


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 20 s"
        time.sleep(0.002)


def written(folder: Path, key: Path | None, numbers: range = range(NUM_PAGES)) -> None:
    store = open_store(folder, key)
    for number in numbers:
        store.save(SavedPage(key_of(number), key_of(number - 1), 16, page_of(number)))
    store.close(5)


def read(folder: Path, key: Path) -> list[bytes]:
    """Returns the pages that a new server reads."""
    store = open_store(folder, key)
    keys = [key_of(number) for number in range(NUM_PAGES)]
    found = loaded(store, keys)
    store.close(5)
    return found


def loaded(store: DiskStore, keys: list[bytes]) -> list[bytes]:
    store.load(1, keys)
    done: list[LoadDone] = []

    def is_done() -> bool:
        done.extend(store.take_done())
        return bool(done)

    wait_for(is_done)
    return [page.tobytes() for page in done[0].pages]


def new_key(path: Path, content: bytes | None = None) -> Path:
    path.write_bytes(os.urandom(32) if content is None else content)
    path.chmod(0o600)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return new_key(tmp_path / "key")


def test_a_restart_reads_the_pages_and_the_files_show_nothing(folder: Path, key: Path) -> None:
    written(folder, key)
    assert read(folder, key) == [page_of(number).tobytes() for number in range(NUM_PAGES)]
    store = open_store(folder, key)
    assert store.num_held([key_of(n) for n in (0, 1, 99, 2)]) == 2 and store.has(key_of(2))
    store.close(5)
    stored = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for number in range(NUM_PAGES):
        page = page_of(number).tobytes()
        assert not any(page[at : at + 16] in stored for at in range(0, PAGE - 16, 1000))
        assert key_of(number) not in stored and sha256(page).digest() not in stored
    assert key.read_bytes() not in stored


def test_equal_pages_are_not_equal_on_the_disk(folder: Path, key: Path, tmp_path: Path) -> None:
    texts = []
    for where in (folder, tmp_path / "other"):
        written(where, key)
        (path,) = where.glob("*/*.kv")
        texts.append(path.read_bytes()[2 * ALIGNMENT : 2 * ALIGNMENT + PAGE])
    assert texts[0] != texts[1]


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + 12, ALIGNMENT, ALIGNMENT + PAGE - 1])
def test_a_flipped_bit_of_nonce_tag_or_content_is_no_page(folder: Path, key: Path, at: int) -> None:
    written(folder, key)
    (path,) = folder.glob("*/*.kv")
    with path.open("r+b") as file:
        file.seek(ALIGNMENT + at)  # of the first slot
        byte = file.read(1)[0]
        file.seek(ALIGNMENT + at)
        file.write(bytes([byte ^ 1]))
    assert read(folder, key) == []


def test_a_page_that_was_encrypted_for_another_name_is_refused(folder: Path, key: Path) -> None:
    """The HMAC of a header needs no key file, so it alone does not prove whose page this is."""
    written(folder, key)
    cipher = DiskKey.read(key, folder).cipher(b"salt")
    data, seal = cipher.encrypt(page_of(1), b"name 1")
    opened = cipher.decrypt(data, b"name 1", seal)
    assert opened is not None and opened.tobytes() == page_of(1).tobytes()
    assert cipher.decrypt(data, b"name 2", seal) is None
    other = DiskKey.read(key, folder).cipher(b"other salt")
    assert other.decrypt(data, b"name 1", seal) is None


def test_a_page_gets_its_second_chance_encrypted(folder: Path, key: Path) -> None:
    limits = DiskLimits(max_bytes=4 * 6 * (PAGE + 3 * ALIGNMENT), min_free_bytes=0)
    store = open_store(folder, key, limits)
    for number in range(60):
        store.save(SavedPage(key_of(number), key_of(number - 1), 16, page_of(number)))
        wait_for(lambda: store.stats().num_queued == 0)
        if number % 3 == 2:
            assert loaded(store, [key_of(0)]) == [page_of(0).tobytes()]
    assert store.stats().num_evicted > 0
    store.close(5)


def test_a_folder_has_one_key(folder: Path, key: Path, tmp_path: Path) -> None:
    written(folder, key)
    other = new_key(tmp_path / "other")
    with pytest.raises(ConfigError, match="is not the key of the pages"):
        open_store(folder, other)
    with pytest.raises(ConfigError, match="has encrypted pages"):
        open_store(folder, None)
    (before,) = report(folder, now=time.time(), verifies=True)
    assert (before.num_pages, before.num_wrong, before.is_encrypted) == (NUM_PAGES, 0, True)
    assert clear(folder) > 0
    written(folder, other)
    assert len(read(folder, other)) == NUM_PAGES


def test_plain_pages_are_not_joined_by_encrypted_ones(folder: Path, key: Path) -> None:
    written(folder, None)
    with pytest.raises(ConfigError, match="are not encrypted"):
        open_store(folder, key)


def test_key_files_that_are_refused(
    folder: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            DiskKey.read(path, folder)

    refused(tmp_path / "none", "cannot be read: No such file")
    refused(tmp_path, "cannot be read: Is a directory")
    refused(new_key(tmp_path / "short", b"x" * 31), "must be a file of 32 bytes, not of 31")
    refused(new_key(tmp_path / "long", b"x" * 33), "must be a file of 32 bytes, not of 33")
    folder.mkdir(mode=0o700)
    refused(new_key(folder / "key"), "is inside cache.disk_path")
    key.chmod(0o640)
    refused(key, r"is open to other users \(mode 640\)")
    key.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        refused(key, "belongs to user")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    refused(key, r"moe-serve\[encryption\]")
