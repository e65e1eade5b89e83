"""Pages on a disk are found again, stay within a bound, and are never wrong, even in damaged
files."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_serve.cache.tiers import segment as segment_module
from moe_serve.cache.tiers.disk_folder import DiskFolder, StoreIdentity
from moe_serve.cache.tiers.disk_reader import _ReadRun
from moe_serve.cache.tiers.disk_report import clear, report
from moe_serve.cache.tiers.disk_space import DiskLimits
from moe_serve.cache.tiers.disk_store import DiskStore
from moe_serve.cache.tiers.segment import Segment
from moe_serve.cache.tiers.slot import ALIGNMENT
from moe_serve.cache.tiers.store import LoadDone, SavedPage
from moe_serve.errors import ConfigError

PAGE = 3000  # bytes, not a multiple of the alignment
SLOT = 2 * ALIGNMENT
GEOMETRY = sha256(b"geometry").digest()
FEW = DiskLimits(max_bytes=4 * 10 * SLOT, min_free_bytes=0)  # 4 files of few slots


def key_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def page_of(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, PAGE, dtype=np.uint8)


def open_store(
    path: Path,
    limits: DiskLimits = FEW,
    identity: bytes = b"i" * 32,
    clock: Callable[[], float] = time.time,
) -> DiskStore:
    store = DiskStore(
        DiskFolder.claim(path),
        limits,
        page_bytes=PAGE,
        geometry=GEOMETRY,
        identify=lambda: StoreIdentity(identity, {}),
        wall_clock=clock,
    )
    wait_for(lambda: store.stats().is_reading)
    return store


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 20 s"
        time.sleep(0.002)


def save(store: DiskStore, numbers: range) -> None:
    expected = sum(store.stats().saves.values()) + len(numbers)
    for number in numbers:
        store.save(SavedPage(key_of(number), key_of(number - 1), 16, page_of(number)))
        wait_for(lambda: store.stats().num_queued == 0)
    wait_for(lambda: sum(store.stats().saves.values()) == expected)


def load(store: DiskStore, numbers: range) -> list[bytes]:
    store.load(7, [key_of(number) for number in numbers])
    done = []
    wait_for(lambda: bool(done.extend(store.take_done()) or done))
    assert done[0].job == 7
    return [page.tobytes() for page in done[0].pages]


def pages_of(numbers: range) -> list[bytes]:
    return [page_of(number).tobytes() for number in numbers]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def filled(folder: Path) -> Iterator[Path]:
    """Makes a folder with 5 pages and returns its only file of slots."""
    store = open_store(folder)
    save(store, range(5))
    store.close(5)
    yield next(folder.glob("*/*.kv"))


def test_pages_are_found_again(folder: Path) -> None:
    store = open_store(folder)
    assert store.num_held([key_of(0)]) == 0
    save(store, range(5))
    assert load(store, range(5)) == pages_of(range(5))
    store.close(5)
    again = open_store(folder)
    assert again.num_held([key_of(number) for number in range(6)]) == 5
    assert load(again, range(5)) == pages_of(range(5))
    assert load(again, range(3, 9)) == pages_of(range(3, 5)), "a run ends at the first page missing"
    save(again, range(5, 7))  # the open file is filled further
    assert len(list(folder.glob("*/*.kv"))) == 1
    again.close(5)


def test_files_are_private(filled: Path, folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        assert not path.stat().st_mode & 0o077, f"{path} is open to others"


def test_a_second_server_is_refused(folder: Path) -> None:
    store = open_store(folder)
    with pytest.raises(ConfigError, match="in use by another process"):
        DiskFolder.claim(folder)
    with pytest.raises(ConfigError, match="cannot be cleared, because a server uses it: stop"):
        clear(folder)
    store.close(5)
    DiskFolder.claim(folder).release()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o704])
def test_an_open_folder_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 700"):
        DiskFolder.claim(folder)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_all_write_into_is_not_to_be_closed(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"mode {mode:o}\): .* of its own, such as .*/shared/"
    ) as refused:
        DiskFolder.claim(folder)
    assert "chmod" not in str(refused.value)


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is a link or a file"):
        DiskFolder.claim(tmp_path / "link")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be used"):
        DiskFolder.claim(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        DiskFolder.claim(folder)


def test_a_bound_that_is_too_small_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache.disk_bytes is 1000, .* at least \d+"):
        open_store(folder, DiskLimits(max_bytes=1000))


@pytest.mark.parametrize("byte", [0, 8, 20, 40, 60, 100, 140, 200, ALIGNMENT, ALIGNMENT + 2999])
def test_a_flipped_bit_is_a_page_not_found(filled: Path, folder: Path, byte: int) -> None:
    with filled.open("r+b") as file:
        file.seek(ALIGNMENT + 2 * SLOT + byte)
        (value,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value ^ 4]))
    store = open_store(folder)
    assert load(store, range(5)) == pages_of(range(2))
    assert load(store, range(3, 5)) == pages_of(range(3, 5))
    save(store, range(2, 3))  # it can be stored again
    assert load(store, range(5)) == pages_of(range(5))
    store.close(5)


@pytest.mark.parametrize("size", [0, 10, ALIGNMENT, ALIGNMENT + 3 * SLOT + 50, 5 * SLOT])
def test_a_file_that_was_cut(filled: Path, folder: Path, size: int) -> None:
    os.truncate(filled, size)
    store = open_store(folder)
    found = load(store, range(5))
    assert found == pages_of(range(len(found))) and len(found) <= max(0, size - ALIGNMENT) // SLOT
    save(store, range(5, 8))
    assert load(store, range(5, 8)) == pages_of(range(5, 8))
    store.close(5)


class _KilledError(Exception):
    """Ends the thread that writes, as a kill does."""


@pytest.mark.parametrize("size", [0, 100, ALIGNMENT, ALIGNMENT + 1000])
def test_a_kill_inside_a_write_cuts_that_page_alone(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(descriptor: int, buffers: list[bytes], offset: int) -> int:
        os.pwrite(descriptor, b"".join(map(bytes, buffers))[:size], offset)
        raise _KilledError

    store = open_store(folder)
    save(store, range(3))
    monkeypatch.setattr(segment_module.os, "pwritev", cut)
    store.save(SavedPage(key_of(3), key_of(2), 16, page_of(3)))
    wait_for(lambda: not store.stats().is_writing)
    store.close(5)
    monkeypatch.undo()
    is_seen = size >= ALIGNMENT  # the header is whole, and its page is not
    (found,) = report(folder, now=time.time(), verifies=True)
    assert (found.num_pages, found.num_wrong) == (3 + is_seen, int(is_seen))
    store = open_store(folder)
    assert load(store, range(5)) == pages_of(range(3))
    save(store, range(3, 5))
    assert load(store, range(5)) == pages_of(range(5))
    store.close(5)
    (found,) = report(folder, now=time.time(), verifies=True)
    assert (found.num_pages, found.num_wrong) == (5 + is_seen, int(is_seen))


def test_a_file_of_zeros_or_of_another_server(filled: Path, folder: Path) -> None:
    data = filled.read_bytes()
    secret = filled.parent / "mac.key"
    secret.write_bytes(b"x" * 32)  # as if it came from another server
    store = open_store(folder)
    assert load(store, range(5)) == []
    store.close(5)
    filled.write_bytes(bytes(len(data)))
    store = open_store(folder)
    assert load(store, range(5)) == []
    store.close(5)


def test_a_damaged_secret_begins_anew(filled: Path, folder: Path) -> None:
    (filled.parent / "mac.key").write_bytes(b"short")
    store = open_store(folder)
    assert store.stats().num_pages == 0
    save(store, range(2))
    assert load(store, range(2)) == pages_of(range(2))
    store.close(5)


def test_other_identities_share_nothing_and_give_way(filled: Path, folder: Path) -> None:
    store = open_store(folder, identity=b"j" * 32)
    assert load(store, range(5)) == []
    save(store, range(100, 140))
    assert not filled.exists(), "files of another identity go first"
    assert load(store, range(139, 140)) == pages_of(range(139, 140))
    store.close(5)


def test_the_bound_holds_and_the_oldest_go(folder: Path) -> None:
    store = open_store(folder)
    for number in range(60):
        save(store, range(number, number + 1))
        taken = sum(path.stat().st_size for path in folder.glob("*/*.kv"))
        assert taken <= FEW.max_bytes, f"{taken} bytes after {number + 1} pages"
        if number == 4:
            assert load(store, range(0, 2)) == pages_of(range(0, 2))
    stats = store.stats()
    assert stats.num_evicted > 0 and stats.num_bytes <= FEW.max_bytes
    assert load(store, range(55, 60)) == pages_of(range(55, 60))
    assert store.num_held([key_of(2)]) == 0, "the oldest page that was not used is gone"
    store.close(5)


def test_used_pages_get_a_second_chance(folder: Path) -> None:
    store = open_store(folder)
    for number in range(40):
        save(store, range(number, number + 1))
        if number >= 3:
            assert load(store, range(0, 1)) == pages_of(range(0, 1)), f"after {number + 1} pages"
    store.close(5)


def test_expired_pages_are_not_found(folder: Path) -> None:
    now = [1000.0]
    limits = DiskLimits(max_bytes=FEW.max_bytes, min_free_bytes=0, ttl_s=60)
    store = open_store(folder, limits, clock=lambda: now[0])
    save(store, range(3))
    now[0] += 59
    assert load(store, range(3)) == pages_of(range(3))
    now[0] += 2
    assert load(store, range(3)) == []
    store.close(5)
    store = open_store(folder, limits, clock=lambda: now[0])
    assert store.stats().num_pages == 0
    store.close(5)


def test_the_budget_of_a_day_holds_over_restarts(folder: Path) -> None:
    now = [86400.0 * 3]
    limits = DiskLimits(max_bytes=2**26, min_free_bytes=0, write_bytes_per_day=6 * SLOT)
    total = 0
    for _ in range(3):
        store = open_store(folder, limits, clock=lambda: now[0])
        save(store, range(total * 10, total * 10 + 4))
        total += store.stats().saves.get("saved", 0)
        store.close(5)
    assert 4 <= total <= 6
    now[0] += 86400.0
    store = open_store(folder, limits, clock=lambda: now[0])
    save(store, range(500, 503))
    assert store.stats().saves["saved"] == 3
    store.close(5)


def test_second_chances_count_in_the_budget_of_a_day(folder: Path) -> None:
    budget = 60 * SLOT
    limits = DiskLimits(max_bytes=FEW.max_bytes, min_free_bytes=0, write_bytes_per_day=budget)
    store = open_store(folder, limits)
    for first in range(0, 100, 4):
        save(store, range(first, first + 4))
        load(store, range(4))  # they are written again when their file goes
    stats = store.stats()
    assert stats.num_evicted > 0 and stats.saves["over_budget"] > 0
    assert budget - 4 * SLOT < stats.written_bytes <= budget
    store.close(5)


def test_no_free_space_stores_nothing_and_serves_on(folder: Path) -> None:
    store = open_store(folder, DiskLimits(max_bytes=FEW.max_bytes, min_free_bytes=2**60))
    save(store, range(3))
    assert store.stats().saves == {"dropped": 3}
    store.close(5)


def test_a_full_disk_shrinks_the_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []
    real = segment_module.os.posix_fallocate

    def allocate(descriptor: int, offset: int, size: int) -> None:
        if len(made) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(size)
        real(descriptor, offset, size)

    monkeypatch.setattr(segment_module.os, "posix_fallocate", allocate)
    store = open_store(folder)
    save(store, range(20))
    made.pop()  # the evicted file gave its space back
    save(store, range(20, 24))
    assert store.stats().capacity_bytes < FEW.max_bytes
    assert sum("is full" in record.message for record in caplog.records) >= 1
    assert load(store, range(23, 24)) == pages_of(range(23, 24))
    store.close(5)


def test_writing_stops_after_three_failures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(folder)
    save(store, range(2))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Segment, "write", fail)
    for number in range(2, 7):
        store.save(SavedPage(key_of(number), b"p" * 32, 16, page_of(number)))
    wait_for(lambda: not store.stats().is_writing)
    assert "stopped writing" in caplog.text and "Input/output error" in store.stats().state
    assert store.room == 0
    assert load(store, range(2)) == pages_of(range(2)), "it still reads"
    store.close(5)


def test_a_read_error_is_a_page_not_found(
    filled: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(folder)

    def fail(*_: object) -> NDArray[np.uint8]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Segment, "read", fail)
    assert load(store, range(5)) == []
    monkeypatch.undo()
    assert load(store, range(5)) == pages_of(range(5))
    assert store.stats().loads["failed"] == 1
    store.close(5)


def test_a_load_that_is_given_up_keeps_what_was_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, may_read, real = open_store(folder), threading.Semaphore(0), Segment.read
    save(store, range(30))

    def read(segment: Segment, slot: int) -> NDArray[np.uint8]:
        assert may_read.acquire(timeout=60)
        return real(segment, slot)

    monkeypatch.setattr(Segment, "read", read)
    store.load(7, [key_of(number) for number in range(30)])
    may_read.release(5)
    wait_for(lambda: (now := store.progress(7)) is not None and now.num_read == 5)
    pages = store.read_pages(7, 0)  # the two threads read parts that follow each other
    assert [page.tobytes() for page in pages] == pages_of(range(len(pages)))
    assert len(store.read_pages(7, 1)) == max(0, len(pages) - 1)
    assert len(store.cancel(7)) == len(pages)
    assert store.take_done() == []
    may_read.release(2)  # those that the two threads are at
    done: list[LoadDone] = []
    wait_for(lambda: bool(done.extend(store.take_done()) or done))
    assert (done[0].job, done[0].num_wanted, len(done[0].pages) < 8) == (7, 30, True)
    assert store.progress(7) is None and store.cancel(7) == store.read_pages(7, 0) == ()
    may_read.release(1000)
    assert load(store, range(30)) == pages_of(range(30))
    store.close(5)


def test_a_part_that_grows_while_it_is_taken_leaves_no_gap() -> None:
    """A page that arrives in between must not let the next part follow a gap."""
    pages = [np.full(1, number, dtype=np.uint8) for number in range(4)]

    class Growing(list[NDArray[np.uint8]]):
        def __len__(self) -> int:
            return 2  # the second page arrives before the length is looked at

    run = _ReadRun(1, [[b"a", b"b"], [b"c", b"d"]], pages=[Growing(pages[:1]), pages[2:]])
    assert [int(page[0]) for page in run.beginning()] == [0]


def test_a_removed_folder_ends_nothing(folder: Path) -> None:
    store = open_store(folder)
    save(store, range(2))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert load(store, range(2)) == pages_of(range(2)), "open files are still there"
    save(store, range(10, 40))
    store.close(5)


def test_a_weight_file_that_cannot_be_read_leaves_the_tier_off(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def identify() -> StoreIdentity:
        raise OSError(errno.EIO, "Input/output error")

    claimed = DiskFolder.claim(folder)
    store = DiskStore(claimed, FEW, page_bytes=PAGE, geometry=GEOMETRY, identify=identify)
    wait_for(lambda: "writing failed" in store.stats().state)
    assert store.num_held([key_of(0)]) == 0 and store.room == 0
    assert "stopped writing" in caplog.text
    store.close(5)


def test_keys_that_begin_alike_are_not_confused(folder: Path) -> None:
    """An index that looks at the first bytes only compares the whole key."""
    store = open_store(folder)
    save(store, range(1))
    other = key_of(0)[:8] + key_of(1)[8:]
    assert not store.has(other) and store.num_held([other]) == 0
    store.load(7, [other])
    done: list[LoadDone] = []
    wait_for(lambda: bool(done.extend(store.take_done()) or done))
    assert done[0].pages == ()
    assert load(store, range(1)) == pages_of(range(1))
    store.close(5)
