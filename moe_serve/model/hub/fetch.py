"""Fetches a model: resolves its revision to a commit, checks it, and receives its files once.

Every process of a host waits for the one that fetches. A snapshot counts as complete when all files
that were listed for it are there with their sizes.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_serve.config.logs import STARTUP_LOG
from moe_serve.errors import CheckpointError, ConfigError, HubError, HubUnreachableError
from moe_serve.model.hub.file_download import FileDownload
from moe_serve.model.hub.hub_client import HubClient
from moe_serve.model.hub.hub_name import HubName
from moe_serve.model.hub.hub_settings import HubSettings
from moe_serve.model.hub.repo_files import CONFIG, INDEX, RepoFile, RepoListing
from moe_serve.model.hub.repo_folder import RepoFolder, indexed_files, size_of, unwritable

ShowBytes = Callable[[int, int], None]  # bytes received, bytes in all
CheckConfig = Callable[[Path], None]  # raises CheckpointError or ConfigError for a config.json

_log = logging.getLogger(STARTUP_LOG)
_SPARE_BYTES = 256 << 20  # of the disk, left free
_JOIN_S = 1.0  # a thread that waits for bytes ends with the process


def fetch_model(
    name: HubName, settings: HubSettings, check: CheckConfig, show: ShowBytes | None = None
) -> Path:
    """Returns the folder of a complete snapshot, after fetching what it lacks. Raises HubError.

    `check` is called before any weights are fetched. Without the network, or with a pinned commit,
    a complete snapshot in the cache is used as it is.
    """
    with _Fetching(name, settings) as fetching:
        return fetching.whole(check, show)


def fetch_config(name: HubName, settings: HubSettings) -> Path:
    """Returns the folder of a snapshot that has at least config.json. Raises HubError."""
    with _Fetching(name, settings) as fetching:
        return fetching.config_only()


def cached_model(name: HubName, settings: HubSettings) -> Path:
    """Returns the folder of a complete snapshot in the cache. Raises HubError; the network is not
    used."""
    repo = RepoFolder.of(settings.cache, name)
    commit = repo.commit_of(name.revision)
    how = f"`moe-serve models pull {name}`"
    if settings.is_offline:
        how += " without HF_HUB_OFFLINE"
    if commit is None or not repo.snapshot(commit).is_dir():
        raise HubError(f"{name} is not in the cache {settings.cache}: fetch it with {how}.")
    missing = repo.missing_files(commit)
    if missing:
        raise HubError(
            f"{name} is not complete in the cache {settings.cache}: {len(missing)} of the files of "
            f"{commit[:12]} are missing, such as {missing[0]}; fetch them with {how}."
        )
    note_use(repo.snapshot(commit))
    return repo.snapshot(commit)


def free_disk_bytes(folder: Path) -> int:
    """Returns the free bytes of the disk that holds a folder, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def note_use(snapshot: Path) -> None:
    """Sets the time of the last access, as many disks are mounted without it."""
    try:
        path = snapshot / CONFIG
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except OSError:
        _log.debug("the time of use of %s cannot be noted", snapshot)


class _Fetching:
    """The work on one model: its client, its folder in the cache, and its threads."""

    def __init__(self, name: HubName, settings: HubSettings) -> None:
        self._name, self._settings = name, settings
        self._folder = RepoFolder.of(settings.cache, name)
        self._stop = threading.Event()
        self._client: HubClient | None = None

    def __enter__(self) -> _Fetching:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._client is not None:
            self._client.__exit__()

    def whole(self, check: CheckConfig, show: ShowBytes | None) -> Path:
        if self._settings.is_offline or (self._name.is_pinned and self._is_complete()):
            return cached_model(self._name, self._settings)
        listing = self._listing()
        if listing is None:
            return cached_model(self._name, self._settings)
        snapshot = self._folder.snapshot(listing.commit)
        noted = self._folder.noted_files(listing.commit)
        if noted is None or self._folder.missing_files(listing.commit):
            listing.check()
            with self._folder.lock(self._say_waiting):
                self._fetch(listing, check, show)
        try:
            self._folder.set_commit(self._name.revision, listing.commit)
        except OSError as error:
            _log.warning("the branch of %s cannot be noted: %s", self._name, error.strerror)
        note_use(snapshot)
        return snapshot

    def config_only(self) -> Path:
        commit = self._folder.commit_of(self._name.revision)
        is_known = commit is not None and size_of(self._folder.snapshot(commit) / CONFIG)
        if self._settings.is_offline or (self._name.is_pinned and is_known):
            if commit is None or not is_known:
                return cached_model(
                    self._name, self._settings
                )  # raises an error that names the missing files
            return self._folder.snapshot(commit)
        listing = self._listing()
        if listing is None:
            return cached_model(self._name, self._settings)
        if CONFIG not in listing.files:
            listing.check()
        with self._folder.lock(self._say_waiting):
            self._receive(listing, [listing.files[CONFIG]], None)
        return self._folder.snapshot(listing.commit)

    def _listing(self) -> RepoListing | None:
        """Asks the hub; None if it cannot be reached and the cache has a complete snapshot."""
        self._client = HubClient(self._settings, self._stop)
        has_copy = self._is_complete()
        try:
            return self._client.listing(self._name, is_patient=not has_copy)
        except HubUnreachableError as error:
            if not has_copy:
                raise
            _log.warning("%s The copy of %s in the cache is used.", error, self._name)
            return None

    def _is_complete(self) -> bool:
        commit = self._folder.commit_of(self._name.revision)
        return (
            commit is not None
            and self._folder.snapshot(commit).is_dir()
            and not self._folder.missing_files(commit)
        )

    def _say_waiting(self) -> None:
        _log.warning("another process fetches %s: waiting for it", self._name)

    def _fetch(self, listing: RepoListing, check: CheckConfig, show: ShowBytes | None) -> None:
        """Receives the small files that decide, check them, and receive the rest."""
        snapshot, files = self._folder.snapshot(listing.commit), listing.files
        self._receive(listing, [files[CONFIG]], None)
        small = listing.small_files()
        try:
            check(snapshot)
        except (CheckpointError, ConfigError) as error:
            raise HubError(
                f"{self._name} cannot be served, so its weights are not downloaded: {error}"
            ) from error
        shards = None
        if INDEX in files:
            self._receive(listing, [files[INDEX]], None)
            shards = indexed_files(snapshot)
            if shards is None:
                raise HubError(f"{self._name} has an {INDEX} without a readable weight_map.")
        wanted = [*small, *listing.weight_files(shards)]
        self._check_space(listing, wanted)
        try:
            self._folder.note_files(listing.commit, wanted)
        except OSError as error:
            raise unwritable(self._settings.cache, error) from error
        self._receive(listing, wanted, show)

    def _check_space(self, listing: RepoListing, files: Sequence[RepoFile]) -> None:
        """Raises HubError if the missing bytes do not fit on the disk."""
        cache, needed = self._settings.cache, sum(map(self._folder.missing_bytes, files))
        total, free = sum(file.size for file in files), free_disk_bytes(cache)
        if needed and needed + _SPARE_BYTES > free:
            raise HubError(
                f"{self._name} does not fit: {shown_bytes(needed)} of its {shown_bytes(total)} are "
                f"still to be downloaded, and the disk of {cache} has {shown_bytes(free)} free "
                f"({shown_bytes(_SPARE_BYTES)} must stay free): free space with `moe-serve models "
                "remove`, or set HF_HUB_CACHE to a folder on another disk."
            )
        if needed:
            _log.info(
                "downloading %s of %s at commit %s into %s",
                shown_bytes(needed),
                self._name.repo,
                listing.commit,
                cache,
            )

    def _receive(
        self, listing: RepoListing, files: Sequence[RepoFile], show: ShowBytes | None
    ) -> None:
        """Receives files, several at once; the first error ends all. Weights begin last."""
        assert self._client is not None, "a listing was asked for"
        contents = {file.digest: file for file in files}
        total = sum(file.size for file in contents.values())
        missing = sum(map(self._folder.missing_bytes, contents.values()))
        done = _Count(total - missing, total, show)
        done.add(0)
        work: queue.SimpleQueue[FileDownload] = queue.SimpleQueue()
        for digest, file in contents.items():
            names = [each.name for each in files if each.digest == digest]
            work.put(
                FileDownload(self._client, listing.pinned, self._folder, file, names, done.add)
            )
        errors: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        num_threads = min(len(contents), self._settings.num_streams)
        threads = [
            threading.Thread(target=_drain, args=(work, errors, self._stop), daemon=True)
            for _ in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                if (error := errors.get()) is not None:
                    raise error
        except BaseException:
            self._stop.set()
            raise
        finally:
            for thread in threads:
                thread.join(_JOIN_S)


def _drain(
    work: queue.SimpleQueue[FileDownload],
    errors: queue.SimpleQueue[Exception | None],
    stop: threading.Event,
) -> None:
    """Runs downloads until none is left, and reports the error that ended this thread, or None."""
    try:
        while not stop.is_set():
            work.get_nowait().run()
    except queue.Empty:
        errors.put(None)
    except Exception as error:  # a thread must report whatever ends it
        errors.put(error)
    else:
        errors.put(None)


@dataclass(slots=True)
class _Count:
    """The bytes received by all threads."""

    done: int
    total: int
    show: ShowBytes | None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            if self.show is not None:
                self.show(self.done, self.total)


def shown_bytes(number: int) -> str:
    """Returns a number of bytes for people: "12.3 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
